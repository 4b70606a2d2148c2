"""Which call is what, of Claude Code: on recordings, against what the scripts made it do and what its history shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.claude_code import AGENT_HEADER, ClaudeCode
from clawpipe.pipeline.config import ClaudeCodeConfig, ModelConfig
from clawpipe.pipeline.records import Role
from harness.recordings import Recorded, recorded, scenarios

# The call numbers of the scenarios in which the script reported a usage over the threshold, or refused a prompt as
# too long. In thr28000 it stayed below, and ctxerr_dis ran with compaction off.
COMPACTIONS = {
    "compact": 3,
    "ctxerr": 4,
    "thr34000": 2,
    "thr40000": 2,
    "thr50000": 2,
    "thr52000": 2,
    "thr56000": 2,
    "thrA50000": 2,
}
TOOL = {"name": "Bash", "input_schema": {}}
MARK = {"cache_control": {"type": "ephemeral"}}


def classify(call: ModelCall) -> Role:
    return ClaudeCode(ClaudeCodeConfig(), ModelConfig(path="/model")).classify(call)


def expected(scenario: str, call: Recorded) -> Role:
    if call.number == COMPACTIONS.get(scenario):
        return Role.COMPACTION
    return Role.SUBAGENT if call.line["mock_kind"] == "sub" else Role.MAIN


@pytest.mark.parametrize("scenario", scenarios("claude"))
def test_every_recorded_call_gets_its_role(scenario: str) -> None:
    calls = recorded("claude", scenario)
    assert [classify(one.call) for one in calls] == [expected(scenario, one) for one in calls]


@pytest.mark.parametrize("scenario", scenarios("claude"))
def test_the_conversation_starts_anew_after_each_compaction_and_nowhere_else(scenario: str) -> None:
    """Of two calls that follow each other in the main conversation, the later one holds the earlier one's opening."""
    main = [one for one in recorded("claude", scenario) if classify(one.call) is not Role.SUBAGENT]
    anew = [earlier.number for earlier, later in pairwise(main) if not set(opening(earlier)) <= set(opening(later))]
    assert anew == ([COMPACTIONS[scenario]] if scenario in COMPACTIONS else [])


def opening(call: Recorded) -> list[str]:
    """The blocks of the first message."""
    return [block["h"] for block in call.line["messages"][0]["content"] if block["t"] in ("text", "str")]


def call(*messages: dict[str, Any], tools: list[Any] | None = None, path: str = "/v1/messages", **headers: str) -> Role:
    body = {"messages": list(messages), "tools": [TOOL] if tools is None else tools}
    return classify(ModelCall(path=path, headers=headers, body=body))


def said(role: str, *marked: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "t", **(MARK if mark else {})} for mark in marked]}


def test_a_mark_that_stays_behind_the_last_message_is_a_compaction() -> None:
    history = (said("user", False), said("assistant", True))
    assert call(*history, said("user", False, False)) is Role.COMPACTION
    assert call(*history, said("user", False, True)) is Role.MAIN
    assert call(*history, said("user", False), said("system", True)) is Role.MAIN
    assert call(*history, said("user", True), {"role": "system", "content": "text"}) is Role.MAIN


def test_without_any_mark_nothing_is_taken_for_a_compaction() -> None:
    assert call(said("user", False), said("assistant", False), said("user", False)) is Role.MAIN
    assert call({"role": "user", "content": "text"}) is Role.MAIN


def test_a_sub_agents_compaction_is_the_sub_agents() -> None:
    headers = {AGENT_HEADER: "a1"}
    assert call(said("user", False), said("assistant", True), said("user", False), **headers) is Role.SUBAGENT


def test_a_side_job_is_no_part_of_the_conversation() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    assert call(said("user", False), tools=[search]) is Role.UNKNOWN
    assert call(said("user", False), tools=[]) is Role.UNKNOWN
    assert call(said("user", True), tools=[search, TOOL]) is Role.MAIN


def test_what_does_not_come_from_the_program_is_unknown() -> None:
    assert call(said("user", True), path="/v1/chat/completions") is Role.UNKNOWN
