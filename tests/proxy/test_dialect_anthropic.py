"""Anthropic Messages over a real listening socket, spoken by the official SDK wherever it can say it."""

from __future__ import annotations

import json

import anthropic
import anyio
import pytest
from anthropic_requests import CALL, EXEC, USER, body, events_of, sdk, text, user

from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.messages import Answer, CallError, Fault, Head, Turn
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import FinishReason

pytestmark = pytest.mark.anyio

THOUGHT = "<think>\nWhich files?\n</think>\n\n"
HEAD = Head(id="abc123", prompt_tokens=7, created_s=0.0)


@pytest.fixture(scope="module")
def parser(make_parser):
    """A model that thinks."""
    return make_parser(reasoning_parser="qwen3")


async def test_the_sdk_reads_a_whole_message(make_proxy, sampler):
    sampler.script = ["Sure.\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            message = await client.messages.create(**body(tools=[EXEC]))
    said, called = message.content
    assert (message.type, message.role, message.model) == ("message", "assistant", "policy")
    assert (said.type, said.text) == ("text", "Sure.\n")
    assert (called.type, called.name, called.input) == ("tool_use", "exec", {"cmd": "ls -la", "n": 1.0})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    sizes = (len(sampler.prompts[0]), len(sampler.said[0].ids))
    assert (message.usage.input_tokens, message.usage.output_tokens) == sizes
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)


async def test_the_sdks_stream_helper_accumulates_the_turn(make_proxy, sampler):
    sampler.script = [THOUGHT + "Sure.\n" + CALL + "\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, client.messages.stream(**body(tools=[EXEC])) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
    thought, said, *called = message.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "Which files?")
    assert thought.signature
    assert said.text.strip() == "Sure."
    assert [call.input for call in called] == [{"cmd": "ls -la", "n": 1.0}] * 2
    assert len({call.id for call in called}) == 2
    assert message.stop_reason == "tool_use"
    sizes = (len(sampler.prompts[0]), len(sampler.said[0].ids))
    assert (message.usage.input_tokens, message.usage.output_tokens) == sizes
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


async def test_a_stream_and_a_whole_message_say_the_same(make_proxy, sampler):
    sampler.script = ["one " + CALL] * 2
    async with make_proxy(retry_window_s=20) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            whole = await client.messages.create(**body(tools=[EXEC]))
            async with client.messages.stream(**body(tools=[EXEC])) as stream:
                streamed = await stream.get_final_message()
    assert streamed.to_dict() == whole.to_dict()
    assert len(sampler.prompts) == 1


async def test_a_stream_has_the_providers_events_in_order(make_proxy, sampler):
    sampler.script = ["Hi."]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/messages?beta=true", json=body(stream=True))
    events = events_of(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(name == data["type"] for name, data in events)
    kinds = [name for name, _ in events if name != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
    assert events[0][1]["message"]["usage"]["input_tokens"] == len(sampler.prompts[0])
    assert events[0][1]["message"]["content"] == []
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}
    assert events[-2][1]["usage"]["output_tokens"] == len(sampler.said[0].ids)


async def test_a_held_stream_starts_at_once_and_is_kept_alive_by_pings(make_proxy, sampler):
    sampler.script, sampler.hold = ["Late."], anyio.Event()
    async with make_proxy(keepalive_s=0.05) as proxy:
        rollout = await proxy.rollout()
        async with (
            rollout.client() as client,
            client.stream("POST", "/messages", json=body(stream=True)) as response,
        ):
            read = ""
            async for part in response.aiter_text():
                read += part
                if read.count("event: ping") > 3:
                    sampler.hold.set()
    kinds = [name for name, _ in events_of(read)]
    assert kinds[:4] == ["message_start", "ping", "ping", "ping"]
    assert kinds[-1] == "message_stop"


async def test_the_sdk_waits_through_pings_and_through_a_held_whole_message(make_proxy, sampler):
    sampler.script, sampler.hold = ["Late.", "Later."], anyio.Event()
    async with make_proxy(keepalive_s=0.05) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, anyio.create_task_group() as group:

            async def release() -> None:
                await anyio.sleep(0.4)
                sampler.hold.set()

            group.start_soon(release)
            async with client.messages.stream(**body()) as stream:
                assert await stream.get_final_text() == "Late."
            sampler.hold = anyio.Event()
            group.start_soon(release)
            whole = await client.messages.create(**body(user(text("again"))))
    assert whole.content[0].text == "Later."


async def test_a_turn_that_the_limit_ended_says_so(make_proxy, sampler, make_sampled):
    sampler.script = [make_sampled(sampler.ids("half a"), FinishReason.LENGTH)]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            message = await client.messages.create(**body(max_tokens=5))
    assert (message.stop_reason, message.content[0].text, sampler.limits) == ("max_tokens", "half a", [5])


@pytest.mark.parametrize(
    ("turn", "ending"),
    [
        (Turn(text="a"), ("end_turn", None)),
        (Turn(text="a", stop_text="END"), ("stop_sequence", "END")),
        (Turn(text="a", truncated=True), ("max_tokens", None)),
        (Turn(), ("end_turn", None)),
    ],
)
def test_why_a_turn_ended(turn, ending):
    ask = Messages().read(body())
    whole = json.loads(Messages().whole(ask, Answer(head=HEAD, turn=turn, completion_tokens=1)))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending


def test_white_space_alone_is_no_block():
    answer = Answer(head=HEAD, turn=Turn(text="\n\n", thinking=" "), completion_tokens=3)
    assert json.loads(Messages().whole(Messages().read(body()), answer))["content"] == []


async def test_tokens_are_counted_without_sampling_or_recording(make_proxy, sampler):
    sampler.script = ["Yes."]
    foreign = {"role": "assistant", "content": "never said"}
    asked = {"model": "policy", "system": "S", "messages": [USER, foreign, USER], "tools": [EXEC]}
    async with make_proxy(context_tokens=500) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            counted = await client.messages.count_tokens(**asked)
            huge = await client.messages.count_tokens(model="policy", messages=[user(text("hello " * 900))])
            message = await client.messages.create(**asked, max_tokens=9)
        settled = await rollout.settle()
    assert counted.input_tokens == message.usage.input_tokens == len(sampler.prompts[0])
    assert huge.input_tokens > 500
    assert settled.num_calls == 1


async def test_both_providers_list_and_name_the_policy(make_proxy):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, rollout.client() as plain:
            page = await client.models.list()
            model = await client.models.retrieve("policy")
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("other")
            listed = (await plain.get("/models")).json()
            named = (await plain.get("/models/policy")).json()
            other = await plain.get("/models/other")
    assert [entry.id for entry in page.data] == ["policy"]
    assert not page.has_next_page()
    assert (model.type, model.id, model.display_name, model.created_at.year) == ("model", "policy", "policy", 1970)
    assert listed == {"object": "list", "data": [named]}
    assert (named["id"], named["object"]) == ("policy", "model")
    assert other.json()["error"]["code"] == "not_found"


async def test_an_overlong_prompt_is_refused_in_the_providers_words(make_proxy, sampler):
    async with make_proxy(context_tokens=64) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            long = user(text("hello " * 100))
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**body(long, max_tokens=10))
            tokens = (await client.messages.count_tokens(model="policy", messages=[long])).input_tokens
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**body(long, max_tokens=10, stream=True))
    error = refused.value.body["error"]
    assert error == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {tokens + 10} tokens > 64 maximum",
    }
    assert sampler.prompts == []


async def test_a_failing_engine_is_an_overload_whole_and_as_an_event(make_proxy, sampler):
    sampler.script = [EngineError("gone"), EngineError("gone")]
    async with make_proxy(keepalive_s=5) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, rollout.client() as plain:
            with pytest.raises(anthropic.OverloadedError) as failed:
                await client.messages.create(**body())
            streamed = await plain.post("/messages", json=body(user(text("b")), stream=True))
    overloaded = {"type": "overloaded_error", "message": "Overloaded"}  # OpenClaw tries again on this very word
    name, error = events_of(streamed.text)[-1]
    assert (failed.value.status_code, failed.value.body["error"]) == (529, overloaded)
    assert (name, error["type"], error["error"]) == ("error", "error", overloaded)


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (Fault.NOT_FOUND, 404, "not_found_error"),
        (Fault.TOO_LARGE, 413, "request_too_large"),
        (Fault.SETTLED, 503, "api_error"),
    ],
)
def test_each_fault_has_its_status_and_type(fault, status, kind):
    found, error = Messages().error(CallError(fault, "words"))
    assert found == status
    assert json.loads(error) == {
        "type": "error",
        "error": {"type": kind, "message": "words"},
        "request_id": None,
    }


async def test_what_was_asked_for_is_recorded_and_only_limit_and_stops_are_obeyed(make_proxy, sampler):
    sampler.script = ["Yes."]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            asked = body(
                temperature=0.5,
                top_k=3,
                stop_sequences=["END"],
                thinking={"type": "adaptive"},
                metadata={"user_id": "u"},
            )
            response = await client.post("/messages", json=asked)
        [record] = await proxy.records(1)
    assert response.status_code == 200
    assert record.requested == {
        "temperature": 0.5,
        "top_k": 3,
        "stop_sequences": '["END"]',
        "thinking": '{"type":"adaptive"}',
        "metadata": '{"user_id":"u"}',
        "max_tokens": 100,
    }
    assert Messages().read(asked).stop == ("END",)
