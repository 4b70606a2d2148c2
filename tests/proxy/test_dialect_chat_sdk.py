"""OpenAI Chat Completions over a real listening socket, spoken by the official SDK wherever it can say it."""

from __future__ import annotations

import json

import anyio
import openai
import pytest
from chat_requests import USER, body
from openai_requests import CALL, CHAT_EXEC, THOUGHT, sdk

from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import FinishReason

pytestmark = pytest.mark.anyio

ARGUMENTS = {"cmd": "ls -la", "n": 1.0}


@pytest.fixture(scope="module")
def parser(make_parser):
    """A model that thinks."""
    return make_parser(reasoning_parser="qwen3")


async def test_the_sdk_reads_a_whole_completion(make_proxy, sampler):
    sampler.script = [THOUGHT + "Sure.\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            completion = await client.chat.completions.create(**body(tools=[CHAT_EXEC], tool_choice="auto"))
    [choice] = completion.choices
    [made] = choice.message.tool_calls
    assert (completion.object, completion.model, choice.finish_reason) == ("chat.completion", "policy", "tool_calls")
    assert choice.message.content.strip() == "Sure."
    assert choice.message.reasoning_content.strip() == "Which files?"
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == ("function", "exec", ARGUMENTS)
    sizes = (len(sampler.prompts[0]), len(sampler.said[0].ids))
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == sizes


async def test_the_sdks_stream_helper_accumulates_the_turn(make_proxy, sampler):
    sampler.script = [THOUGHT + "Sure.\n" + CALL + "\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        asked = body(tools=[CHAT_EXEC], stream_options={"include_usage": True})
        async with sdk(rollout) as client, client.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            completion = await stream.get_final_completion()
    [choice] = completion.choices
    assert [made.function.parsed_arguments for made in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert choice.message.content.strip() == "Sure."
    assert choice.finish_reason == "tool_calls"
    assert completion.usage.completion_tokens == len(sampler.said[0].ids)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.parsed_arguments) for event in done] == [(0, ARGUMENTS), (1, ARGUMENTS)]


async def test_chunks_say_that_usage_is_still_to_come_where_it_was_asked_for(make_proxy, sampler):
    sampler.script = ["Hi."]
    async with make_proxy(retry_window_s=3600) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            with_usage = {"stream": True, "stream_options": {"include_usage": True}}
            counted = [chunk async for chunk in await client.chat.completions.create(**body(**with_usage))]
            bare = [chunk async for chunk in await client.chat.completions.create(**body(stream=True))]
    *chunks, last = counted
    assert (last.choices, last.usage.total_tokens) == ([], len(sampler.prompts[0]) + len(sampler.said[0].ids))
    assert all("usage" in chunk.to_dict() and chunk.usage is None for chunk in chunks)
    assert all("usage" not in chunk.to_dict() for chunk in bare)
    assert [chunk.choices for chunk in bare] == [chunk.choices for chunk in chunks]


async def test_a_replay_of_the_sdks_own_message_extends_the_prompt_by_the_sampled_ids(make_proxy, sampler):
    sampler.script = [THOUGHT + "Sure.\n" + CALL, "Done."]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            first = (await client.chat.completions.create(**body(tools=[CHAT_EXEC]))).choices[0].message
            result = {
                "role": "tool",
                "tool_call_id": first.tool_calls[0].id,
                "content": [{"type": "text", "text": "a"}],
            }
            await client.chat.completions.create(**body(USER, first, result, tools=[CHAT_EXEC]))
    new = "\n<|im_start|>user\n<tool_response>\na\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert sampler.prompts[1] == sampler.prompts[0] + sampler.said[0].ids.tolist() + sampler.ids(new)


async def test_the_sdk_waits_through_comments_and_through_a_held_whole_answer(make_proxy, sampler):
    sampler.script, sampler.hold = ["Late.", "Later."], anyio.Event()
    async with make_proxy(keepalive_s=0.05) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, anyio.create_task_group() as group:

            async def release() -> None:
                await anyio.sleep(0.3)
                sampler.hold.set()

            group.start_soon(release)
            async with client.chat.completions.stream(**body()) as stream:
                streamed = await stream.get_final_completion()
            sampler.hold = anyio.Event()
            group.start_soon(release)
            whole = await client.chat.completions.create(**body(USER, USER))
    assert [each.choices[0].message.content for each in (streamed, whole)] == ["Late.", "Later."]


async def test_a_turn_that_the_limit_ended_says_so(make_proxy, sampler, make_sampled):
    sampler.script = [make_sampled(sampler.ids("half a"), FinishReason.LENGTH)]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            completion = await client.chat.completions.create(**body(max_tokens=None, max_completion_tokens=5))
    [choice] = completion.choices
    assert (choice.finish_reason, choice.message.content, sampler.limits) == ("length", "half a", [5])


async def test_without_tools_to_choose_a_call_is_text(make_proxy, sampler):
    sampler.script = [CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            asked = body(tools=[CHAT_EXEC], tool_choice="none")
            [choice] = (await client.chat.completions.create(**asked)).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


async def test_errors_are_the_sdks_exceptions(make_proxy, sampler):
    sampler.script = [EngineError("gone"), EngineError("gone")]
    long = {"role": "user", "content": "hello " * 200}
    async with make_proxy(context_tokens=64) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            with pytest.raises(openai.BadRequestError) as overflow:
                await client.chat.completions.create(**body(long))
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(**body())
            with pytest.raises(openai.APIError) as streamed:
                async with client.chat.completions.stream(**body(USER, USER)) as stream:
                    await stream.get_final_completion()
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="policy", input="x")
    assert (overflow.value.code, overflow.value.param) == ("context_length_exceeded", "messages")
    assert (failed.value.status_code, failed.value.type, streamed.value.type) == (503, "server_error", "server_error")


async def test_the_policy_is_the_only_model(make_proxy):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            listed = [model.id async for model in client.models.list()]
            named = await client.models.retrieve("policy")
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt")
    assert (listed, named.id, named.object) == (["policy"], "policy", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"stream_options": "x"}, "stream_options"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": [{}]}]}, "messages[1].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "x"}]}]}, "messages[1].content[0].type"),
    ],
)
async def test_a_bad_body_is_refused_with_the_path_of_the_fault(make_proxy, fields, param):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", json=body() | fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("asked", "stops"), [("END", ("END",)), (["a", "", "b"], ("a", "b")), (None, ()), ("", ()), ([], ())]
)
def test_stop_texts_are_obeyed_whatever_their_form(asked, stops):
    assert Chat().read(body(stop=asked)).stop == stops


def test_what_a_text_model_cannot_take_in_leaves_a_note():
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
    ]
    [message] = Chat().read(body({"role": "user", "content": parts})).messages
    assert message.text == "look\n[image omitted]\n[audio omitted]\n[file omitted]"


def test_system_and_developer_messages_stand_where_they_were_sent():
    messages = [
        {"role": "developer", "content": "one"},
        {"role": "user", "name": "ann", "content": "two"},
        {"role": "system", "content": [{"type": "text", "text": "three"}]},
    ]
    found = [(message.speaker.value, message.text) for message in Chat().read(body(*messages)).messages]
    assert found == [("system", "one"), ("user", "two"), ("system", "three")]


def test_log_probabilities_and_other_wishes_are_recorded_and_not_refused():
    wishes = {"logprobs": True, "top_logprobs": 5, "seed": 1, "logit_bias": {"5": -1}, "reasoning_effort": "high"}
    assert Chat().read(body(**wishes)).requested == {**wishes, "logit_bias": '{"5":-1}'}
