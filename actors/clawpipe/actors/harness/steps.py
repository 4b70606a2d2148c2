"""What a competent model would say to each harness: one step of a script, as the raw text of a turn.

Scripts speak in steps that every harness can take (read a file, write a file, finish); here each step becomes a
call of that harness's own tool, in the form that the tiny model's chat template knows. Knows only what a tool is
called and how its arguments are named, and nothing of the harness's prompts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from msgspec import Struct

from clawpipe.actors.sandbox.bubblewrap import WORKSPACE
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    ClaudeCodeConfig,
    CodexConfig,
    HarnessConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)

LAST_WORDS = "Done."
CALL_OPENS, CALL_CLOSES = "<tool_call>\n", "\n</tool_call>"


class Read(Struct, frozen=True, kw_only=True):
    """Looks into a file of the workspace."""

    path: str


class Write(Struct, frozen=True, kw_only=True):
    """Makes a file of the workspace, with the folders that it needs."""

    path: str
    content: str


class Finish(Struct, frozen=True, kw_only=True):
    """Ends the work."""


def say(step: Read | Write | Finish, harness: HarnessConfig) -> str:
    """The turn's raw text."""
    if isinstance(step, Finish):
        return call("finish", {}) if isinstance(harness, AgentLoopConfig) else LAST_WORDS
    return call(*_tool(step, harness))


def call(name: str, arguments: Mapping[str, object]) -> str:
    """A tool call as the model should sample it, in the form of Qwen's chat template."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_OPENS}{said}{CALL_CLOSES}"


def without_last_brace(text: str) -> str:
    """The same call, broken: its JSON ends too early."""
    head, brace, tail = text.rpartition("}")
    if not brace:
        raise ValueError(f"{text!r} holds no call")
    return head + tail


def _tool(step: Read | Write, harness: HarnessConfig) -> tuple[str, dict[str, object]]:
    """(the tool's name, its arguments)."""
    inside = f"{WORKSPACE}/{step.path}"  # some tools want absolute paths
    match harness, step:
        case AgentLoopConfig(), Read():
            return "read_file", {"path": step.path}
        case AgentLoopConfig(), Write():
            return "write_file", {"path": step.path, "content": step.content}
        case OpenClawConfig(), Read():
            return "read", {"path": step.path}
        case OpenClawConfig(), Write():
            return "write", {"path": step.path, "content": step.content}
        case ClaudeCodeConfig(), Read():
            return "Read", {"file_path": inside}
        case ClaudeCodeConfig(bare=True), Write():  # no Write here; it replays its defaults, so they are said
            return "Edit", {"file_path": inside, "old_string": "", "new_string": step.content, "replace_all": False}
        case ClaudeCodeConfig(), Write():
            return "Write", {"file_path": inside, "content": step.content}
        case OpenCodeConfig(), Read():
            return "read", {"filePath": inside}
        case OpenCodeConfig(), Write():
            return "write", {"filePath": inside, "content": step.content}
        case QwenCodeConfig(), Read():
            return "read_file", {"file_path": inside}
        case QwenCodeConfig(), Write():
            return "write_file", {"file_path": inside, "content": step.content}
        case CodexConfig(), _:
            return "exec_command", {"cmd": _shell(step)}
    raise TypeError(f"no tool is known for {step} in {harness}")


def _shell(step: Read | Write) -> str:
    if isinstance(step, Read):
        return f"cat {shlex.quote(step.path)}"
    folder = step.path.rpartition("/")[0] or "."
    return f"mkdir -p {shlex.quote(folder)} && printf %s {shlex.quote(step.content)} > {shlex.quote(step.path)}"
