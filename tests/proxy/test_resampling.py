"""A turn that tried to call a tool and failed: sampled again, recorded apart, counted, never trained."""

from __future__ import annotations

import pytest
from chat_requests import USER, body
from conversation import EXEC, conversation, result

from clawpipe.pipeline.records import FinishReason
from clawpipe.pipeline.segments import DropReason, select
from clawpipe.pipeline.tree import build, resolve

pytestmark = pytest.mark.anyio

GOOD = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls}\n</tool_call>'
WORSE = '<tool_call>\n{"name": "exec", "argu'


async def test_the_harness_gets_the_turn_that_was_well_formed(renderer, parser, sampler):
    sampler.script = [BAD, WORSE, GOOD, "done"]
    async with conversation(renderer, parser, sampler, max_resamples=2) as talk:
        turn = await talk.ask(USER)
        await talk.ask(USER, turn, result(turn["tool_calls"][0]))
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"cmd": "ls"}'
    assert sampler.prompts[0] == sampler.prompts[1] == sampler.prompts[2]
    assert [(r.index, r.malformed_tool_call) for r in talk.stream.records] == [
        (0, True),
        (1, True),
        (2, False),
        (3, False),
    ]
    before = talk.prompt(2) + talk.completion(2)
    assert talk.prompt(3)[: len(before)] == before


async def test_what_fails_even_then_goes_out_as_text(renderer, parser, sampler):
    sampler.script = [BAD, WORSE]
    async with conversation(renderer, parser, sampler, max_resamples=1) as talk:
        turn = await talk.ask(USER)
    assert turn["content"] == WORSE
    assert "tool_calls" not in turn
    assert [r.malformed_tool_call for r in talk.stream.records] == [True, True]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.CUT])
async def test_a_turn_that_a_limit_ended_is_not_sampled_again(renderer, parser, sampler, make_sampled, finish):
    sampler.script = [make_sampled(sampler.ids(WORSE), finish), "unused"]
    async with conversation(renderer, parser, sampler, max_resamples=2) as talk:
        await talk.call(USER)
    assert sampler.script == ["unused"]
    assert [r.index for r in talk.stream.records] == [0]


async def test_without_tools_in_the_request_nothing_is_a_failed_call(renderer, parser, sampler):
    sampler.script = [WORSE, "unused"]
    async with conversation(renderer, parser, sampler, max_resamples=2) as talk:
        talk.tools = []
        assert (await talk.ask(USER))["content"] == WORSE
    assert sampler.script == ["unused"]


async def test_in_the_manifest_the_failed_one_is_a_call_that_nobody_got(make_proxy, sampler):
    sampler.script = [BAD, GOOD, "done"]
    async with make_proxy(on_malformed_tool_call="resample") as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            first = await client.post("/chat/completions", json=body(tools=[EXEC]))
            turn = first.json()["choices"][0]["message"]
            again = await client.post("/chat/completions", json=body(tools=[EXEC]))
            history = body(USER, turn, result(turn["tool_calls"][0]), tools=[EXEC])
            await client.post("/chat/completions", json=history)
        assert (await rollout.settle()).num_calls == 3
        await rollout.close()
        *records, manifest = await proxy.records(4)
    assert again.json()["choices"] == first.json()["choices"]
    assert [(call.call_id, call.delivered) for call in manifest.calls] == [
        (rollout.call_id(0), False),
        (rollout.call_id(1), True),
        (rollout.call_id(2), True),
    ]
    delivered = {call.call_id for call in manifest.calls if call.delivered}
    selection = select(build(resolve(records)), leaf_cap=16, delivered=delivered)
    failed, good, done = selection.fates
    assert failed.kept == 0
    assert set(failed.dropped) == {DropReason.UNDELIVERED, DropReason.DUPLICATE}  # up to where the two part
    assert (good.kept, done.kept) == (good.sampled, done.sampled)
    assert len(selection.branches) == 1


async def test_as_text_a_failed_call_is_sampled_once(make_proxy, sampler):
    sampler.script = [BAD]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", json=body(tools=[EXEC]))
    assert response.json()["choices"][0]["message"]["content"] == BAD
