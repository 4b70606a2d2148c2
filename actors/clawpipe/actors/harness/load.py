"""From an entry of [[harness]] to the adapter that knows the program."""

from __future__ import annotations

from clawpipe.actors.harness.agentloop import AgentLoop
from clawpipe.actors.harness.base import Harness
from clawpipe.pipeline.config import AgentLoopConfig, HarnessConfig, ModelConfig
from clawpipe.pipeline.errors import ConfigError


def make_harness(config: HarnessConfig, model: ModelConfig) -> Harness:
    """The adapter of the entry. `model`: its name is what the harness sends, its context what the harness is told."""
    match config:
        case AgentLoopConfig():
            return AgentLoop(config, model.name)
        case _:
            raise ConfigError(f"[[harness]] {config.name}: this kind has no adapter")
