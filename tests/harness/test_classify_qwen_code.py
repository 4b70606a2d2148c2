"""Which call is what, of Qwen Code: on recordings, whose tools get their names back, and from its real run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.qwen_code import QwenCode
from clawpipe.pipeline.config import ModelConfig, QwenCodeConfig
from clawpipe.pipeline.records import Role
from harness.recordings import Recorded, recorded, scenarios

COMPACTIONS = {"compact": (3,)}  # the script reported a usage near the window's size
# In the order of the requests; those of a sub-agent were seen in a real run of the same version.
TOOLS = (
    *("agent", "edit", "get_goal", "glob", "grep_search", "list_agents", "notebook_edit", "read_file"),
    *("run_shell_command", "skill", "tool_call", "tool_search", "update_goal", "write_file"),
)
ONLY_OF_SUBAGENTS = ("loop_wakeup", "monitor", "read_mcp_resource", "report_findings", "web_fetch", "zoom_image")
ONLY_OF_MAIN = ("get_goal", "list_agents", "update_goal")


def classify(call: ModelCall) -> Role:
    return QwenCode(QwenCodeConfig(), ModelConfig(path="/model")).classify(call)


def as_sent(one: Recorded) -> ModelCall:
    body = dict(one.call.body)
    if "tools" in body:
        body["tools"] = [tool(name) for _, name in zip(body["tools"], TOOLS, strict=True)]
    return msgspec.structs.replace(one.call, body=body)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("scenario", scenarios("qwen"))
def test_every_recorded_call_gets_its_role(scenario: str) -> None:
    calls = recorded("qwen", scenario)
    roles = [Role.COMPACTION if one.number in COMPACTIONS.get(scenario, ()) else Role.MAIN for one in calls]
    assert [classify(as_sent(one)) for one in calls] == roles


@pytest.mark.parametrize("scenario", scenarios("qwen"))
def test_only_a_summary_has_other_instructions(scenario: str) -> None:
    calls = recorded("qwen", scenario)
    instructions = [one.line["messages"][0]["content"][0]["h"] for one in calls]
    others = tuple(one.number for one, found in zip(calls, instructions, strict=True) if found != instructions[0])
    assert others == COMPACTIONS.get(scenario, ())


def call(*roles: str, tools: tuple[str, ...] = ()) -> ModelCall:
    messages = [{"role": role, "content": "x"} for role in roles]
    return ModelCall(path="/v1/chat/completions", headers={}, body={"messages": messages, "tools": [*map(tool, tools)]})


def test_a_subagent_has_not_all_tools_of_its_parent() -> None:
    tools = (*(set(TOOLS) - set(ONLY_OF_MAIN)), *ONLY_OF_SUBAGENTS)
    assert classify(call("system", "user", tools=tools)) is Role.SUBAGENT


def test_without_tools_only_what_follows_a_conversation_is_its_summary() -> None:
    assert classify(call("system", "user", "assistant", "tool", "user")) is Role.COMPACTION
    assert classify(call("system", "user")) is Role.UNKNOWN
