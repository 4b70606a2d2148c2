"""What the data path's benchmark runs on: a nats-server on one core, the service and the publishers on another.

The service is the process that `clawpipe run pipeline` starts, without a learner: closed rollouts wait in its replay
queue. It says in its log when a rollout is closed, and in status.json how much it has read.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import nats
import psutil
from data_path_load import Load

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import nats_server
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    FilingTasksConfig,
    ModelConfig,
    ObserveConfig,
    ReplayConfig,
    RunConfig,
    ScheduleConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.processes import Child, start
from clawpipe.pipeline.records import RolloutRequest
from clawpipe.pipeline.runtime import Runtime

READY_S = 60.0
POLL_S = 0.02
WATCHED = Path(__file__).with_name("data_path_service.py")


@dataclass(frozen=True, slots=True)
class Where:
    """What runs where. On a machine with a single core, all on that."""

    ours: int  # core of publishers and service
    server: int  # core of the nats-server
    realtime: bool  # before everything else on this machine

    @classmethod
    def here(cls, realtime: bool) -> Where:
        """The first and the last core that this process may use; it is pinned to the first from now on."""
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[0]})
        if realtime:
            _take_precedence()
        return cls(allowed[0], allowed[-1], realtime)


@dataclass
class World:
    """All that runs."""

    folder: Path
    config: Config
    runtime: Runtime
    broker: Broker
    child: Child  # the service
    service: psutil.Process
    server: psutil.Process
    requests: list[RolloutRequest]

    def closed_s(self) -> list[float]:
        """When each rollout that is closed was closed, in seconds since the epoch."""
        events = [json.loads(line) for line in self._log().splitlines() if '"rollout closed"' in line]
        dropped = [event for event in events if event["dropped"]]
        if dropped:
            raise SystemExit(f"a rollout was dropped, which none should be: {dropped[0]}")
        return [event["time"] for event in events]

    def sampled_tokens(self) -> int:
        """Sampled tokens of the calls that the service has read, by its status file."""
        return int(json.loads(self.runtime.path("status.json").read_bytes())["tokens"]["sampled"])

    def check(self) -> None:
        """Ends the benchmark if the service has ended."""
        if self.child.returncode is not None:
            raise SystemExit(f"the pipeline service ended with {self.child.returncode}:\n{self._log()[-2000:]}")

    def _log(self) -> str:
        return (self.folder / "logs" / "pipeline.log").read_text()

    async def stored_bytes(self) -> int:
        """What JetStream holds of records and their blobs, headers and subjects included."""
        client = await nats.connect(self.runtime.nats_url, token=self.runtime.nats_token)
        try:
            streams = await client.jetstream().streams_info()
        finally:
            await client.close()
        prefix = self.config.nats.prefix
        ours = {f"{prefix}-RECORDS", f"OBJ_{prefix}-BLOBS"}
        return sum(int(stream.state.bytes) for stream in streams if stream.config.name in ours)


@asynccontextmanager
async def world(load: Load, where: Where, profile: Path | None = None) -> AsyncIterator[World]:
    """Starts everything, has the service ask for all rollouts of the load; ends it with the block."""
    config = _config(load)
    with _folder() as folder:
        server = nats_server.prepare(folder, port=0, token="", max_store_bytes=config.nats.max_store_bytes)
        runtime = Runtime(
            run_id=f"bench-{time.time_ns()}", run_dir=str(folder), nats_url=server.url, nats_token=server.token
        )
        (folder / "config.json").write_bytes(configuration.dump(config))
        (folder / "tasks.json").write_text(json.dumps(["filing/0"]))
        runtimes.save(runtime)
        clawpipe = str(Path(sysconfig.get_path("scripts"), "clawpipe"))
        argv = [clawpipe, "run", "pipeline", "--run-dir", str(folder)]
        if profile is not None:
            argv = [sys.executable, str(WATCHED), str(folder), str(profile)]
        async with (
            _child(folder, runtime, "nats", list(server.argv), core=where.server) as broker_process,
            _broker(runtime, config) as broker,
            _child(folder, runtime, "pipeline", argv, core=where.ours) as service,
        ):
            made = World(folder, config, runtime, broker, service, _process(service), _process(broker_process), [])
            if where.realtime:
                _take_precedence()
            await _until_asked(made, load)
            yield made


def _config(load: Load) -> Config:
    """One update of all the groups: they are all asked for at once, and none is leased."""
    return Config(
        model=ModelConfig(name="policy", tiny=TinyModelConfig()),
        harness=(AgentLoopConfig(),),
        tasks=(FilingTasksConfig(count=1),),
        run=RunConfig(updates=1),
        schedule=ScheduleConfig(groups_per_step=load.rollouts // load.group_size, group_size=load.group_size),
        replay=ReplayConfig(capacity_tokens=2 * load.num_tokens, close_timeout_s=600.0),
        observe=ObserveConfig(status_interval_s=1.0),
    )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="clawpipe-bench-") as folder:
        yield Path(folder)


@asynccontextmanager
async def _child(folder: Path, runtime: Runtime, name: str, argv: list[str], core: int) -> AsyncIterator[Child]:
    """A process that is born on its core, with all of its threads."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    running: AbstractAsyncContextManager[Child] = start(
        argv, log=folder / "logs" / f"{name}.log", owner=f"{runtime.run_id}/{name}", name=name
    )
    async with running as child:
        os.sched_setaffinity(0, ours)
        yield child


@asynccontextmanager
async def _broker(runtime: Runtime, config: Config) -> AsyncIterator[Broker]:
    assert await nats_server.answers(runtime.nats_url, READY_S)
    async with Broker.of_run(runtime, config.nats) as broker:
        await broker.setup(config.nats.max_store_bytes)
        yield broker


def _process(child: Child) -> psutil.Process:
    """The child itself; setpriv, which starts it, is replaced by it."""
    return psutil.Process(child.pid)


async def _until_asked(made: World, load: Load) -> None:
    """The service runs when its requests are in the work queue."""
    with anyio.fail_after(READY_S):
        while len(made.requests) < load.rollouts:
            made.check()
            await anyio.sleep(0.2)
            made.requests = list(await made.broker.pending_requests())


def _take_precedence() -> None:
    """Real-time scheduling for every thread of ours and of what we started."""
    us = psutil.Process()
    for process in (us, *us.children(recursive=True)):
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))
