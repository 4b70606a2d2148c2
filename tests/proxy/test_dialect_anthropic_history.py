"""What a request of Anthropic Messages means, and that a replayed history is the earlier tokens exactly."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic_requests import (
    CACHED,
    CALL,
    EXEC,
    USER,
    body,
    text,
    user,
)

from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.dialects.anthropic_request import FAILED, read_count
from clawpipe.actors.proxy.messages import Message, Speaker, Text, Thinking, ToolCall, ToolResult

NEXT = "<|im_start|>assistant\n"
IMAGE, DOCUMENT = "[image omitted]", "[document omitted]"
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.fixture(scope="module")
def parser(make_parser):
    """A model that thinks."""
    return make_parser(reasoning_parser="qwen3")


def messages_of(*messages: Any, **fields: Any) -> list[Message]:
    return list(read_count(body(*messages, **fields)).messages)


def said(*words: str, speaker: Speaker = Speaker.USER) -> list[Message]:
    return [Message(speaker, (Text(word),)) for word in words]


def test_cache_marks_and_the_form_of_content_mean_nothing():
    plain = Messages().read(body(USER, system="S", tools=[EXEC]))
    marked = Messages().read(
        body(user(text("hello", **CACHED)), system=[text("S", **CACHED)], tools=[{**EXEC, **CACHED}], stream=True)
    )
    assert plain.digest() == marked.digest()


def test_later_content_merged_into_a_user_message_extends_it():
    before = messages_of(user(text("a")), {"role": "system", "content": "s"})
    merged = messages_of(user(text("a")), {"role": "system", "content": [text("s"), text("t")]}, user(text("b")))
    assert before == [*said("a"), *said("s", speaker=Speaker.SYSTEM)]
    assert merged == [*before, *said("t", speaker=Speaker.SYSTEM), *said("b")]
    assert messages_of(user(text("a"), text(" \n"), text("b"))) == said("a", "b")


def test_an_assistants_blocks_are_one_message_even_where_the_harness_split_it():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    called = {"type": "tool_use", "id": "call_1", "name": "exec", "input": {"b": 1, "a": [True]}}
    turn = Message(Speaker.ASSISTANT, (Thinking("hm"), Text("I"), ToolCall("call_1", "exec", '{"b":1,"a":[true]}')))
    one = {"role": "assistant", "content": [thought, hidden, text("I"), text("\n"), called]}
    split = [{"role": "assistant", "content": part} for part in ([thought], "I", [called])]
    assert messages_of(USER, one, USER) == messages_of(USER, *split, USER) == [*said("hello"), turn, *said("hello")]


def test_results_keep_their_order_and_what_a_text_model_cannot_see_is_named():
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "out\n", **CACHED},
        {"type": "tool_result", "tool_use_id": "2", "content": [text("a"), IMAGE_BLOCK, text(" ")]},
        {"type": "tool_result", "tool_use_id": "3"},
        {"type": "tool_result", "tool_use_id": "4", "is_error": True, "content": ""},
        {"type": "tool_result", "tool_use_id": "5", "content": [{"type": "tool_reference", "tool_name": "x"}]},
    ]
    found = messages_of(user(*results, text("next")))
    outputs = ["out\n", f"a\n{IMAGE}\n ", "", FAILED, "[tool x]"]
    expected = [Message(Speaker.TOOL, (ToolResult(str(n + 1), out),)) for n, out in enumerate(outputs)]
    assert found == [*expected, *said("next")]


def test_documents_and_search_results_are_their_text_where_they_have_one():
    written = {"type": "text", "media_type": "text/plain", "data": "words"}
    blocks = {"type": "content", "content": [text("one"), IMAGE_BLOCK]}
    found = messages_of(
        user(
            {"type": "document", "source": written, "title": "T", "context": "C"},
            {"type": "document", "source": blocks},
            {"type": "document", "source": {"type": "url", "url": "http://x"}},
            {"type": "search_result", "title": "T", "source": "S", "content": [text("found")]},
            IMAGE_BLOCK,
        )
    )
    assert found == said("T\nC\nwords", f"one\n{IMAGE}", DOCUMENT, "T\nS\nfound", IMAGE)


def test_the_system_prompt_is_one_message_and_tools_are_as_templates_want_them():
    ask = Messages().read(
        body(USER, system=[text("a"), text(" "), text("b")], tools=[EXEC], tool_choice={"type": "none"})
    )
    assert ask.messages[0] == Message(Speaker.SYSTEM, (Text("a"), Text("b")))
    function = {"name": "exec", "description": "runs it", "parameters": EXEC["input_schema"]}
    assert ask.tools == ({"type": "function", "function": function},)
    assert not ask.tools_allowed


@pytest.mark.anyio
async def test_claude_codes_replay_continues_the_sampled_tokens(make_proxy, sampler):
    """Content moves into the previous message, marks move, strings become lists, arguments are re-written."""
    thought = "<think>\nHm.\n</think>\n\n"
    sampler.script = [f"{thought}Look:\n{CALL}", "half", "done"]
    opening = user(text("go"), text("\n"), text("now", **CACHED))
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:

            async def ask(*messages: Any) -> dict[str, Any]:
                response = await client.post("/messages", json=body(*messages, tools=[EXEC], system=[text("S")]))
                return response.json()

            turn = await ask(opening)
            *blocks, called = turn["content"]
            called["input"] = {"n": 1, "cmd": "ls -la"}
            result = {"type": "tool_result", "tool_use_id": called["id"], "content": "a\nb"}
            history = [user(text("go"), text("now")), {"role": "assistant", "content": [*blocks, called]}]
            note = {"role": "system", "content": "note"}
            await ask(*history, user({**result, **CACHED}), note)
            again = [{"role": "assistant", "content": "half"}, user(text("go on", **CACHED))]
            await ask(
                *history, user({**result, "content": [text("a\nb")]}), {"role": "system", "content": "note"}, *again
            )
        records = await proxy.records(3)
    whole = [prompt + out.ids.tolist() for prompt, out in zip(sampler.prompts, sampler.said, strict=True)]
    first = "\n<|im_start|>user\n<tool_response>\na\nb\n</tool_response><|im_end|>\n"
    first += f"<|im_start|>system\nnote<|im_end|>\n{NEXT}"
    assert sampler.prompts[1] == whole[0] + sampler.ids(first)
    assert sampler.prompts[2] == whole[1] + sampler.ids(f"\n<|im_start|>user\ngo on<|im_end|>\n{NEXT}")
    assert [record.graft_broken for record in records] == [None] * 3
    assert [record.parent_tokens for record in records[1:]] == [len(whole[0]), len(whole[1])]
