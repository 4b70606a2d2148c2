"""Assistant messages with nothing in them: a harness's left-overs go, turns that were sampled so stay."""

from __future__ import annotations

import pytest
from conversation import USER, conversation, result

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'
NOTHING = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "empty", [NOTHING, {"role": "assistant", "content": None}, {"role": "assistant", "content": " \n"}], ids=str
)
async def test_an_empty_message_that_was_not_sampled_does_not_break_the_chain(renderer, parser, sampler, empty):
    """OpenCode leaves one for a stream that broke off, right before the turn that it then adopts."""
    sampler.script = [CALL, "done"]
    async with conversation(renderer, parser, sampler) as talk:
        turn = await talk.ask(USER)
        await talk.ask(USER, empty, turn, result(turn["tool_calls"][0]))
    first, second = talk.stream.records
    assert talk.broken() == [None, None]
    assert second.parent_tokens == first.prompt_tokens + len(talk.completion(0))
    assert all(fate.kept == fate.sampled for fate in talk.selection().fates)


@pytest.mark.parametrize("said", ["", "<think>\nhm\n</think>\n\n"])
async def test_an_empty_turn_that_was_sampled_stays(renderer, make_parser, sampler, said):
    sampler.script = [said, "done"]
    async with conversation(renderer, make_parser("hermes", "qwen3"), sampler) as talk:
        await talk.ask(USER)
        await talk.ask(USER, NOTHING, USER)
    first, second = talk.stream.records
    assert talk.broken() == [None, None]
    assert second.parent_tokens == first.prompt_tokens + len(talk.completion(0))


async def test_a_conversation_of_nothing_but_an_empty_message_is_answered_or_refused(make_proxy, sampler):
    sampler.script = ["yes"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", json={"model": "policy", "messages": [NOTHING]})
    assert response.status_code in (200, 400)
