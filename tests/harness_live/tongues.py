"""How a model calls each harness's tools. The names are the programs'; what is said with them is ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from clawpipe.pipeline.config import (
    ClaudeCodeConfig,
    CodexConfig,
    InstalledHarnessConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)
from harness_live.live import Errand
from harness_live.scripted import call


@dataclass(frozen=True)
class Tongue:
    """One harness. `folder` stands in front of paths; `number` is an argument of `shell` that takes a whole number."""

    config: Callable[..., InstalledHarnessConfig]
    reader: str
    path: str
    shell: str
    command: str
    number: str
    number_text: str = "2.0e4"
    folder: str = "/work/"
    extra: Mapping[str, Any] = field(default_factory=dict)  # what `shell` requires beside the command
    mcp: str = "mcp__{server}__{tool}"
    agent: str = ""  # the tool that starts a sub-agent; empty: it has none in one run
    agent_prompt: str = "prompt"
    agent_extra: Mapping[str, Any] = field(default_factory=dict)

    def read(self, path: str) -> str:
        """Reads a file of the workspace."""
        return call(self.reader, {self.path: self.folder + path})

    def run(self, command: str) -> str:
        """Runs a shell command in the workspace."""
        return call(self.shell, {self.command: command, **self.extra})

    def odd_run(self, command: str) -> str:
        """The same in JSON that nobody would write: spaces, escapes that need not be, whole numbers as floats."""
        quoted = json.dumps(command).replace("/", "\\/")
        rest = "".join(f',"{key}":   {json.dumps(value)} ' for key, value in self.extra.items())
        return call(self.shell, f'{{ "{self.number}" :   {self.number_text},\n  "{self.command}":{quoted}{rest}  }}')

    def ask(self, server: str, tool: str, **arguments: Any) -> str:
        """Calls a tool of an MCP server."""
        return call(self.mcp.format(server=server, tool=tool), arguments)

    def delegate(self, prompt: str) -> str:
        """Starts a sub-agent."""
        return call(self.agent, {self.agent_prompt: prompt, **self.agent_extra})


TONGUES = {
    "openclaw": Tongue(
        OpenClawConfig, "read", "path", "exec", "command", "timeoutSeconds", folder="", mcp="{server}__{tool}"
    ),
    "claude_code": Tongue(
        ClaudeCodeConfig,
        *("Read", "file_path", "Bash", "command", "timeout"),
        extra={"description": "work"},
        agent="Agent",
        agent_extra={"description": "work", "subagent_type": "general-purpose"},
    ),
    # It has no tool for reading files.
    "codex": Tongue(
        CodexConfig,
        *("exec_command", "cmd", "exec_command", "cmd", "yield_time_ms"),
        number_text="20000",  # it takes no float for it
        folder="cat ",
        agent="multi_agent_v1__spawn_agent",
        agent_prompt="message",
    ),
    "opencode": Tongue(
        OpenCodeConfig,
        *("read", "filePath", "bash", "command", "timeout"),
        extra={"description": "work"},
        mcp="{server}_{tool}",
        agent="task",
        agent_extra={"description": "work", "subagent_type": "general"},
    ),
    "qwen_code": Tongue(
        QwenCodeConfig,
        *("read_file", "file_path", "run_shell_command", "command", "timeout"),
        extra={"is_background": False, "description": "work"},
        agent="agent",
        agent_extra={"description": "work", "subagent_type": "general-purpose"},
    ),
}

ALL = [*TONGUES]
IN_CI = ("openclaw", "claude_code")
SHORT = [pytest.param(kind, marks=[] if kind in IN_CI else [pytest.mark.slow]) for kind in TONGUES]
QUICK = ("claude_code", "codex")  # to start

ERRAND = Errand(
    "How many rows has rows.csv? Write the number to count.txt.",
    {"rows.csv": b"alpha-17\nbeta-23\n"},
    {"count.txt": "2"},
)
WRITE = "printf 2 > count.txt"
DONE = "It is two."
