"""What the script says to each harness."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clawpipe.actors.harness.steps import Finish, Read, Write, say, without_last_brace
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    ClaudeCodeConfig,
    CodexConfig,
    HarnessConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)

WRITE = Write(path="out/a.txt", content='say "hi"')


def called(text: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a turn that is one call."""
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert text == f"<tool_call>\n{body}\n</tool_call>"
    found = json.loads(body)
    return found["name"], found["arguments"]


@pytest.mark.parametrize(
    ("harness", "name", "arguments"),
    [
        (AgentLoopConfig(), "write_file", {"path": "out/a.txt", "content": 'say "hi"'}),
        (OpenClawConfig(), "write", {"path": "out/a.txt", "content": 'say "hi"'}),
        (ClaudeCodeConfig(), "Write", {"file_path": "/work/out/a.txt", "content": 'say "hi"'}),
        (
            ClaudeCodeConfig(bare=True),
            "Edit",
            {"file_path": "/work/out/a.txt", "old_string": "", "new_string": 'say "hi"', "replace_all": False},
        ),
        (OpenCodeConfig(), "write", {"filePath": "/work/out/a.txt", "content": 'say "hi"'}),
        (QwenCodeConfig(), "write_file", {"file_path": "/work/out/a.txt", "content": 'say "hi"'}),
        (CodexConfig(), "exec_command", {"cmd": "mkdir -p out && printf %s 'say \"hi\"' > out/a.txt"}),
    ],
)
def test_a_file_is_written_with_the_harnesss_own_tool(
    harness: HarnessConfig, name: str, arguments: dict[str, Any]
) -> None:
    assert called(say(WRITE, harness)) == (name, arguments)


@pytest.mark.parametrize(
    ("harness", "name", "argument", "path"),
    [
        (AgentLoopConfig(), "read_file", "path", "a.txt"),
        (OpenClawConfig(), "read", "path", "a.txt"),
        (ClaudeCodeConfig(), "Read", "file_path", "/work/a.txt"),
        (OpenCodeConfig(), "read", "filePath", "/work/a.txt"),
        (QwenCodeConfig(), "read_file", "file_path", "/work/a.txt"),
        (CodexConfig(), "exec_command", "cmd", "cat a.txt"),
    ],
)
def test_a_file_is_read_with_the_harnesss_own_tool(harness: HarnessConfig, name: str, argument: str, path: str) -> None:
    assert called(say(Read(path="a.txt"), harness)) == (name, {argument: path})


def test_a_harness_ends_with_a_plain_answer_and_agentloop_with_its_tool() -> None:
    assert called(say(Finish(), AgentLoopConfig())) == ("finish", {})
    assert say(Finish(), OpenClawConfig()) == say(Finish(), ClaudeCodeConfig()) == "Done."


def test_a_call_without_its_last_brace_is_no_json_and_lacks_nothing_else() -> None:
    whole = say(WRITE, OpenClawConfig())
    broken = without_last_brace(whole)
    assert broken.replace("}\n</tool_call>", "}}\n</tool_call>") == whole
    with pytest.raises(ValueError, match="Expecting"):
        called(broken)
