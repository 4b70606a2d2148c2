"""From an entry of [[harness]] to the adapter that knows the program."""

from __future__ import annotations

from clawpipe.actors.harness.agentloop import AgentLoop
from clawpipe.actors.harness.base import Harness
from clawpipe.actors.harness.claude_code import ClaudeCode
from clawpipe.actors.harness.codex import Codex
from clawpipe.actors.harness.openclaw import OpenClaw
from clawpipe.actors.harness.opencode import OpenCode
from clawpipe.actors.harness.qwen_code import QwenCode
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    ClaudeCodeConfig,
    CodexConfig,
    HarnessConfig,
    ModelConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)


def make_harness(config: HarnessConfig, model: ModelConfig) -> Harness:
    """The adapter of the entry. `model`: its name is what the harness sends, its context what the harness is told."""
    match config:
        case AgentLoopConfig():
            return AgentLoop(config, model.name)
        case OpenClawConfig():
            return OpenClaw(config, model)
        case ClaudeCodeConfig():
            return ClaudeCode(config, model)
        case CodexConfig():
            return Codex(config, model)
        case OpenCodeConfig():
            return OpenCode(config, model)
        case QwenCodeConfig():
            return QwenCode(config, model)
