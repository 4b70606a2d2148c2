"""Puts the proxy's parts together.

A call's way: `listen` -> `endpoint` -> `dialects` -> `calls` (`render`, `graft`, `upstream`, `parse`, `capture`)
-> `stream`. Rollouts come and go through `slots`; `identity` holds what is known of each.
"""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.endpoint import Endpoint
from clawpipe.actors.proxy.identity import Classify
from clawpipe.actors.proxy.listen import serving
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.slots import Slots
from clawpipe.actors.proxy.upstream import Sampler
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config, ModelConfig
from clawpipe.pipeline.observe import EventLog


async def load_model(config: ModelConfig, model_dir: Path) -> tuple[Renderer, TurnParser]:
    """Tokenizer, template and parsers; in a thread, since it takes ten seconds. ConfigError when one is unusable."""

    def load() -> tuple[Renderer, TurnParser]:
        renderer = Renderer(model_dir)
        parser = TurnParser(renderer.tokenizer, config.tool_parser, config.reasoning_parser, renderer.generation_prompt)
        return renderer, parser

    return await anyio.to_thread.run_sync(load)


async def serve(
    config: Config,
    server: socket.socket,
    broker: Broker,
    sampler: Sampler,
    renderer: Renderer,
    parser: TurnParser,
    log: EventLog,
) -> None:
    """Serves slots on `server` until the run drains and the last one has left."""
    async with anyio.create_task_group() as group:
        calls = Calls(
            renderer=renderer,
            encoder=Encoder(renderer.tokenizer, end_of_turn=renderer.end_of_turn),
            parser=parser,
            sampler=sampler,
            recorder=Recorder(broker, config.proxy.publish_timeout_s),
            limits=Limits(
                context_tokens=config.model.context_tokens,
                max_completion_tokens=config.proxy.max_completion_tokens,
                retry_window_s=config.proxy.retry_window_s,
                max_parallel_calls=config.proxy.max_parallel_calls,
                max_resamples=config.proxy.max_resamples if config.proxy.on_malformed_tool_call == "resample" else 0,
            ),
            group=group,
            log=log,
            keep_thinking=config.proxy.history_thinking == "keep",
        )
        crashes = Crashes(group)
        endpoint = Endpoint(calls, config.model.name, config.proxy.keepalive_s, crashes.report)
        slots = Slots(broker, serving(endpoint), classifiers(config), config.proxy, log, sampler.ready)
        await slots.serve(server)
        group.cancel_scope.cancel()


class Crashes:
    """Carries a fault out of uvicorn's tasks into ours, where it ends the process."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group

    def report(self, error: Exception) -> None:
        """Raises `error` in the task group."""
        self._group.start_soon(self._raise, error)

    async def _raise(self, error: Exception) -> None:
        raise error


def classifiers(config: Config) -> dict[str, Classify]:
    """Per harness, how to tell what a call is for."""
    return {entry.name: make_harness(entry, config.model).classify for entry in config.harness}
