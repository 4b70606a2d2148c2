"""Weight versions on their way to an engine, with a real broker and an engine that only speaks the five routes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from clawpipe.actors.engines.transfer import (
    PushFailed,
    Replica,
    WeightPusher,
    apply,
    check_tensors,
    model_shapes,
    unhealthy,
)
from clawpipe.actors.engines.vllm import ready_for_weights
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import PushConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import PushReport, WeightVersion

SHAPES = {"embed.weight": (4, 2), "head.weight": (4, 2)}


@dataclass
class FakeEngine:
    """vLLM's weight routes: knows its version, in which state it is, and at which route it breaks."""

    breaks_at: str = ""
    lies: bool = False
    load_s: float = 0.0
    served: str = "default"
    paused: bool = False
    routes: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        route = request.url.path
        self.routes.append(route)
        if route == self.breaks_at:
            return httpx.Response(500, text="worker died")
        body = json.loads(request.content or b"{}")
        match route:
            case "/pause":
                assert request.url.params["mode"] == "keep"
                self.paused = True
            case "/update_weights":
                assert self.paused
                await anyio.sleep(self.load_s)
                self.loaded.append(Path(body["update_info"]["path"]).name)
            case "/finish_weight_update":
                self.served = "17" if self.lies else body["weight_version"]
            case "/resume":
                self.paused = False
        return httpx.Response(200, json={"weight_version": self.served})

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(self.handle))


def weights(folder: Path, version: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> WeightVersion:
    path = folder / f"v{version}.safetensors"
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    return WeightVersion(version=version, path=str(path), num_bytes=path.stat().st_size, created_s=time.time())


@asynccontextmanager
async def connected(nats_server: Any) -> AsyncIterator[Broker]:
    async with Broker.connect(nats_server.url, nats_server.token) as broker:
        await broker.setup(64 * 1024 * 1024)
        yield broker


def pusher(broker: Broker) -> WeightPusher:
    return WeightPusher(broker, PushConfig(timeout_s=5), SHAPES, EventLog("engine"))


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while True:
            if condition():
                return
            await anyio.sleep(0.01)


def test_of_several_waiting_versions_only_the_newest_is_applied_and_reported(nats_server: Any, tmp_path: Path) -> None:
    engine, replica = FakeEngine(), Replica("vllm-0", "http://engine", healthy=True)

    async def run() -> tuple[list[PushReport], Any]:
        async with connected(nats_server) as broker, engine.client() as client:
            for version in (1, 2, 5):
                await broker.publish_weights(weights(tmp_path, version))
            async with anyio.create_task_group() as group:
                group.start_soon(pusher(broker).follow, replica, client)
                await until(lambda: replica.version == 5)
                await broker.publish_weights(weights(tmp_path, 6))
                await until(lambda: replica.version == 6)
                reports = []
                async for report in broker.pushes():
                    reports.append(report)
                    if report.version == 6:
                        break
                async for states in broker.engines():
                    group.cancel_scope.cancel()
                    return reports, states["vllm-0"]
        raise AssertionError

    reports, state = anyio.run(run)
    assert engine.loaded == ["v5.safetensors", "v6.safetensors"]
    assert [(report.engine, report.version) for report in reports] == [("vllm-0", 5), ("vllm-0", 6)]
    assert all(0 < report.pause_s < 5 for report in reports)
    assert (state.version, state.healthy, state.url) == (6, True, "http://engine")


def test_a_version_whose_file_is_gone_is_passed_over_and_the_replica_stays_without_weights(
    nats_server: Any, tmp_path: Path
) -> None:
    engine, replica = FakeEngine(), Replica("vllm-0", "http://engine", healthy=True)

    async def run() -> list[int | None]:
        async with connected(nats_server) as broker, engine.client() as client:
            await broker.publish_weights(msgspec.structs.replace(weights(tmp_path, 3), path="/gone/v3.safetensors"))
            async with anyio.create_task_group() as group:
                group.start_soon(pusher(broker).follow, replica, client)
                await anyio.sleep(1.0)
                before = replica.version
                await broker.publish_weights(weights(tmp_path, 4))
                await until(lambda: replica.version == 4)
                group.cancel_scope.cancel()
        return [before, replica.version]

    assert anyio.run(run) == [None, 4]
    assert engine.loaded == ["v4.safetensors"]


def test_replicas_are_paused_one_after_the_other(nats_server: Any, tmp_path: Path) -> None:
    engines = [FakeEngine(load_s=0.1), FakeEngine(load_s=0.1)]
    paused_at_once: list[int] = []

    async def run() -> None:
        async with connected(nats_server) as broker, engines[0].client() as one, engines[1].client() as two:
            await broker.publish_weights(weights(tmp_path, 1))
            shared = pusher(broker)
            replicas = [Replica(f"vllm-{index}", "http://engine") for index in range(2)]
            async with anyio.create_task_group() as group:
                for replica, client in zip(replicas, (one, two), strict=True):
                    group.start_soon(shared.follow, replica, client)
                while any(replica.version is None for replica in replicas):
                    paused_at_once.append(sum(engine.paused for engine in engines))
                    await anyio.sleep(0.005)
                group.cancel_scope.cancel()

    anyio.run(run)
    assert max(paused_at_once) == 1


@pytest.mark.parametrize(
    "route", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
)
def test_an_engine_that_fails_at_any_step_is_not_trusted(tmp_path: Path, route: str) -> None:
    engine = FakeEngine(breaks_at=route)

    async def run() -> None:
        async with engine.client() as client:
            await apply(client, weights(tmp_path, 2), clear_cache=True, timeout_s=5)

    with pytest.raises(PushFailed, match=f"{route}: status 500: worker died"):
        anyio.run(run)
    assert engine.routes[-1] == route


def test_an_engine_that_does_not_confirm_the_version_is_never_resumed(tmp_path: Path) -> None:
    engine = FakeEngine(lies=True)

    async def run() -> None:
        async with engine.client() as client:
            await apply(client, weights(tmp_path, 2), clear_cache=True, timeout_s=5)

    with pytest.raises(PushFailed, match="weight version 2: the engine says that it serves '17'"):
        anyio.run(run)
    assert "/resume" not in engine.routes


def test_a_push_that_takes_too_long_fails_with_the_step_it_hung_in(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeEngine(load_s=60).client() as client:
            await apply(client, weights(tmp_path, 2), clear_cache=True, timeout_s=0.2)

    with pytest.raises(PushFailed, match="weight version 2: /update_weights failed: TimeoutError"):
        anyio.run(run)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_the_pause_says_whether_the_cache_is_cleared(tmp_path: Path, clear_cache: bool) -> None:
    asked: list[str] = []
    engine = FakeEngine()

    async def note(request: httpx.Request) -> httpx.Response:
        asked.extend(request.url.params.get_list("clear_cache"))
        return await engine.handle(request)

    async def run() -> float:
        async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(note)) as client:
            return await apply(client, weights(tmp_path, 2), clear_cache=clear_cache, timeout_s=5)

    engine.load_s = 0.1
    assert 0.1 <= anyio.run(run) < 3
    assert asked == [str(clear_cache).lower()]


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"embed.weight": (4, 2)}, "tensor head.weight is missing in the file and (4, 2) in the model"),
        ({**SHAPES, "extra": (1,)}, "tensor extra is (1,) in the file and unknown in the model"),
        ({**SHAPES, "head.weight": (4, 3)}, "tensor head.weight is (4, 3) in the file and (4, 2) in the model"),
    ],
)
def test_a_file_of_another_model_is_refused_before_any_pause(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], complaint: str
) -> None:
    with pytest.raises(EngineError) as caught:
        check_tensors(weights(tmp_path, 9, shapes), SHAPES)
    assert f"weight version 9 ({tmp_path}/v9.safetensors): {complaint}" in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    staged = weights(tmp_path, 9)
    Path(staged.path).write_bytes(Path(staged.path).read_bytes()[:-8])
    with pytest.raises(EngineError, match="no readable safetensors file"):
        check_tensors(staged, SHAPES)


def test_a_model_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no \*\.safetensors in it"):
        model_shapes(tmp_path)


def test_a_server_without_the_routes_for_weights_says_how_to_start_it() -> None:
    async def ask() -> bool:
        transport = httpx.MockTransport(lambda request: httpx.Response(404))
        async with httpx.AsyncClient(base_url="http://engine", transport=transport) as client:
            return await ready_for_weights(client, "vllm-0")

    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1, --enable-scale-out"):
        anyio.run(ask)


def test_a_server_that_is_not_up_yet_is_waited_for() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async def ask() -> bool:
        async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(refuse)) as client:
            return await ready_for_weights(client, "vllm-0")

    assert anyio.run(ask) is False


@pytest.mark.parametrize(
    ("served", "complaint"), [("3", ""), ("default", "it serves version 'default' after it was given 3")]
)
def test_an_engine_that_serves_another_version_than_it_was_given_is_found_out(served: str, complaint: str) -> None:
    async def look() -> str:
        replica = Replica("vllm-0", "http://engine", version=3, healthy=True)
        keeper = WeightPusher(None, PushConfig(), SHAPES, EventLog("engine"))  # type: ignore[arg-type]
        async with FakeEngine(served=served).client() as client:
            return await keeper.wrong_version(replica, client, 5)

    assert anyio.run(look) == complaint


@pytest.mark.parametrize(("status", "complaint"), [(200, ""), (503, "its health check gave status 503")])
def test_a_health_check_is_its_status(status: int, complaint: str) -> None:
    async def look() -> str:
        transport = httpx.MockTransport(lambda request: httpx.Response(status))
        async with httpx.AsyncClient(base_url="http://engine", transport=transport) as client:
            return await unhealthy(client, 5)

    assert anyio.run(look) == complaint
