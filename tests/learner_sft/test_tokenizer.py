"""The tokenizer and its chat template: exact texts, exact pieces, nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from clawpipe.learner.tokenizer import encode_turns, pieces_of, render, train_tokenizer

FIRST = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SECOND = {"type": "function", "function": {"name": "finish", "parameters": {}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look twice."},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": {"where": "left, ü"}}},
            {"type": "function", "function": {"name": "look", "arguments": '{"where":"right"}'}},
        ],
    },
    {"role": "tool", "content": "a door"},
    {"role": "tool", "content": "a wall"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "finish", "arguments": {}}}]},
    {"role": "tool", "content": "ok"},
    {"role": "user", "content": "Thanks."},
]
TEXT = """\
<|im_start|>system
Be brief.

# Tools

These functions can be called:
<tools>
{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
{"type": "function", "function": {"name": "finish", "parameters": {}}}
</tools>

A call is a JSON object with name and arguments:
<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call><|im_end|>
<|im_start|>user
Look twice.<|im_end|>
<|im_start|>assistant
I look.
<tool_call>
{"name": "look", "arguments": {"where": "left, ü"}}
</tool_call>
<tool_call>
{"name": "look", "arguments": {"where":"right"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
a door
</tool_response>
<tool_response>
a wall
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "finish", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
ok
</tool_response><|im_end|>
<|im_start|>user
Thanks.<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def tokenizer(conversation: list[dict[str, str]], tools: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    # Rarer words come last among the merges, so rounding the size down costs one of them.
    rare = [[{"role": "user", "content": f"{letter * 9} {letter * 5}"}] for letter in "qvwxyz"]
    conversations = [(conversation, tools)] * 20 + [(said, []) for said in rare]
    return train_tokenizer(conversations, vocab_size=512, context_tokens=1000)


def test_a_conversation_with_tools_renders_as_qwen_lays_it_out(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render(tokenizer, CONVERSATION, [FIRST, SECOND], prompt=True) == TEXT


def test_a_conversation_without_tools_has_no_tool_section(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = "<|im_start|>user\nHi.<|im_end|>\n"
    system = "<|im_start|>system\nS<|im_end|>\n"
    assert render(tokenizer, [{"role": "user", "content": "Hi."}], [], prompt=False) == plain
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi."}]
    assert render(tokenizer, said, [], prompt=False) == system + plain


@given(text=st.text(max_size=200))
def test_any_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


@pytest.mark.parametrize(
    "text", ["x", '\n{"type": "function", ä\n', "{}{}", "   ", "a  b", "\u2028\n\n", "<tool_call>"]
)
def test_awkward_pieces_come_back_too(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_only_the_marks_of_turns_are_special(tokenizer: PreTrainedTokenizerFast) -> None:
    said = "<|im_start|>assistant\n<think>\n</think>\n<tool_call>\n{}\n</tool_call><|im_end|>"
    ids = tokenizer.encode(said, add_special_tokens=False)
    kept = "assistant\n<think>\n</think>\n<tool_call>\n{}\n</tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == kept
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert [ids.count(tokenizer.convert_tokens_to_ids(mark)) for mark in marks] == [1] * 6
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_tool_schema_is_one_token(tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]]) -> None:
    for tool in tools:
        assert len(tokenizer.encode(json.dumps(tool), add_special_tokens=False)) == 1


def test_a_quoted_word_has_the_same_tokens_in_prompt_and_call(tokenizer: PreTrainedTokenizerFast) -> None:
    def between(text: str, after: str, before: str) -> list[str]:
        parts = [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
        start = parts.index(after) + 1
        return parts[start : parts.index(before, start)]

    asked = between('Keep "cedar".', ' "', '".')
    said = between('{"name": "note", "arguments": {"word": "cedar"}}\n', '": {"', '"}}\n')
    assert said[-len(asked) :] == asked == ["cedar"]


def test_the_size_is_a_multiple_of_32_without_unused_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) % 32 == 0
    assert 256 < len(tokenizer) <= 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_pieces_are_encoded_apart_and_add_up_to_the_conversation(
    tokenizer: PreTrainedTokenizerFast, conversation: list[dict[str, str]], tools: list[dict[str, Any]]
) -> None:
    pieces = list(pieces_of(tokenizer, conversation, tools))
    ids, sampled = encode_turns(tokenizer, conversation, tools)
    whole = render(tokenizer, conversation, tools, prompt=False)
    assert "".join(piece.text for piece in pieces) + "\n" == whole
    assert [piece.text for piece in pieces if piece.sampled] == [
        conversation[2]["content"] + "<|im_end|>",
        conversation[4]["content"] + "<|im_end|>",
    ]
    assert pieces[2].text == (
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    apart = [tokenizer.encode(piece.text, add_special_tokens=False) for piece in pieces]
    assert ids == [token for part in apart for token in part]
    turns = [len(part) for part in apart]
    assert sampled == [False] * turns[0] + [True] * turns[1] + [False] * turns[2] + [True] * turns[3]


def test_a_template_that_drops_an_earlier_turn_is_refused(
    tokenizer: PreTrainedTokenizerFast, conversation: list[dict[str, str]]
) -> None:
    forgetful = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    forgetful.chat_template = "{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match="message 4: the chat template changes an earlier assistant turn"):
        list(pieces_of(forgetful, conversation, []))


def test_a_saved_tokenizer_loads_with_the_same_ids(
    tokenizer: PreTrainedTokenizerFast,
    conversation: list[dict[str, str]],
    tools: list[dict[str, Any]],
    tmp_path: Any,
) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert encode_turns(again, conversation, tools) == encode_turns(tokenizer, conversation, tools)
    assert again.decode(again.encode(TEXT, add_special_tokens=False)) == TEXT
