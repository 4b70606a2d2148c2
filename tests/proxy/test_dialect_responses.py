"""OpenAI Responses over a real listening socket, spoken by the official SDK wherever it can say it."""

from __future__ import annotations

import json

import anyio
import openai
import pytest
from openai_requests import CALL, EXEC, THOUGHT, call, events_of, output, sdk, user

from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.messages import Answer, Head, ToolCall, Turn
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import FinishReason

pytestmark = pytest.mark.anyio

SEALED = {"include": ["reasoning.encrypted_content"]}
DOCS = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "The documents.",
    "tools": [
        {"type": "function", "name": "search", "description": "finds", "strict": False, "parameters": {}},
        {"type": "function", "name": "read", "parameters": {}},
    ],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "finds tools", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def parser(make_parser):
    """A model that thinks."""
    return make_parser(reasoning_parser="qwen3")


def body(*items, **fields):
    return {"model": "policy", "input": list(items) or [user("hello")], **fields}


async def test_the_sdk_reads_a_whole_response(make_proxy, sampler):
    sampler.script = ["Sure.\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            response = await client.responses.create(**body(tools=[EXEC], instructions="Be brief.", temperature=0.5))
    said, called = response.output
    assert (response.object, response.status, response.model) == ("response", "completed", "policy")
    assert response.output_text == "Sure.\n"
    assert (said.type, said.role, said.status, said.id[:4]) == ("message", "assistant", "completed", "msg_")
    assert (called.type, called.name, called.status, called.id[:3]) == ("function_call", "exec", "completed", "fc_")
    assert json.loads(called.arguments) == {"cmd": "ls -la", "n": 1.0}
    assert (response.instructions, response.temperature, response.tool_choice) == ("Be brief.", 0.5, "auto")
    assert [tool.name for tool in response.tools] == ["exec"]
    sizes = (len(sampler.prompts[0]), len(sampler.said[0].ids))
    assert (response.usage.input_tokens, response.usage.output_tokens) == sizes
    assert response.usage.total_tokens == sum(sizes)


async def test_the_sdks_stream_helper_accumulates_the_turn(make_proxy, sampler):
    sampler.script = [THOUGHT + "Sure.\n" + CALL + "\n" + CALL]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, client.responses.stream(**body(tools=[EXEC])) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
    thought, said, *called = response.output
    assert thought.content[0].text.strip() == "Which files?"
    assert said.content[0].text.strip() == "Sure."
    assert [each.parsed_arguments for each in called] == [{"cmd": "ls -la", "n": 1.0}] * 2
    assert len({each.call_id for each in called}) == 2
    assert response.usage.output_tokens == len(sampler.said[0].ids)
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert [json.loads(snapshot) for snapshot in snapshots] == [{"cmd": "ls -la", "n": 1.0}] * 2
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text


async def test_a_stream_and_a_whole_response_say_the_same(make_proxy, sampler):
    sampler.script = [THOUGHT + "one " + CALL]
    async with make_proxy(retry_window_s=3600) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            whole = await client.responses.create(**body(tools=[EXEC], **SEALED))
            stream = await client.responses.create(**body(tools=[EXEC], **SEALED), stream=True)
            events = [event async for event in stream]
    assert events[-1].response.to_dict() == whole.to_dict()
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in whole.output]


async def test_a_stream_has_the_providers_events_in_order_and_numbered(make_proxy, sampler):
    sampler.script = [THOUGHT + "Hi." + call("apply_patch", input="x")]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/responses", json=body(stream=True, tools=[PATCH], **SEALED))
    events = events_of(response.text)
    kinds = [name.removeprefix("response.") for name, data in events if data["type"] == name]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    free = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    items = [
        [kind.format("reasoning_text") for kind in part],
        [kind.format("output_text") for kind in part],
        free,
    ]
    filled = [kind for item in items for kind in ["output_item.added", *item, "output_item.done"]]
    assert [kind for kind in kinds if kind != "keepalive"] == ["created", "in_progress", *filled, "completed"]
    numbers = [data["sequence_number"] for name, data in events if name != "keepalive"]
    assert numbers == list(range(len(numbers)))
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    assert [item.get("content", item.get("input")) for item in added] == [[], [], ""]
    assert all("encrypted_content" not in item for item in added)


async def test_a_held_stream_is_kept_alive_by_events_that_the_sdk_reads_over(make_proxy, sampler):
    """Comments would not do: Codex's idle timer counts events alone."""
    sampler.script, sampler.hold = ["Late."], anyio.Event()
    async with make_proxy(keepalive_s=0.05) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client, client.responses.stream(**body()) as stream:
            kinds = []
            async for event in stream:
                kinds.append(event.type)
                if kinds.count("keepalive") > 2:
                    sampler.hold.set()
            response = await stream.get_final_response()
    assert kinds[:4] == ["response.created", "response.in_progress", "keepalive", "keepalive"]
    assert response.output_text == "Late."


async def test_a_turn_that_the_limit_ended_says_so(make_proxy, sampler, make_sampled):
    sampler.script = [make_sampled(sampler.ids("half a"), FinishReason.LENGTH)] * 2
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            response = await client.responses.create(**body(), max_output_tokens=16)
            stream = await client.responses.create(**body(user("b")), max_output_tokens=16, stream=True)
            *_, last = [event async for event in stream]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.output_text) == ("incomplete", "half a")
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert sampler.limits == [16, 16]


async def test_a_replay_as_codex_sends_it_extends_the_prompt_by_the_sampled_ids(make_proxy, sampler):
    """Reasoning, text and calls come back as items of their own, with what the client knows of each."""
    sampler.script = [
        THOUGHT + "Looking.\n" + call("exec", cmd="ls") + "\n" + call("mcp__docs__search", query="a"),
        THOUGHT + call("apply_patch", input="*** é\n+x"),
        "Done.",
    ]
    asked = {"tools": [EXEC, DOCS, PATCH], **SEALED}
    history = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]}]
    history = [*history, user("go")]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            first = await client.responses.create(**body(*history, **asked))
            *_, executed, searched = first.output
            history += [item.to_dict() for item in first.output]
            history += [output(executed.call_id, "a.txt"), output(searched.call_id, "found")]
            second = await client.responses.create(**body(*history, **asked))
            history += [{**item.to_dict(), "content": None} for item in second.output if item.type == "reasoning"]
            history += [item.to_dict() for item in second.output if item.type != "reasoning"]
            history += [output(second.output[-1].call_id, "patched", "custom_tool_call_output")]
            third = await client.responses.create(**body(*history, **asked))
        records = await proxy.records(3)
    assert (searched.name, searched.namespace) == ("search", "mcp__docs")
    assert (executed.name, executed.namespace) == ("exec", None)
    patch = second.output[-1]
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** é\n+x")
    assert third.output_text == "Done."
    tail = "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    results = "\n<tool_response>\na.txt\n</tool_response>\n<tool_response>\nfound\n"
    for earlier, new in ((0, "\n<|im_start|>user" + results), (1, "\n<|im_start|>user\n<tool_response>\npatched\n")):
        before = sampler.prompts[earlier] + sampler.said[earlier].ids.tolist()
        assert sampler.prompts[earlier + 1] == before + sampler.ids(new + tail)
    assert [record.graft_broken for record in records] == [None] * 3


async def test_an_empty_turn_that_is_replayed_stays_a_turn(make_proxy, sampler):
    sampler.script = ["", "Yes."]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            first = await client.responses.create(**body())
            replay = [item.to_dict() for item in first.output]
            await client.responses.create(**body(user("hello"), *replay, user("Are you there?")))
    new = sampler.ids("\n<|im_start|>user\nAre you there?<|im_end|>\n<|im_start|>assistant\n")
    assert sampler.prompts[1] == sampler.prompts[0] + sampler.said[0].ids.tolist() + new


async def test_an_overlong_prompt_is_refused_with_the_code_that_starts_a_compaction(make_proxy, sampler):
    async with make_proxy(context_tokens=64) as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            for streamed in (False, True):
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.responses.create(**body(user("hello " * 100)), stream=streamed)
                assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
                assert "maximum context length is 64 tokens" in refused.value.message
    assert sampler.prompts == []


async def test_a_failing_engine_is_a_server_error_whole_and_in_a_stream(make_proxy, sampler):
    sampler.script = [EngineError("gone"), EngineError("gone")]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            with pytest.raises(openai.InternalServerError) as whole:
                await client.responses.create(**body())
            with pytest.raises(openai.APIError) as streamed:
                async with client.responses.stream(**body(user("b"))) as stream:
                    await stream.get_final_response()
    assert whole.value.status_code == 503
    assert (whole.value.type, streamed.value.type) == ("server_error", "server_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "wizardry"}]}, "input[0].type"),
        ({"input": [user("a"), {"role": "user", "content": [{"type": "video"}]}]}, "input[1].content[0].type"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "input[0].tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "wizardry"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "x", "parameters": "y"}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [DOCS]}]}, "tools[0].tools[0].type"),
        ({"tools": [DOCS, {"type": "function", "name": "mcp__docs__read"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"instructions": ["x"]}, "instructions"),
    ],
)
async def test_a_bad_body_is_refused_with_the_path_of_the_fault(make_proxy, fields, param):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/responses", json=body(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]


async def test_what_was_asked_for_is_recorded_and_only_the_limit_is_obeyed(make_proxy, sampler):
    sampler.script = ["Yes."]
    asked = {"temperature": 0.5, "reasoning": {"effort": "high"}, "parallel_tool_calls": False}
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with sdk(rollout) as client:
            await client.responses.create(**body(), **asked, max_output_tokens=16, store=True)
        [record] = await proxy.records(1)
    recorded = {**asked, "reasoning": '{"effort":"high"}', "max_output_tokens": 16}
    assert record.requested == recorded
    assert sampler.limits == [16]


async def test_a_deeply_nested_body_is_answered_or_refused_and_the_proxy_lives_on(make_proxy, sampler):
    sampler.script = ["Yes."] * 200
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for depth in range(900, 1000, 3):
                deep = "[" * depth + "]" * depth
                tools = f'[{{"type": "function", "name": "x", "parameters": {{"a": {deep}}}}}]'
                metadata = f'{{"a": {deep}}}'
                for fields in (f'"tools": {tools}', f'"metadata": {metadata}'):
                    asked = f'{{"input": "hi", "stream": true, {fields}}}'
                    assert (await client.post("/responses", content=asked)).status_code in (200, 400), depth
            assert (await client.get("/models")).status_code == 200


def made(name: str, arguments: str) -> ToolCall:
    return ToolCall("call_1", name, arguments)


def wire(turn: Turn, **fields) -> list[dict]:
    """The output items of a turn."""
    ask = Responses().read(body(**fields))
    answer = Answer(head=Head(id="abc", prompt_tokens=1, created_s=0.0), turn=turn, completion_tokens=1)
    return json.loads(Responses().whole(ask, answer))["output"]


def test_reasoning_is_sealed_for_those_who_ask_and_the_seal_counts_before_the_words():
    turn = Turn(thinking="  as sampled ", text="a")
    shown = wire(turn)[0]
    sealed = wire(turn, **SEALED)[0]
    assert "encrypted_content" not in shown
    changed = {**sealed, "content": [{"type": "reasoning_text", "text": "as"}]}
    foreign = {**changed, "encrypted_content": "gAAAAABo"}
    spoken = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "in short"}]}
    found = [Responses().read(body(item)).messages[0].thinking for item in (shown, changed, foreign, spoken)]
    assert found == ["  as sampled ", "  as sampled ", "as", "in short"]


def test_consecutive_items_of_the_assistant_are_one_turn():
    ask = Responses().read(
        body(
            user("a"),
            {"role": "assistant", "content": "one"},
            {"type": "function_call", "call_id": "c", "name": "exec", "arguments": "{}"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "two"}]},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": "three"},
            instructions="S",
        )
    )
    assert [(message.speaker.value, message.text) for message in ask.messages] == [
        ("system", "S"),
        ("user", "a"),
        ("assistant", "one\ntwo"),
        ("tool", "r"),
        ("assistant", "three"),
    ]
    assert [each.id for each in ask.messages[2].calls] == ["c"]


def test_white_space_alone_is_no_item_but_in_a_turn_without_any_other():
    assert [item["type"] for item in wire(Turn(text="\n\n", thinking=" ", calls=(made("exec", "{}"),)))] == [
        "function_call"
    ]
    assert [item["content"][0]["text"] for item in wire(Turn(text="\n", thinking=" "))] == ["\n"]


def test_a_message_between_agents_is_a_users_in_the_clear():
    content = [
        {"type": "input_text", "text": "Task:\n"},
        {"type": "encrypted_content", "encrypted_content": "do it"},
    ]
    [message] = Responses().read(body({"type": "agent_message", "author": "/root", "content": content})).messages
    assert (message.speaker.value, message.text) == ("user", "Task:\ndo it")


def test_images_leave_a_note():
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    ask = Responses().read(
        body({"role": "user", "content": [image]}, {"type": "function_call_output", "call_id": "c", "output": [image]})
    )
    assert [message.text for message in ask.messages] == ["[image omitted]"] * 2


def test_the_model_sees_one_flat_list_of_functions_and_none_that_the_provider_would_run():
    ask = Responses().read(body(tools=[DOCS, PATCH, {"type": "web_search", "external_web_access": True}, EXEC]))
    seen = {tool["function"]["name"]: tool["function"] for tool in ask.tools}
    assert list(seen) == ["mcp__docs__search", "mcp__docs__read", "apply_patch", "exec"]
    assert seen["mcp__docs__search"]["description"] == "The documents.\n\nfinds"
    assert "description" not in seen["mcp__docs__read"]
    assert seen["apply_patch"]["description"] == "edits\n\nGrammar of the input (lark):\nstart: /.+/"
    assert seen["apply_patch"]["parameters"]["required"] == ["input"]


def test_tools_may_come_as_an_item():
    more = {"type": "additional_tools", "role": "developer", "tools": [{**DOCS, "description": ""}]}
    ask = Responses().read(body(more, user("a")))
    assert [tool["function"]["name"] for tool in ask.tools] == ["mcp__docs__search", "mcp__docs__read"]
    assert len(ask.messages) == 1


@pytest.mark.parametrize(
    "arguments", ['{"patch": "x"}', '{"input": 5}', '{"input": "x", "more": 1}', '{"input": "half \\ud83d"}']
)
def test_a_free_text_call_with_other_arguments_goes_out_as_the_call_that_it_is(arguments):
    [item] = wire(Turn(calls=(made("apply_patch", arguments),)), tools=[PATCH])
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "apply_patch", arguments)


def test_a_call_to_a_tool_that_nobody_declared_keeps_its_name():
    [item] = wire(Turn(calls=(made("mcp__docs__burn", "{}"),)), tools=[DOCS])
    assert item["name"] == "mcp__docs__burn"
    assert "namespace" not in item


def test_the_arguments_of_a_search_go_out_as_they_are_and_on_one_line():
    deep = '{"a":\r\n' + "[" * 900 + "1.0" + "]" * 900 + "}"
    turn = Turn(calls=(made("tool_search", deep),))
    answer = Answer(head=Head(id="abc", prompt_tokens=1, created_s=0.0), turn=turn, completion_tokens=1)
    ask = Responses().read(body(tools=[SEARCH]))
    events = list(Responses().events(ask, answer))
    assert [deep.replace("\r\n", "  ").encode() in event for event in events] == [True, True, True]
    assert [event.count(b"\n") for event in events] == [3, 3, 3]


def test_a_search_for_tools_is_a_call_and_its_finds_can_be_called():
    [search] = wire(Turn(calls=(made("tool_search", '{"query": "documents"}'),)), tools=[SEARCH])
    assert (search["type"], search["execution"], search["arguments"]) == (
        "tool_search_call",
        "client",
        {"query": "documents"},
    )
    found = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "tools": [DOCS]}
    history = {"input": [user("a"), search, found], "tools": [SEARCH]}
    ask = Responses().read(body(**history))
    assert ask.messages[1].calls == (made("tool_search", '{"query": "documents"}'),)
    listed = json.loads(ask.messages[2].text)
    assert [tool["function"]["name"] for tool in listed] == ["mcp__docs__search", "mcp__docs__read"]
    assert [tool["function"]["name"] for tool in ask.tools] == ["tool_search"]
    [read] = wire(Turn(calls=(made("mcp__docs__read", "{}"),)), **history)
    assert (read["name"], read["namespace"]) == ("read", "mcp__docs")
