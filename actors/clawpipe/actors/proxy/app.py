"""The role `proxy`: connects to broker and engines, and serves until the run drains or SIGTERM comes."""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from clawpipe.actors.engines.pool import EnginePool
from clawpipe.actors.proxy.service import load_model, serve
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.proxy.upstream import EngineSampler, make_client
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.runtime import Runtime


def main(config: Config, runtime: Runtime) -> None:
    """Entry point of the role. ClawpipeError when model folder, parser or socket cannot be used."""
    anyio.run(_serve, config, runtime)


async def _serve(config: Config, runtime: Runtime) -> None:
    log = EventLog("proxy")
    with listening(runtime.proxy_socket) as server:  # slots may connect from now on; they are served when all is ready
        async with _until_stopped():
            renderer, parser = await load_model(config.model, Path(runtime.init_model_dir))
            gc.freeze()  # what vLLM imported never dies: walking it would stall calls now and the exit by seconds
            log.info("proxy ready", end_of_turn=renderer.end_of_turn, stop_ids=renderer.stop_ids)
            async with (
                Broker.connect(
                    runtime.nats_url,
                    runtime.nats_token,
                    prefix=config.nats.prefix,
                    timeout_s=config.nats.connect_timeout_s,
                ) as broker,
                EnginePool(broker, config.proxy.engine_wait_s) as pool,
                make_client() as client,
            ):
                sampler = EngineSampler(pool, client, config.proxy, renderer.stop_ids, log)
                await serve(config, server, broker, sampler, renderer, parser, log)


@asynccontextmanager
async def _until_stopped() -> AsyncIterator[None]:
    """Cancels the block on SIGTERM or SIGINT; rollouts in hand go back to the work queue."""

    async def watch(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch, group.cancel_scope)
        yield
        group.cancel_scope.cancel()
