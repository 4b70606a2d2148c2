"""From an entry of [[harness]] to the adapter that knows the program."""

from __future__ import annotations

from clawpipe.actors.harness.agentloop import AgentLoop
from clawpipe.actors.harness.base import Harness
from clawpipe.pipeline.config import HarnessConfig


def make_harness(config: HarnessConfig, model: str) -> Harness:
    """The adapter of the entry. `model` is the name that the harness sends as the model's."""
    return AgentLoop(config, model)
