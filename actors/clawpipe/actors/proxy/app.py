"""The role `proxy`: connects to broker and engines, and serves until the run drains or SIGTERM comes."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio

from clawpipe.actors.engines.pool import EnginePool
from clawpipe.actors.proxy.engine_http import EngineClient
from clawpipe.actors.proxy.service import load_model, serve
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.proxy.upstream import EngineSampler
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.processes import raise_file_limit, until_stopped
from clawpipe.pipeline.runtime import Runtime


def main(config: Config, runtime: Runtime) -> None:
    """Entry point of the role. ClawpipeError when model folder, parser or socket cannot be used."""
    raise_file_limit()
    anyio.run(_serve, config, runtime, backend_options={"use_uvloop": True})  # a call is mostly sockets and tasks


async def _serve(config: Config, runtime: Runtime) -> None:
    log = EventLog("proxy")
    with listening(runtime.proxy_socket) as server:  # slots may connect from now on; they are served when all is ready
        async with until_stopped():
            renderer, parser = await load_model(config.model, Path(runtime.init_model_dir))
            gc.freeze()  # what vLLM imported never dies: walking it would stall calls now and the exit by seconds
            log.info("proxy ready", end_of_turn=renderer.end_of_turn, stop_ids=renderer.stop_ids)
            async with (
                Broker.of_run(runtime, config.nats) as broker,
                EnginePool(broker, config.proxy.engine_wait_s) as pool,
                EngineClient() as client,
            ):
                sampler = EngineSampler(pool, client, config.proxy, renderer.stop_ids, log)
                await serve(config, server, broker, sampler, renderer, parser, log)
