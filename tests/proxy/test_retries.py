"""Retries: the same request gets the same answer; an altered one is a sibling of what it supersedes."""

from __future__ import annotations

import gc
import json
import tracemalloc

import anyio
import httpx
import pytest
from chat_requests import USER, body, events_of
from conversation import conversation

from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.messages import CallError
from clawpipe.pipeline.segments import DropReason, select
from clawpipe.pipeline.tree import build, resolve

pytestmark = pytest.mark.anyio


def again(stamp: str) -> dict[str, str]:
    return {"role": "user", "content": f"[{stamp}] Continue."}


async def test_a_stream_whose_client_vanished_is_told_again_to_the_next(make_proxy, sampler):
    sampler.script = ["patience"]
    sampler.hold = anyio.Event()
    async with make_proxy(keepalive_s=0.05) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            with anyio.move_on_after(0.4):
                async with client.stream("POST", "/chat/completions", json=body(stream=True)) as response:
                    async for _ in response.aiter_raw():
                        pass
            second = []

            async def ask() -> None:
                second.append(await client.post("/chat/completions", json=body(stream=True)))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.sleep(0.2)
                sampler.hold.set()
            whole = await client.post("/chat/completions", json=body())
        await rollout.settle()
        await rollout.close()
        manifest = await proxy.manifest()
    said = [event["choices"][0]["delta"].get("content") for event in events_of(second[0].text)]
    assert "patience" in said
    assert whole.json()["id"] == events_of(second[0].text)[0]["id"]
    assert len(sampler.prompts) == 1
    assert [(call.call_id, call.delivered) for call in manifest.calls] == [(rollout.call_id(0), True)]


async def test_many_that_ask_the_same_at_the_same_time_share_one_sample(make_proxy, sampler):
    sampler.script = ["one"]
    sampler.hold = anyio.Event()
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client, anyio.create_task_group() as group:
            answers: list[httpx.Response] = []

            async def ask(stream: bool) -> None:
                answers.append(await client.post("/chat/completions", json=body(stream=stream)))

            for n in range(10):
                group.start_soon(ask, n % 2 == 0)
            await anyio.sleep(0.4)
            sampler.hold.set()
    assert [answer.status_code for answer in answers] == [200] * 10
    assert len(sampler.prompts) == 1


async def test_the_same_question_to_two_rollouts_is_sampled_twice(make_proxy, sampler):
    sampler.script = ["one", "two"]
    async with make_proxy() as proxy:
        for name in ("r-1", "r-2"):
            async with (await proxy.rollout(name)).client() as client:
                assert (await client.post("/chat/completions", json=body())).status_code == 200
    assert len(sampler.prompts) == 2


async def test_a_refused_request_is_refused_again_and_not_remembered_as_an_answer(make_proxy, sampler):
    sampler.script = ["fits"]
    long = {"role": "user", "content": "word " * 5000}
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            refused = [await client.post("/chat/completions", json=body(long)) for _ in range(2)]
            fits = await client.post("/chat/completions", json=body())
    assert [answer.json()["error"]["code"] for answer in refused] == ["context_length_exceeded"] * 2
    assert fits.status_code == 200


async def test_an_altered_retry_is_a_sibling_and_what_it_supersedes_is_not_trained(renderer, parser, sampler):
    """OpenClaw's way: each try ends with another message; only the last one's answer is in the history."""
    sampler.script = ["lost one", "lost two", "kept", "and on"]
    async with conversation(renderer, parser, sampler) as talk:
        await talk.ask(USER)
        await talk.ask(USER, again("10:01"))
        turn = await talk.ask(USER, again("10:02"))
        await talk.ask(USER, again("10:02"), turn, USER)
    selection = talk.selection(0, 1)
    lost, too, kept, on = selection.fates
    assert lost.dropped == {DropReason.UNDELIVERED: lost.sampled}
    assert too.dropped == {DropReason.UNDELIVERED: too.sampled}
    assert (kept.kept, on.kept) == (kept.sampled, on.sampled)
    [branch] = selection.branches
    assert branch.tokens.tolist() == talk.prompt(3) + talk.completion(3)


async def test_of_two_answers_to_the_same_prompt_the_one_without_a_future_is_a_dead_leaf(renderer, parser, sampler):
    sampler.script = ["superseded", "kept", "and on"]
    async with conversation(renderer, parser, sampler) as talk:
        await talk.ask(USER)
        turn = await talk.ask(USER)  # the window for retries is over
        await talk.ask(USER, turn, USER)
    superseded, kept, on = talk.selection().fates
    assert superseded.dropped == {DropReason.DEAD_LEAF: superseded.sampled}
    assert (kept.kept, on.kept) == (kept.sampled, on.sampled)


async def test_a_retry_without_the_end_of_the_history_is_a_sibling_too(renderer, parser, sampler):
    """Claude Code's way after a refusal: the request comes again, degraded."""
    sampler.script = ["first", "lost", "kept"]
    async with conversation(renderer, parser, sampler) as talk:
        turn = await talk.ask(USER)
        await talk.ask(USER, turn, USER, {"role": "user", "content": "more"})
        await talk.ask(USER, turn, USER)
    delivered = {record.call_id for record in talk.stream.records if record.index != 1}
    selection = select(build(resolve(talk.stream.records)), leaf_cap=16, delivered=delivered)
    first, lost, kept = selection.fates
    assert (first.kept, kept.kept) == (first.sampled, kept.sampled)
    assert lost.dropped == {DropReason.UNDELIVERED: lost.sampled}


def long(words: int) -> dict[str, str]:
    return {"role": "user", "content": "word " * words}


async def test_a_conversation_that_comes_to_the_same_words_again_is_no_retry(make_proxy, sampler):
    """OpenCode at a full context: it reads, is refused, compacts, and its history is what it was before."""
    sampler.script = ["read one", "summary one", "read two", "summary two", "and done"]
    said = []
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for _ in range(2):
                read = await client.post("/chat/completions", json=body(USER))
                said.append(read.json()["choices"][0]["message"])
                refused = await client.post("/chat/completions", json=body(USER, said[-1], long(5000)))
                assert refused.status_code == 400
                summary = await client.post("/chat/completions", json=body(USER, long(3)))
                said.append(summary.json()["choices"][0]["message"])
        await rollout.settle()
    assert [turn["content"] for turn in said] == ["read one", "summary one", "read two", "summary two"]


async def test_what_a_later_request_builds_on_is_not_told_again_though_nobody_is_known_to_have_it(
    renderer, parser, sampler
):
    """A harness may hang up when it has what it wants, with a call of the turn already made."""
    sampler.script = ["first", "next", "first again"]
    async with conversation(renderer, parser, sampler, retry_window_s=1000.0) as talk:
        turn = await talk.ask(USER)
        assert (await talk.ask(USER))["content"] == "first"
        await talk.ask(USER, turn, USER)
        again = await talk.ask(USER)
    assert again["content"] == "first again"
    assert [record.index for record in talk.stream.records] == [0, 1, 2]


async def test_a_refused_request_builds_on_its_history_too(renderer, parser, sampler):
    sampler.script = ["first", "first again"]
    async with conversation(renderer, parser, sampler, retry_window_s=1000.0, context_tokens=300) as talk:
        turn = await talk.ask(USER)
        with pytest.raises(CallError, match="maximum context length"):
            await talk.ask(USER, turn, long(1000))
        assert (await talk.ask(USER))["content"] == "first again"


async def test_an_answer_that_got_lost_is_told_again_whatever_others_asked_meanwhile(renderer, parser, sampler):
    """Sub-agents go on while the main conversation's connection is gone."""
    sampler.script = ["main", "aside"]
    async with conversation(renderer, parser, sampler, retry_window_s=1000.0) as talk:
        await talk.ask(USER)
        await talk.ask({"role": "user", "content": "aside"})
        assert (await talk.ask(USER))["content"] == "main"


async def test_retries_of_two_conversations_at_once_are_no_progress(renderer, parser, sampler):
    sampler.script = ["main", "aside"]
    aside = {"role": "user", "content": "aside"}
    async with conversation(renderer, parser, sampler, retry_window_s=1000.0) as talk:
        calls = [(await talk.call(message))[1] for message in (USER, aside)]
        for call in calls:
            call.deliver()
        for _ in range(2):
            assert (await talk.ask(aside))["content"] == "aside"
            assert (await talk.ask(USER))["content"] == "main"


async def test_refused_requests_leave_nothing_behind(renderer, parser, sampler):
    sampler.script = ["first"]
    encoder = Encoder(renderer.tokenizer, cached_tokens=1000)
    limits = {"retry_window_s": 1000.0, "context_tokens": 300}
    async with conversation(renderer, parser, sampler, encoder=encoder, **limits) as talk:
        await talk.ask(USER)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(10):
                foreign = {"role": "assistant", "content": f"{number} " + " " * 200_000}
                with pytest.raises(CallError):
                    await talk.ask(USER, foreign, long(1000 + number))
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 1_000_000  # of 2 MB


async def test_a_request_that_is_only_written_otherwise_is_the_same(make_proxy, sampler):
    sampler.script = ["once"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for text in (json.dumps(body()), json.dumps(body(), indent=2), json.dumps({**body(), "user": "x"})):
                assert (await client.post("/chat/completions", content=text)).status_code == 200
    assert len(sampler.prompts) == 1
