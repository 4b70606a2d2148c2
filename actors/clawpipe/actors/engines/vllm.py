"""The role `engine`: keeps the run's vLLM engines alive and at the newest weights.

Embedded engines are started, watched, and replaced when they die; engines of others (`[engines] urls`) are only
watched. A replica counts as usable once the newest published version is in it: the folder that it started from
may be older than the run.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import httpx
import msgspec

from clawpipe.actors.engines.plugin import BACKEND
from clawpipe.actors.engines.server import ServerSettings, running
from clawpipe.actors.engines.transfer import PushFailed, Replica, WeightPusher, model_shapes, unhealthy
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.processes import Child, until_stopped
from clawpipe.pipeline.runtime import Runtime

ANSWER_TIMEOUT_S = 60.0  # EngineCore answers between two steps, and a long prompt is one step
STABLE_S = 300.0  # an engine that lived this long starts with a clean record
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
FAREWELL_S = 2.0


def main(config: Config, runtime: Runtime) -> None:
    """Entry point of the role. EngineError when an engine cannot be started, or dies too often."""
    anyio.run(serve, config, runtime, EventLog("engine"))


async def serve(config: Config, runtime: Runtime, log: EventLog) -> None:
    """Runs until SIGTERM or SIGINT; then nothing of its engines is left."""
    async with (
        until_stopped(),
        Broker.of_run(runtime, config.nats) as broker,
    ):
        pusher = WeightPusher(broker, config.push, model_shapes(Path(runtime.init_model_dir)), log)
        keeper = _Keeper(config, runtime, broker, pusher, log)
        await keeper.forget_others()
        async with anyio.create_task_group() as group:
            for index, url in enumerate(runtime.engine_urls):
                group.start_soon(keeper.keep, Replica(name=f"vllm-{index}", url=url))


@dataclass
class _Keeper:
    config: Config
    runtime: Runtime
    broker: Broker
    pusher: WeightPusher
    log: EventLog

    async def keep(self, replica: Replica) -> None:
        try:
            await (self._keep_foreign(replica) if self.config.engines.urls else self._keep_embedded(replica))
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(FAREWELL_S):
                await self._set(replica, healthy=False)

    async def forget_others(self) -> None:
        """Entries of engines that an earlier start of this run had and this one has not."""
        ours = {f"vllm-{index}" for index in range(len(self.runtime.engine_urls))}
        async for states in self.broker.engines():
            for state in states.values():
                if state.name not in ours:
                    await self.broker.set_engine(msgspec.structs.replace(state, version=None, healthy=False))
            return

    async def _keep_embedded(self, replica: Replica) -> None:
        """Starts the engine again whenever it is lost. One that never came up fails the role at once."""
        deaths, reason = 0, ""
        while deaths <= self.config.engines.max_restarts:
            await self._set(replica, healthy=False)
            began = anyio.current_time()
            try:
                async with self._server(replica) as child:
                    reason = await self._serve_until_lost(replica, child)
            except EngineError as err:
                if not reason:
                    raise
                reason = str(err)
            deaths = 1 if anyio.current_time() - began > STABLE_S else deaths + 1
            self.log.warning("engine lost", engine=replica.name, reason=reason, deaths=deaths)
            await anyio.sleep(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**deaths))
        raise EngineError(
            f"{replica.name} at {replica.url} was lost {deaths} times, at last because {reason}; see "
            f"{self.runtime.path('logs', f'{replica.name}.log')}, or raise [engines] max_restarts"
        )

    def _server(self, replica: Replica) -> AbstractAsyncContextManager[Child]:
        settings = ServerSettings(
            name=replica.name,
            url=replica.url,
            model_dir=self.runtime.init_model_dir,
            model_name=self.config.model.name,
            context_tokens=self.config.model.context_tokens,
            config=self.config.engines,
            # Not from the configuration: an engine started again must not draw the same numbers again.
            seed=random.SystemRandom().getrandbits(31),
        )
        return running(settings, Path(self.runtime.run_dir), f"{self.runtime.run_id}/engine/{replica.name}")

    async def _keep_foreign(self, replica: Replica) -> None:
        """Waits for the engine whenever it is lost: to start it again is somebody else's job."""
        while True:
            await self._set(replica, healthy=False)
            await self._until_ready(replica)
            reason = await self._serve_until_lost(replica, None)
            self.log.warning("engine lost", engine=replica.name, reason=reason)

    async def _until_ready(self, replica: Replica) -> None:
        async with _client(replica.url) as client:
            while True:
                if await ready_for_weights(client, replica.name):
                    return
                await anyio.sleep(self.config.engines.health_interval_s)

    async def _serve_until_lost(self, replica: Replica, child: Child | None) -> str:
        """Keeps a running engine at the newest weights until it is lost; returns why it was."""
        loss = _Loss()
        await self._set(replica, healthy=True)
        async with _client(replica.url) as client, anyio.create_task_group() as group:
            group.start_soon(self._follow_weights, replica, client, loss)
            # Apart from each other: a question that a dead EngineCore leaves open must not hold up the other.
            group.start_soon(self._watch, partial(unhealthy, client, ANSWER_TIMEOUT_S), loss)
            asks_version = partial(self.pusher.wrong_version, replica, client, ANSWER_TIMEOUT_S)
            group.start_soon(self._watch, asks_version, loss)
            if child is not None:
                group.start_soon(_watch_process, child, loss)
            reason = await loss.wait()
            await self._set(replica, healthy=False)
            group.cancel_scope.cancel()
        return reason

    async def _follow_weights(self, replica: Replica, client: httpx.AsyncClient, loss: _Loss) -> None:
        try:
            await self.pusher.follow(replica, client)
        except PushFailed as err:
            loss.declare(str(err))

    async def _watch(self, check: Callable[[], Awaitable[str]], loss: _Loss) -> None:
        while True:
            await anyio.sleep(self.config.engines.health_interval_s)
            if reason := await check():
                loss.declare(reason)

    async def _set(self, replica: Replica, *, healthy: bool) -> None:
        """A change of health is also the loss of what was known about the weights."""
        replica.healthy, replica.version = healthy, None
        await self.broker.set_engine(replica.state())


class _Loss:
    """The first reason for which an engine is given up."""

    def __init__(self) -> None:
        self._declared = anyio.Event()
        self._reason = ""

    def declare(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._declared.set()

    async def wait(self) -> str:
        await self._declared.wait()
        return self._reason


async def ready_for_weights(client: httpx.AsyncClient, name: str) -> bool:
    """Whether an engine of others answers and can be given weights.

    EngineError when it never will: started without the routes for weights, or left paused by a push that broke.
    """
    try:
        response = await client.get("/is_paused", timeout=ANSWER_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    if response.status_code == 404:
        raise EngineError(
            f"{name} at {client.base_url} takes no weights; start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, "
            f'--logprobs-mode processed_logprobs and --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
    if response.status_code == 200 and response.json()["is_paused"]:
        raise EngineError(
            f"{name} at {client.base_url} is paused: a push into it did not end, so nobody knows its weights; "
            "start that server again"
        )
    return response.status_code == 200


async def _watch_process(child: Child, loss: _Loss) -> None:
    code = await child.wait()
    loss.declare(f"its process ended with code {code}")


def _client(url: str) -> httpx.AsyncClient:
    """Without a timeout of its own: each use has the one that fits."""
    return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
