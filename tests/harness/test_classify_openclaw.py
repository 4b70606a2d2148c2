"""Which call is what, of OpenClaw: on recordings, against what is known of their conversations.

The recordings hold no texts. Where a call says in a text whose session it is, the test puts the line back, for the
session that the recording shows by other means; names of tools are put back from the order of the smallest profile.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.openclaw import OpenClaw
from clawpipe.pipeline.config import ModelConfig, OpenClawConfig
from clawpipe.pipeline.records import Role
from harness.recordings import Recorded, recorded, scenarios

# After an overflow, or between turns; each is followed by a call whose history begins with the summary.
COMPACTIONS = {"bigctx": (6,), "gw-g2": (5, 12)}
NUDGES = {"empty": (2,), "gw-g2": (35, 48)}  # after answers without a word
FLUSHES = {"gw-g2": (16, 17, 18), "gw-g5": (24,)}  # before the Gateway compacts at its leisure
SUBAGENTS = {"gw-g1": range(5, 11), "gw-g3": range(5, 11), "gw-g5": range(6, 12), "gw-g6": range(5, 11)}
EXPECTED = {
    Role.COMPACTION: COMPACTIONS,
    Role.NUDGE: NUDGES,
    Role.MEMORY: FLUSHES,
    Role.SUBAGENT: SUBAGENTS,
}
MINIMAL = ("apply_patch", "edit", "exec", "gateway", "read", "session_status", "write")  # in scenario "mintools"
INSTRUCTIONS = ("system", "developer")


def classify(call: ModelCall, **config: Any) -> Role:
    return OpenClaw(OpenClawConfig(**config), ModelConfig(path="/model")).classify(call)


def expected(scenario: str, number: int) -> Role:
    found = [role for role, table in EXPECTED.items() if number in table.get(scenario, ())]
    return found[0] if found else Role.MAIN


def real_names() -> dict[str, str]:
    """Hash -> name of the tools of the smallest profile, which come in alphabetical order."""
    return dict(zip(recorded("openclaw", "mintools")[0].line["tools"], MINIMAL, strict=True))


def as_sent(one: Recorded, is_subagent: bool) -> ModelCall:
    """The recorded call with its session and the names of its tools."""
    body = dict(one.call.body)
    names = real_names()
    if "tools" in body:
        body["tools"] = [renamed(tool, names) for tool in body["tools"]]
        session = "subagent:0000" if is_subagent else "main"
        line = f"session=agent:main:{session}"
        if "system" in body:
            body["system"] = [*body["system"][:-1], {"type": "text", "text": line}]
        else:
            history = "input" if "input" in body else "messages"
            body[history] = with_line(body[history], line)
    return msgspec.structs.replace(one.call, body=body)


def with_line(history: list[dict[str, Any]], line: str) -> list[dict[str, Any]]:
    """In the developer's item, or else in the first message of the user."""
    where = next(at for at, message in enumerate(history) if message.get("role") in ("developer", "user"))
    return [
        {**message, "content": [{"type": "text", "text": line}]} if at == where else message
        for at, message in enumerate(history)
    ]


def renamed(tool: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if "function" in tool:
        return {**tool, "function": renamed(tool["function"], names)}
    return {**tool, "name": names.get(tool["name"], tool["name"])}


def first_words(one: Recorded) -> str:
    """Hash of the first thing that the user said."""
    return next(message["content"][0]["h"] for message in one.line["messages"] if message["role"] == "user")


def instructions(one: Recorded) -> str | None:
    found = [message["content"][0]["h"] for message in one.line["messages"] if message["role"] in INSTRUCTIONS]
    return found[0] if found else None


@pytest.mark.parametrize("scenario", scenarios("openclaw"))
def test_every_recorded_call_gets_its_role(scenario: str) -> None:
    roles = {one.number: expected(scenario, one.number) for one in recorded("openclaw", scenario)}
    calls = {one.number: as_sent(one, roles[one.number] is Role.SUBAGENT) for one in recorded("openclaw", scenario)}
    assert {number: classify(call) for number, call in calls.items()} == roles


@pytest.mark.parametrize("scenario", SUBAGENTS)
def test_the_subagents_are_those_that_open_a_conversation_in_somebody_elses_turn(scenario: str) -> None:
    calls = recorded("openclaw", scenario)
    opening: dict[str, str] = {}
    for one in calls:
        opening.setdefault(one.line["trace"], first_words(one))
    others = [one.number for one in calls if first_words(one) != opening[one.line["trace"]]]
    assert others == list(SUBAGENTS[scenario])


@pytest.mark.parametrize("scenario", COMPACTIONS)
def test_the_summaries_have_instructions_of_their_own_and_the_next_history_begins_with_them(scenario: str) -> None:
    calls = recorded("openclaw", scenario)
    (summarizer,) = {instructions(calls[number]) for number in COMPACTIONS[scenario]}
    assert [one.number for one in calls if instructions(one) == summarizer] == list(COMPACTIONS[scenario])
    for number in COMPACTIONS[scenario]:
        assert len(calls[number + 1].line["messages"][1]["content"]) == 2


def test_the_last_tries_end_with_the_same_words_and_come_after_empty_answers() -> None:
    nudges = [recorded("openclaw", scenario)[n] for scenario, numbers in NUDGES.items() for n in numbers]
    assert len({one.line["messages"][-1]["content"][0]["h"] for one in nudges}) == 1
    for scenario, numbers in NUDGES.items():
        for number in numbers:
            before = recorded("openclaw", scenario)[number - 1].line["response"]
            assert not any(block["t"] != "thinking" and block.get("n", 1) for block in before["blocks"])


@pytest.mark.parametrize("scenario", FLUSHES)
def test_a_flush_goes_through_the_main_conversation_with_other_instructions(scenario: str) -> None:
    calls = recorded("openclaw", scenario)
    first = FLUSHES[scenario][0]
    assert first_words(calls[first]) == first_words(calls[first - 1])
    assert instructions(calls[first]) != instructions(calls[first - 1])


def chat(*roles: str, tools: tuple[str, ...] = ()) -> ModelCall:
    body = {
        "messages": [{"role": role, "content": "x"} for role in roles],
        "tools": [{"type": "function", "function": {"name": name}} for name in tools],
    }
    return ModelCall(path="/v1/chat/completions", headers={}, body=body)


def test_what_a_user_writes_later_makes_no_subagent() -> None:
    call = chat("system", "user", "assistant", "user", tools=("read", "exec"))
    call.body["messages"][3]["content"] = "session=agent:main:subagent:1"
    assert classify(call) is Role.MAIN


def test_an_agent_that_has_no_other_tools_than_a_flush_is_the_main_one() -> None:
    assert classify(chat("system", "user", tools=("read", "write")), tools=("read", "write")) is Role.MAIN
    assert classify(chat("system", "user", tools=("read", "write"))) is Role.MEMORY
