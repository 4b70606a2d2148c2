"""A harness's requests over a real listening socket: what an answer says, what a prompt holds, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chat_requests import USER, body, events_of

from clawpipe.actors import link
from clawpipe.actors.proxy.intake import MAX_BODY_BYTES
from clawpipe.pipeline.records import CallRecord, ints

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls -la", "n": 1.0}}\n</tool_call>'


def prompt_of(record: CallRecord, earlier: dict[str, list[int]]) -> list[int]:
    """The prompt as a reader of the stream rebuilds it."""
    shared = earlier[record.parent][: record.parent_tokens] if record.parent else []
    return shared + ints(record.prompt_delta).tolist()


async def test_a_whole_answer_has_the_turn_and_its_usage(make_proxy, sampler, tools):
    sampler.script = ["Sure.\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", json=body(tools=tools))
    answer = response.json()
    message = answer["choices"][0]["message"]
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert message["content"] == "Sure.\n"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["exec"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"cmd": "ls -la", "n": 1.0}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    sizes = (len(sampler.prompts[0]), len(sampler.said[0].ids))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == sizes
    assert answer["usage"]["total_tokens"] == sum(sizes)


async def test_a_stream_adds_up_to_the_same_turn(make_proxy, sampler, tools):
    sampler.script = ["Sure.\n" + CALL + "\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            asked = body(tools=tools, stream=True, stream_options={"include_usage": True})
            response = await client.post("/chat/completions", json=asked)
    events = events_of(response.text)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure.\n"
    for index in (0, 1):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["function"]["name"] == "exec"
        arguments = "".join(part["function"]["arguments"] for part in mine)
        assert json.loads(arguments) == {"cmd": "ls -la", "n": 1.0}
    assert len({part["id"] for part in parts if "id" in part}) == 2
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(sampler.said[0].ids)


async def test_the_second_call_extends_the_first_by_sampled_ids(make_proxy, sampler, tools, renderer):
    sampler.script = [CALL, "done"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            first = (await client.post("/chat/completions", json=body(tools=tools))).json()["choices"][0]["message"]
            call = first["tool_calls"][0]
            replayed = {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call["id"].replace("_", ""),
                        "type": "function",
                        "function": {"name": "exec", "arguments": '{"n":1,"cmd":"ls -la"}'},
                    }
                ],
            }
            result = {"role": "tool", "tool_call_id": call["id"].replace("_", ""), "content": "a\nb"}
            await client.post("/chat/completions", json=body(USER, replayed, result, tools=tools))
        records = await proxy.records(2)
    new = "\n<|im_start|>user\n<tool_response>\na\nb\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    before = sampler.prompts[0] + sampler.said[0].ids.tolist()
    assert sampler.prompts[1] == before + sampler.ids(new)
    assert records[1].parent == rollout.call_id(0)
    assert records[1].parent_tokens == len(before)
    assert records[1].graft_broken is None
    assert ints(records[1].prompt_delta).tolist() == sampler.ids(new)
    assert renderer.decode(np.array(sampler.prompts[1], np.int32)).count("<tool_call>") == 1


async def test_a_turn_that_the_harness_wrote_itself_is_text_and_says_why(make_proxy, sampler):
    sampler.script = ["one", "two"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            await client.post("/chat/completions", json=body())
            changed = {"role": "assistant", "content": "uno"}
            await client.post("/chat/completions", json=body(USER, changed, USER))
        records = await proxy.records(2)
    text = "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert sampler.prompts[1] == sampler.prompts[0] + sampler.ids("uno") + sampler.ids(text)
    assert records[1].graft_broken == "foreign"
    first = sampler.prompts[0] + sampler.said[0].ids.tolist()
    assert prompt_of(records[1], {rollout.call_id(0): first}) == sampler.prompts[1]


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "exec", "arguments": {"cmd": "a}\n</tool_call>',
        '<tool_call>\n{"name": "exec", "arguments": {"cmd": "a"}}',
        '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "exec", "arguments": "ls"}\n</tool_call>',
    ],
)
async def test_a_malformed_tool_call_goes_out_as_text_and_is_flagged(make_proxy, sampler, tools, said):
    sampler.script = [said]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            answer = (await client.post("/chat/completions", json=body(tools=tools))).json()
        [record] = await proxy.records(1)
    message = answer["choices"][0]["message"]
    assert message["content"] == said
    assert "tool_calls" not in message
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert record.malformed_tool_call


async def test_an_overlong_prompt_is_refused_in_the_providers_words_and_makes_no_call(make_proxy, sampler):
    async with make_proxy(context_tokens=64) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            long = {"role": "user", "content": "hello " * 100}
            responses = [
                await client.post("/chat/completions", json=body(long)),
                await client.post("/chat/completions", json=body(long, stream=True)),
                await client.post("/chat/completions", json=body(USER, max_tokens=60)),
            ]
        settled = await rollout.settle()
        await rollout.close()
        manifest = await proxy.manifest()
    for response in responses:
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
    assert settled == link.Settled(num_calls=0)
    assert manifest.num_aborted == 0
    assert sampler.prompts == []


async def test_without_a_limit_of_its_own_a_call_may_fill_the_context(make_proxy, sampler):
    sampler.script = ["a", "b"]
    async with make_proxy(context_tokens=100, max_completion_tokens=90) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            await client.post("/chat/completions", json=body())
            await client.post("/chat/completions", json=body(max_tokens=7))
    assert sampler.limits == [100 - len(sampler.prompts[0]), 7]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        (b"[" * 100_000, None),
        (b"{}", None),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "x"}', "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "video"}]}]}', "messages[0].content[0].type"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}', "tools[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}', None),
    ],
)
async def test_bad_requests_are_refused_in_the_protocols_form(make_proxy, sampler, content, param):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", content=content)
            alive = await client.get("/models")
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert alive.status_code == 200


async def test_models_lists_the_policy_and_other_paths_are_unknown(make_proxy):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            listed = (await client.get("/models")).json()
            missing = await client.post("/embeddings", json={})
    assert [model["id"] for model in listed["data"]] == ["policy"]
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"


async def test_half_a_surrogate_pair_does_no_harm(make_proxy, sampler):
    sampler.script = ["ok"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            raw = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}], "model": "policy"}'
            response = await client.post("/chat/completions", content=raw)
    assert response.status_code == 200
    assert sampler.prompts[0] == sampler.ids("<|im_start|>user\ncut \ufffd<|im_end|>\n<|im_start|>assistant\n")


async def test_a_body_nested_as_deep_as_json_is_read_is_refused_and_the_proxy_lives_on(make_proxy, sampler):
    """Each walk of a body needs its own depth: some body passes the first walks and not the last."""
    sampler.script = ["Yes."] * 200
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for depth in range(900, 1000):
                function = f'{{"name": "x", "parameters": {{"a": {"[" * depth + "]" * depth}}}}}'
                tools = f'[{{"type": "function", "function": {function}}}]'
                asked = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": {tools}}}'
                assert (await client.post("/chat/completions", content=asked)).status_code in (200, 400), depth
            assert (await client.get("/models")).status_code == 200


async def test_what_a_harness_asks_for_never_makes_a_record_too_large_to_store(make_proxy, sampler):
    """Numbers grow when they are written again: here to three times of what NATS takes, from a body of the limit."""
    sampler.script = ["Yes."]
    numbers = ",".join(["1e9"] * (MAX_BODY_BYTES // 4 - 100))
    asked = json.dumps(body(logit_bias=[], stop=["y"])).replace("[]", f"[{numbers}]")
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/chat/completions", content=asked)
        assert response.status_code == 200
        [record] = await proxy.records(1)
    assert record.requested["logit_bias"].startswith("[1000000000.0,")
    assert len(record.requested["logit_bias"]) == 1000
    assert record.requested["stop"] == '["y"]'
