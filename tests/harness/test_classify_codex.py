"""Which call is what, of Codex: on recordings, against its threads and windows, and from the header they lack."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.codex import TURN_HEADER, Codex
from clawpipe.pipeline.config import CodexConfig, ModelConfig
from clawpipe.pipeline.records import Role
from harness.recordings import Recorded, recorded, scenarios

COMPACTIONS = {"compact": 3}  # the script reported a usage near the window's size
WINDOW = "x-codex-window-id"


def classify(call: ModelCall) -> Role:
    return Codex(CodexConfig(), ModelConfig(path="/model")).classify(call)


def expected(scenario: str, call: Recorded, main_thread: str) -> Role:
    """A sub-agent works in a thread of its own."""
    if call.call.headers["thread-id"] != main_thread:
        return Role.SUBAGENT
    return Role.COMPACTION if call.number == COMPACTIONS.get(scenario) else Role.MAIN


@pytest.mark.parametrize("scenario", scenarios("codex"))
def test_every_recorded_call_gets_its_role(scenario: str) -> None:
    calls = recorded("codex", scenario)
    main_thread = calls[0].call.headers["thread-id"]
    assert [classify(one.call) for one in calls] == [expected(scenario, one, main_thread) for one in calls]


@pytest.mark.parametrize("scenario", scenarios("codex"))
def test_a_new_window_opens_after_each_compaction_and_nowhere_else(scenario: str) -> None:
    main = [one for one in recorded("codex", scenario) if classify(one.call) is not Role.SUBAGENT]
    windows = [(one.number, one.call.headers[WINDOW]) for one in main]
    opened = [number for (number, before), (_, after) in pairwise(windows) if before != after]
    assert opened == ([COMPACTIONS[scenario]] if scenario in COMPACTIONS else [])


def call(turn: Any, tools: bool = True, path: str = "/v1/responses", **headers: str) -> Role:
    said = {TURN_HEADER: turn if isinstance(turn, str) else json.dumps(turn)}
    return classify(ModelCall(path=path, headers={**said, **headers}, body={"tools": [{}] if tools else []}))


def test_the_header_says_what_a_call_is_for() -> None:
    assert call({"request_kind": "turn", "thread_source": "user"}) is Role.MAIN
    assert call({"request_kind": "compaction", "thread_source": "user"}) is Role.COMPACTION
    assert call({"request_kind": "turn", "thread_source": "subagent"}) is Role.SUBAGENT
    assert call({"request_kind": "another", "thread_source": "user"}) is Role.UNKNOWN


def test_the_header_goes_before_what_the_body_looks_like() -> None:
    assert call({"request_kind": "turn"}, tools=False) is Role.MAIN
    assert call({"request_kind": "compaction"}, tools=True) is Role.COMPACTION


def test_a_sub_agents_compaction_is_the_sub_agents() -> None:
    assert call({"request_kind": "compaction", "thread_source": "subagent"}) is Role.SUBAGENT
    assert call({}, tools=False, **{"x-openai-subagent": "collab_spawn"}) is Role.SUBAGENT


def test_a_header_that_the_agent_made_up_is_no_error() -> None:
    """The agent can send what it likes, and the proxy serves every rollout."""
    for made_up in ([], {}, 1, "x"):
        assert call({"request_kind": made_up, "thread_source": made_up}) is Role.UNKNOWN


@pytest.mark.parametrize("header", ["", "[]", "{", "null", "[" * 50_000])
def test_without_a_readable_header_the_tools_tell(header: str) -> None:
    assert call(header) is Role.MAIN
    assert call(header, tools=False) is Role.COMPACTION


def test_what_does_not_come_from_the_program_is_unknown() -> None:
    assert call({"request_kind": "turn"}, path="/v1/messages") is Role.UNKNOWN
