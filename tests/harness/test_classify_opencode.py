"""Which call is what, of OpenCode: on recordings, against its sessions, and from what its real run showed."""

from __future__ import annotations

from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.opencode import OpenCode
from clawpipe.pipeline.config import ModelConfig, OpenCodeConfig
from clawpipe.pipeline.records import Role
from harness.recordings import Recorded, recorded, scenarios

TITLE = 0  # the first call of every run
SESSION = "x-session-id"


def classify(call: ModelCall) -> Role:
    return OpenCode(OpenCodeConfig(), ModelConfig(path="/model")).classify(call)


def expected(one: Recorded, main_session: str) -> Role:
    """A sub-agent works in a session of its own."""
    if one.number == TITLE:
        return Role.TITLE
    return Role.MAIN if one.call.headers[SESSION] == main_session else Role.SUBAGENT


@pytest.mark.parametrize("scenario", scenarios("opencode"))
def test_every_recorded_call_gets_its_role(scenario: str) -> None:
    calls = recorded("opencode", scenario)
    main_session = calls[0].call.headers[SESSION]
    assert [classify(one.call) for one in calls] == [expected(one, main_session) for one in calls]


def test_titles_are_asked_for_by_the_same_instructions_everywhere() -> None:
    instructions = {
        recorded("opencode", name)[TITLE].line["messages"][0]["content"][0]["h"] for name in scenarios("opencode")
    }
    assert len(instructions) <= 1


def call(*roles: str, tools: int = 0, **headers: str) -> ModelCall:
    body: dict[str, Any] = {"messages": [{"role": role, "content": "x"} for role in roles], "tools": [{}] * tools}
    return ModelCall(path="/v1/chat/completions", headers=headers, body=body)


def test_a_summary_is_one_question_without_tools_and_a_title_two() -> None:
    assert classify(call("system", "user")) is Role.COMPACTION
    assert classify(call("system", "user", "user")) is Role.TITLE


def test_a_subagent_names_its_parent() -> None:
    child = ModelCall(path="", headers={"x-parent-session-id": "s"}, body={"tools": [{}]})
    assert classify(child) is Role.SUBAGENT
    assert classify(call("system", "user", tools=1)) is Role.MAIN
