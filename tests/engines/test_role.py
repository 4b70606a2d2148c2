"""The role `engine` as a process of its own: what is killed comes back or goes away, and nothing is left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from psutil import STATUS_STOPPED, Process

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import AgentLoopConfig, Config, EnginesConfig, FilingTasksConfig, ModelConfig
from clawpipe.pipeline.launch import console_entry
from clawpipe.pipeline.processes import OWNER, free_port, owned, sweep
from clawpipe.pipeline.records import EngineState, WeightVersion
from clawpipe.pipeline.runtime import Runtime
from engine_fixture import CONTEXT_TOKENS, ENGINES, Oracle, RunningEngine, build_model, generate, prompt, worst

pytestmark = pytest.mark.engine


@pytest.fixture
def runtime(tmp_path: Path, nats_server: Any, tiny_model_dir: Path) -> Iterator[Runtime]:
    """A prepared run folder; whatever of the run is left after the test is ended."""
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    runtime = Runtime(
        run_id=f"test-role-{os.getpid()}-{free_port()}",
        run_dir=str(run_dir),
        nats_url=nats_server.url,
        nats_token=nats_server.token,
        engine_urls=(f"http://127.0.0.1:{free_port()}",),
        init_model_dir=str(tiny_model_dir),
        push_dir=str(tmp_path),
    )
    prepare(runtime, ENGINES)
    yield runtime
    sweep(runtime.run_id)


def prepare(runtime: Runtime, engines: EnginesConfig) -> None:
    config = Config(
        model=ModelConfig(path=runtime.init_model_dir, context_tokens=CONTEXT_TOKENS),
        harness=(AgentLoopConfig(),),
        tasks=(FilingTasksConfig(),),
        engines=msgspec.structs.replace(engines, health_interval_s=0.5),
    )
    runtime.path("config.json").write_bytes(configuration.dump(config))
    runtimes.save(runtime)


@contextmanager
def role(runtime: Runtime) -> Iterator[subprocess.Popen[bytes]]:
    """The role as the launcher starts it."""
    argv = [console_entry(), "run", "engine", "--run-dir", runtime.run_dir]
    with runtime.path("logs", "engine.log").open("ab") as log:
        process = subprocess.Popen(
            argv,
            env={**os.environ, OWNER: f"{runtime.run_id}/engine"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(runtime: Runtime) -> AsyncIterator[Broker]:
    async with Broker.connect(runtime.nats_url, runtime.nats_token) as broker:
        await broker.setup(64 * 1024 * 1024)
        yield broker


async def set_up(runtime: Runtime) -> None:
    async with connected(runtime):
        return


async def state(broker: Broker, wanted: Callable[[EngineState], bool], timeout_s: float = 240) -> EngineState:
    with anyio.fail_after(timeout_s):
        async for states in broker.engines():
            for found in states.values():
                if wanted(found):
                    return found
    raise AssertionError


def staged(folder: Path, version: int) -> WeightVersion:
    [path] = folder.glob("*.safetensors")
    return WeightVersion(version=version, path=str(path), num_bytes=path.stat().st_size, created_s=time.time())


def processes(runtime: Runtime, command: str = "") -> list[int]:
    """Pids of this run's vLLM processes whose command line has `command` in it."""
    found = []
    for pid in owned(f"{runtime.run_id}/engine/vllm-0"):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        except OSError:
            continue
        if command in line:
            found.append(pid)
    return found


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_whose_core_is_killed_is_replaced_and_serves_the_newest_weights(
    runtime: Runtime, tmp_path: Path
) -> None:
    first, other = Path(runtime.init_model_dir), build_model(tmp_path / "other", seed=1)

    async def run(process: subprocess.Popen[bytes]) -> list[int]:
        async with connected(runtime) as broker:
            await broker.publish_weights(staged(first, 4))
            await state(broker, lambda found: found.version == 4 and found.healthy)
            await broker.publish_weights(staged(other, 9))
            await state(broker, lambda found: found.version == 9)
            [core] = processes(runtime, "EngineCore")
            os.kill(core, signal.SIGKILL)
            lost = await state(broker, lambda found: not found.healthy, 30)
            assert lost.version is None
            await state(broker, lambda found: found.version == 9 and found.healthy)
            ids = prompt(1)
            with httpx.Client(timeout=60) as client:
                answer = generate(client, runtime.engine_urls[0], ids)
            assert answer.spans == [("9", 0, len(answer.ids))]
            assert worst(answer.logprobs, Oracle(other).logprobs(ids, answer.ids)) <= 1e-5
            process.terminate()
            await state(broker, lambda found: not found.healthy, 30)
            pushed: list[int] = []
            async for report in broker.pushes():
                pushed.append(report.version)
                if len(pushed) == 3:
                    break
            return pushed

    with role(runtime) as process:
        pushed = anyio.run(run, process)
        assert process.wait(30) == 0
    assert pushed == [4, 9, 9]
    assert processes(runtime) == []


def test_a_killed_role_leaves_an_orphan_that_the_next_start_ends(runtime: Runtime) -> None:
    anyio.run(set_up, runtime)
    with role(runtime) as process:
        until(lambda: bool(processes(runtime)))
        server = os.getsid(processes(runtime)[0])
        os.kill(server, signal.SIGSTOP)  # what is stopped does not hear that its parent died
        until(lambda: Process(server).status() == STATUS_STOPPED)
        process.kill()
        process.wait()
    assert server in processes(runtime)
    with role(runtime) as process:
        until(lambda: bool(processes(runtime)) and server not in processes(runtime))
        process.terminate()
        assert process.wait(60) == 0
    assert processes(runtime) == []


def test_a_port_in_use_ends_the_role_with_one_line(runtime: Runtime) -> None:
    anyio.run(set_up, runtime)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(runtime.engine_urls[0].rpartition(":")[2])))
        taken.listen()
        with role(runtime) as process:
            assert process.wait(60) == 2
    last = runtime.path("logs", "engine.log").read_text().splitlines()[-1]
    assert last.startswith("clawpipe: vllm-0: port ")
    assert "is in use" in last


def test_an_engine_of_others_gets_weights_and_outlives_the_role(runtime: Runtime, engine: RunningEngine) -> None:
    runtime = msgspec.structs.replace(runtime, engine_urls=(engine.url,))
    prepare(runtime, EnginesConfig(urls=(engine.url,)))
    version = engine.version + 1

    async def run(process: subprocess.Popen[bytes]) -> EngineState:
        async with connected(runtime) as broker:
            await broker.publish_weights(staged(engine.model_dir, version))
            served = await state(broker, lambda found: found.version == version)
            process.terminate()
            await state(broker, lambda found: not found.healthy, 30)
            return served

    with role(runtime) as process:
        served = anyio.run(run, process)
        assert process.wait(30) == 0
    engine.version = version
    assert (served.name, served.url, served.healthy) == ("vllm-0", engine.url, True)
    assert processes(runtime) == []
    assert httpx.get(f"{engine.url}/weight_info").json() == {"weight_version": str(version)}


def test_an_engine_of_others_that_a_broken_push_left_paused_is_refused(runtime: Runtime, engine: RunningEngine) -> None:
    runtime = msgspec.structs.replace(runtime, engine_urls=(engine.url,))
    prepare(runtime, EnginesConfig(urls=(engine.url,)))
    anyio.run(set_up, runtime)
    httpx.post(f"{engine.url}/pause", params={"mode": "keep"}, timeout=60).raise_for_status()
    try:
        with role(runtime) as process:
            assert process.wait(60) == 2
    finally:
        httpx.post(f"{engine.url}/resume", timeout=60).raise_for_status()
    last = runtime.path("logs", "engine.log").read_text().splitlines()[-1]
    assert f"vllm-0 at {engine.url} is paused" in last
