"""What the real programs sent, read by our dialects: each request goes on where an earlier one ended.

Where a recording starts over (a sub-agent, a title, a compacted history), it does so as often as was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai_requests import recorded, recorded_chat, recorded_responses, scenarios, words

from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.messages import Ask, Message

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SUBAGENTS = {"codex-sub": 2, "opencode-sub": 2}
COMPACTIONS = {"qwen-compact": 1}  # Codex's starts from the instructions and the task again, which is no new start
APPEND_ONLY = ("openclaw-mcpmin", "openclaw-mintools", "openclaw-odd_resp")
MOVING = [
    name
    for name in scenarios(CHAT)
    if name.startswith("openclaw-") and not name.startswith("openclaw-gw-") and name not in APPEND_ONLY
]
STARTING_OVER = {"openclaw-bigctx": 2, "openclaw-empty": 1}  # a compaction and what follows; a nudge
STEADY = [name for name in (*scenarios(RESPONSES), *scenarios(CHAT)) if not name.startswith("openclaw-")]


def asks(scenario: str) -> list[Ask]:
    """The scenario's requests in canonical form."""
    return [
        Responses().read(recorded_responses(line))
        if line["endpoint"] == RESPONSES
        else Chat().read(recorded_chat(line))
        for line in recorded(scenario)
    ]


def starts(found: Sequence[Ask], moving: int = 0) -> int:
    """How many requests extend none before them; `moving`: so many messages at the end may be others each time."""
    histories = [ask.messages for ask in found]
    return sum(
        not any(_extends(history, earlier, moving) for earlier in histories[:n]) for n, history in enumerate(histories)
    )


def _extends(history: tuple[Message, ...], earlier: tuple[Message, ...], moving: int) -> bool:
    kept = len(earlier) - moving
    return kept > 0 and history[:kept] == earlier[:kept]


@pytest.mark.parametrize("scenario", [*STEADY, *APPEND_ONLY])
def test_every_request_extends_an_earlier_one(scenario):
    titles = 1 if scenario.startswith("opencode-") else 0
    expected = 1 + titles + SUBAGENTS.get(scenario, 0) + COMPACTIONS.get(scenario, 0)
    assert starts(asks(scenario)) == expected


@pytest.mark.parametrize("scenario", MOVING)
def test_openclaws_default_profile_moves_its_last_message_and_nothing_else(scenario):
    found = asks(scenario)
    assert starts(found, moving=1) == 1 + STARTING_OVER.get(scenario, 0)
    assert starts(found) > 1


@pytest.mark.parametrize("scenario", scenarios(RESPONSES))
def test_a_replayed_turn_is_what_was_answered(scenario):
    """One message has the texts and the calls of all the items of an answer."""
    lines = recorded(scenario)
    found = [Responses().read(recorded_responses(line)).messages for line in lines]
    pairs = [
        (later[len(messages)], line["response"]["blocks"])
        for number, (messages, line) in enumerate(zip(found, lines, strict=True))
        for later in found[number + 1 :]
        if _extends(later, messages, 0) and _calls(line["response"]["blocks"]) and len(later) > len(messages)
    ]
    mine = [(turn, blocks) for turn, blocks in pairs if turn.calls and turn.calls[0].id == _calls(blocks)[0][0]]
    assert mine
    for turn, blocks in mine:
        assert turn.text == "\n".join(words(block) for block in blocks if block["t"] == "text")
        assert [(call.id, call.name) for call in turn.calls] == _calls(blocks)


def _calls(blocks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(block["id"]["h"], block["tool"]) for block in blocks if block["t"] == "tool"]
