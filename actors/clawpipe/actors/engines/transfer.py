"""Weights into a running engine: pause (keep what runs), swap, resume.

The learner stages a version as a safetensors file and announces it; each engine takes the newest one it has not
got. All that can be checked is checked before the pause; an engine that fails after it is never trusted again, since
nobody knows which weights it holds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from safetensors import SafetensorError, safe_open

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import PushConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import EngineState, PushReport, WeightVersion

Shapes = Mapping[str, tuple[int, ...]]


class PushFailed(Exception):
    """The engine failed between pause and resume: its weights are not to be trusted."""


@dataclass
class Replica:
    """One engine and what it is known to serve. `version` None: not known to serve any version of the run."""

    name: str
    url: str
    version: int | None = None
    healthy: bool = False

    def state(self) -> EngineState:
        """Its entry in the control bucket, as of now."""
        return EngineState(
            name=self.name, url=self.url, version=self.version, healthy=self.healthy, since_s=time.time()
        )


class WeightPusher:
    """Brings replicas to the newest version, one after the other, so that at most one is paused at a time."""

    def __init__(self, broker: Broker, config: PushConfig, shapes: Shapes, log: EventLog) -> None:
        self._broker = broker
        self._config = config
        self._shapes = shapes
        self._log = log
        self._rolling = anyio.Lock()

    async def follow(self, replica: Replica, client: httpx.AsyncClient) -> None:
        """Keeps a healthy replica without weights, or with old ones, at the newest version; never ends.

        PushFailed when it must be replaced; EngineError when the version itself is unusable.
        """
        await init_transfer(client, self._config.timeout_s)
        async with aclosing(self._broker.weights()) as versions:  # type: ignore[type-var]
            async for weights in versions:
                if await anyio.to_thread.run_sync(self._usable, weights):
                    async with self._rolling:
                        await self._push(replica, client, weights)

    async def wrong_version(self, replica: Replica, client: httpx.AsyncClient, timeout_s: float) -> str:
        """Whether a replica serves something else than it was given, in words; empty when not.

        Asked between two pushes; EngineCore itself answers, so one that hangs is found out too.
        """
        async with self._rolling:
            try:
                with anyio.fail_after(timeout_s):
                    served = await served_version(client)
            except (httpx.HTTPError, TimeoutError) as err:
                return f"it does not say which version it serves: {err!r}"
        if replica.version is not None and served != str(replica.version):
            return f"it serves version {served!r} after it was given {replica.version}"
        return ""

    def _usable(self, weights: WeightVersion) -> bool:
        """False for a version of an earlier start of the run, whose file is gone: a newer one will come."""
        if not Path(weights.path).exists():
            self._log.warning("weights are gone; waiting for newer ones", version=weights.version, path=weights.path)
            return False
        check_tensors(weights, self._shapes)
        return True

    async def _push(self, replica: Replica, client: httpx.AsyncClient, weights: WeightVersion) -> None:
        pause_s = await apply(client, weights, clear_cache=self._config.clear_cache, timeout_s=self._config.timeout_s)
        replica.version = weights.version
        await self._broker.set_engine(replica.state())
        await self._broker.report_push(
            PushReport(engine=replica.name, version=weights.version, pause_s=pause_s, applied_s=time.time())
        )
        self._log.info("weights pushed", engine=replica.name, version=weights.version, pause_s=round(pause_s, 4))


async def init_transfer(client: httpx.AsyncClient, timeout_s: float, **init_info: Any) -> None:
    """Readies a freshly started engine for weight updates. PushFailed when it refuses."""
    route = "/init_weight_transfer_engine"
    try:
        with anyio.fail_after(timeout_s):
            await _post(client, route, json={"init_info": init_info})
    except (httpx.HTTPError, TimeoutError) as err:
        raise PushFailed(f"{route} failed: {err!r}") from err


async def apply(client: httpx.AsyncClient, weights: WeightVersion, *, clear_cache: bool, timeout_s: float) -> float:
    """Swaps the weights of a running engine and returns how long it was paused, in seconds.

    Running requests are kept and go on under the new weights. With `clear_cache` their keys and values are
    computed again, and no later prompt can hit blocks of the old weights. PushFailed when a step fails or all of
    them take longer than `timeout_s`.
    """
    version = str(weights.version)
    step = "/pause"
    started = time.perf_counter()
    try:
        with anyio.fail_after(timeout_s):
            await _post(client, step, params={"mode": "keep", "clear_cache": str(clear_cache).lower()})
            step = "/start_weight_update"
            await _post(client, step)
            step = "/update_weights"
            await _post(client, step, json={"update_info": {"path": weights.path}})
            step = "/finish_weight_update"
            await _post(client, step, json={"weight_version": version})
            step = "/weight_info"
            await _confirm(client, version)
            step = "/resume"
            await _post(client, step)
    except (httpx.HTTPError, TimeoutError) as err:
        raise PushFailed(f"weight version {version}: {step} failed: {err!r}") from err
    return time.perf_counter() - started


async def unhealthy(client: httpx.AsyncClient, timeout_s: float) -> str:
    """What is wrong with an engine that ought to be healthy, in words; empty when nothing is."""
    try:
        with anyio.fail_after(timeout_s):
            status = (await client.get("/health")).status_code
    except (httpx.HTTPError, TimeoutError) as err:
        return f"its health check failed: {err!r}"
    return "" if status == 200 else f"its health check gave status {status}"


async def served_version(client: httpx.AsyncClient) -> str:
    """What the engine says it serves: the last version given to it, or "default"."""
    response = await client.get("/weight_info")
    response.raise_for_status()
    return str(response.json()["weight_version"])


def read_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of some safetensors files; only their headers are read.

    EngineError when one of them cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, "np") as file:
                shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as err:
            raise EngineError(f"{path}: no readable safetensors file ({err})") from err
    return shapes


def model_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Hugging Face folder. EngineError when it has none."""
    shapes = read_shapes(sorted(model_dir.glob("*.safetensors")))
    if not shapes:
        raise EngineError(f"{model_dir}: no *.safetensors in it; engines start from such a folder")
    return shapes


def check_tensors(weights: WeightVersion, expected: Shapes) -> None:
    """EngineError unless the file holds exactly the model's tensors: vLLM would keep old ones without a word."""
    found = read_shapes([Path(weights.path)])
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise EngineError(
                f"weight version {weights.version} ({weights.path}): tensor {name} is "
                f"{found.get(name) or 'missing'} in the file and {expected.get(name) or 'unknown'} in the model; "
                "the learner wrote a file for another model"
            )


async def _confirm(client: httpx.AsyncClient, version: str) -> None:
    served = await served_version(client)
    if served != version:
        raise PushFailed(f"weight version {version}: the engine says that it serves {served!r}")


async def _post(client: httpx.AsyncClient, route: str, **arguments: Any) -> None:
    response = await client.post(route, **arguments)
    if response.status_code != 200:
        raise PushFailed(f"{route}: status {response.status_code}: {response.text[:300]}")
