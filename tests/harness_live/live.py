"""One rollout of a real harness: real sandbox, link, proxy and broker; only the engine is scripted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio

from clawpipe.actors import link
from clawpipe.actors.harness import mcp
from clawpipe.actors.harness.base import Harness, Launch, ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.proxy import listen, service
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.proxy_link import connect
from clawpipe.actors.rollout import Workshop, run_rollout
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import (
    Config,
    FilingTasksConfig,
    HarnessConfig,
    ModelConfig,
    ProxyConfig,
    SandboxConfig,
    TinyModelConfig,
    VerifyConfig,
)
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import CallRecord, Role, RolloutManifest, RolloutRequest
from harness_live.books import check_books
from harness_live.faults import Fault, Faulty
from harness_live.finished import Rollout, finished
from harness_live.scripted import Script, ScriptedEngine

MIB = 1024**2
# The grader: which of the expected files hold exactly what they should.
GRADER = b"""
import json, pathlib, sys
here = pathlib.Path(__file__).parent
expected = json.loads((here / "expected.json").read_text())
work = pathlib.Path(sys.argv[1])
def holds(name, text):
    path = work / name
    return path.is_file() and path.read_text() == text
print(json.dumps({name: float(holds(name, text)) for name, text in expected.items()} or {"any": 1.0}))
"""


@dataclass(frozen=True)
class Errand:
    """What a harness is told and given, and the files that it must leave behind."""

    prompt: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    mcp: tuple[McpServer, ...] = ()

    def task(self) -> Task:
        grader = {"check.py": GRADER, "expected.json": json.dumps(dict(self.expected)).encode()}
        return Task(
            task_id="live/0",
            prompt=self.prompt,
            files=self.files,
            grader=grader,
            grader_entry="check.py",
            mcp=self.mcp,
        )


@dataclass
class Watched:
    """The harness's own adapter, with what its program wrote."""

    harness: Harness
    output: bytes = b""

    @property
    def name(self) -> str:
        return self.harness.name

    @property
    def port(self) -> int:
        return self.harness.port

    def launch(self, task: Task) -> Launch:
        return self.harness.launch(task)

    def classify(self, call: ModelCall) -> Role:
        return self.harness.classify(call)

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        self.output = output
        return self.harness.agent_error(exit_code, output)


@dataclass
class Live:
    """Runs rollouts. `options` of `run` are those of [model], [proxy] and [sandbox] that a test wants otherwise."""

    renderer: Renderer
    parser: TurnParser
    nats: Any
    folder: Path
    patch: pytest.MonkeyPatch

    def run(
        self,
        harness: HarnessConfig,
        errand: Errand,
        script: Script,
        faults: Mapping[int, Fault] | None = None,
        *,
        context_tokens: int = 400_000,
        proxy: Mapping[str, Any] | None = None,
        wall_clock_s: float = 240.0,
    ) -> Rollout:
        """One rollout of `harness` on the errand; its books are checked before it is given back."""
        config = _config(harness, context_tokens, proxy or {}, wall_clock_s)
        engine = ScriptedEngine(self.renderer, script)
        watched = Watched(make_harness(harness, config.model))
        faulty: list[Faulty] = []
        self.patch.setattr(service, "serving", partial(_serving, faulty, dict(faults or {})))
        records, manifest = anyio.run(self._roll, config, engine, watched, errand)
        rollout = finished(records, manifest, engine, faulty[0].seen, watched.output)
        check_books(rollout)
        return rollout

    async def _roll(
        self, config: Config, engine: ScriptedEngine, watched: Watched, errand: Errand
    ) -> tuple[list[CallRecord], RolloutManifest]:
        path = self.folder / "proxy.sock"
        request = RolloutRequest(rollout_id="live", group_id="g", task_id="live/0", harness=config.harness[0].name)
        log = EventLog("proxy")
        async with Broker.connect(self.nats.url, self.nats.token) as broker:
            await broker.setup(512 * MIB)
            with listening(path) as server:
                async with anyio.create_task_group() as group:
                    group.start_soon(service.serve, config, server, broker, engine, self.renderer, self.parser, log)
                    await broker.publish_request(request)
                    act = partial(trio.run, _act, config, watched, errand.task(), path, self.folder)
                    await anyio.to_thread.run_sync(act)
                    group.cancel_scope.cancel()
            return await _read_back(broker)


async def _read_back(broker: Broker) -> tuple[list[CallRecord], RolloutManifest]:
    """All that the broker holds of the only rollout, the manifest last."""
    left = await broker.last_records_sequence()
    found: list[CallRecord] = []
    with anyio.fail_after(20):
        async for entry in broker.records():
            assert entry.record is not None, entry.detail
            if isinstance(entry.record, RolloutManifest):
                assert entry.sequence == left, "the manifest is not the last record"
                return found, entry.record
            found.append(entry.record)
    raise AssertionError("the stream ended")


async def _act(config: Config, watched: Watched, task: Task, path: Path, folder: Path) -> None:
    """What the role `actor` does for one slot and one rollout."""
    await trio.to_thread.run_sync(mcp.prepare, mcp.of(config.harness[0]))
    async with Supervisor.open(config.sandbox, "live", folder / "sandboxes") as host:
        workshop = Workshop(
            host=host,
            tasks={task.task_id: task},
            harnesses={watched.name: watched},
            sandbox=config.sandbox,
            verify=config.verify,
            store=folder / "workspaces",
            log=EventLog("actor"),
        )
        async with connect(path) as slot:
            assigned = await slot.ask(link.Take(), link.Assigned)
            await run_rollout(slot, assigned, workshop)


def _config(harness: HarnessConfig, context_tokens: int, proxy: Mapping[str, Any], wall_clock_s: float) -> Config:
    return Config(
        model=ModelConfig(tiny=TinyModelConfig(), context_tokens=context_tokens, reasoning_parser="qwen3"),
        harness=(harness,),
        tasks=(FilingTasksConfig(),),
        proxy=ProxyConfig(**{"settle_timeout_s": 3.0, **proxy}),
        verify=VerifyConfig(timeout_s=30.0),
        sandbox=SandboxConfig(
            slots=1,
            wall_clock_s=wall_clock_s,
            memory_bytes=3072 * MIB,
            cpus=2.0,
            max_processes=512,
            scratch_bytes=512 * MIB,
            workspace_bytes=256 * MIB,
            first_uid=320_000,
        ),
    )


def _serving(faulty: list[Faulty], faults: dict[int, Fault], app: Any) -> Any:
    faulty.append(Faulty(app, faults))
    return listen.serving(faulty[0])
