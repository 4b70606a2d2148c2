"""What harnesses do to a turn when they replay it: it stays the sampled tokens, or the reason is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conversation import EXEC, USER, conversation, replayed_call, result

from clawpipe.actors.proxy.graft import Graft, SampledTurns
from clawpipe.actors.proxy.messages import Message, Speaker, Text, Thinking, ToolCall
from clawpipe.pipeline.records import FinishReason

pytestmark = pytest.mark.anyio

ARGUMENTS = {"cmd": "ls", "n": 100, "path": "a/b", "e": "é"}
WRITTEN = '{"e": "\\u00e9", "cmd": "ls", "n": 1e2, "path": "a\\/b"}'
CALL = f'<tool_call>\n{{"name": "exec", "arguments": {WRITTEN}}}\n</tool_call>'
SAID = f"<think>\nhm\n</think>\n\nFirst.\n\n  Second.\n{CALL}"


def compact(turn):
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], arguments=json.dumps(ARGUMENTS))]}


def without_punctuation(turn):
    call = turn["tool_calls"][0]
    return {**turn, "tool_calls": [{**call, "id": call["id"].replace("_", "")}]}


def another_protocols_id(turn):
    call = turn["tool_calls"][0]
    return {**turn, "tool_calls": [{**call, "id": "toolu_" + call["id"].removeprefix("call_")}]}


def another_name(turn):
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], name="files__exec")]}


def unknown_to_opencode(turn):
    told = json.dumps({"tool": "exec", "error": "no such tool"})
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], name="invalid", arguments=told)]}


def unparsed_by_claude_code(turn):
    wrapped = json.dumps({"__unparsedToolInput": {"raw": '{"e": "é', "len": 8}})
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], arguments=wrapped)]}


def trimmed(turn):
    return {**turn, "content": turn["content"].strip(), "reasoning_content": turn["reasoning_content"].strip()}


def joined(turn):
    return {**turn, "content": [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]}


def without_thinking(turn):
    return {key: value for key, value in turn.items() if key != "reasoning_content"}


def thinking_as_text(turn):
    return {**without_thinking(turn), "content": turn["reasoning_content"] + "\n" + turn["content"]}


def other_field(turn):
    return {**without_thinking(turn), "reasoning": turn["reasoning_content"]}


@pytest.mark.parametrize(
    "change",
    [
        compact,
        without_punctuation,
        another_protocols_id,
        another_name,
        unknown_to_opencode,
        unparsed_by_claude_code,
        trimmed,
        joined,
        without_thinking,
        thinking_as_text,
        other_field,
    ],
    ids=lambda change: change.__name__,
)
async def test_what_a_harness_rewrites_stays_the_sampled_tokens(renderer, make_parser, sampler, change):
    sampler.script = [SAID, "done"]
    async with conversation(renderer, make_parser("hermes", "qwen3"), sampler) as talk:
        turn = change(await talk.ask(USER))
        await talk.ask(USER, turn, result(turn["tool_calls"][0]))
    before = talk.prompt(0) + talk.completion(0)
    assert talk.prompt(1)[: len(before)] == before
    assert talk.broken() == [None, None]


def other_arguments(turn):
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], arguments='{"cmd": "rm"}')]}


def other_call_of_the_same_name(turn):
    call = replayed_call(turn["tool_calls"][0], arguments='{"cmd": "rm"}')
    return {**turn, "content": None, "reasoning_content": None, "tool_calls": [{**call, "id": "own"}]}


def other_tool_called_invalid(turn):
    told = json.dumps({"tool": "read", "error": "no such tool"})
    return {**turn, "tool_calls": [replayed_call(turn["tool_calls"][0], name="invalid", arguments=told)]}


def more_calls(turn):
    return {**turn, "tool_calls": turn["tool_calls"] * 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda turn: {**turn, "content": "Third."}, "text_changed"),
        (lambda turn: {**turn, "reasoning_content": "other"}, "thinking_changed"),
        (other_arguments, "calls_changed"),
        (other_tool_called_invalid, "calls_changed"),
        (more_calls, "calls_changed"),
        (other_call_of_the_same_name, "foreign"),
    ],
    ids=["text", "thinking", "arguments", "invalid", "more calls", "own call"],
)
async def test_what_a_harness_says_differently_is_named(renderer, make_parser, sampler, change, reason):
    sampler.script = [SAID, "done"]
    async with conversation(renderer, make_parser("hermes", "qwen3"), sampler) as talk:
        turn = change(await talk.ask(USER))
        await talk.ask(USER, turn, result(turn["tool_calls"][0]))
    assert talk.broken() == [None, reason]
    assert talk.session.broken == {reason: 1}


async def test_text_of_white_space_alone_may_vanish(renderer, parser, sampler):
    sampler.script = ["\n\n" + '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>', "done"]
    async with conversation(renderer, parser, sampler) as talk:
        turn = await talk.ask(USER)
        assert turn["content"] == "\n\n"
        await talk.ask(USER, {**turn, "content": None}, result(turn["tool_calls"][0]))
    before = talk.prompt(0) + talk.completion(0)
    assert talk.prompt(1)[: len(before)] == before


async def test_a_turn_cut_at_the_limit_goes_on_behind_an_end_that_the_template_supplies(
    renderer, parser, sampler, make_sampled
):
    sampler.script = [make_sampled(sampler.ids("so far"), FinishReason.LENGTH), "and on"]
    async with conversation(renderer, parser, sampler) as talk:
        turn = await talk.ask(USER)
        await talk.ask(USER, turn, {"role": "user", "content": "go on"})
    between = sampler.ids("<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert talk.prompt(1) == talk.prompt(0) + talk.completion(0) + between


def test_of_turns_that_differ_in_white_space_the_one_that_is_replayed_is_found(parser, renderer):
    turns, tools = SampledTurns(), parser.accept([])
    for number, text in enumerate(("a b", "ab", "a\nb")):
        turns.add(parser.read(text, tools, "c", truncated=False), Graft(np.array([number]), True), tools)

    def found(text):
        return [said.graft.ids.tolist() for said in turns.whole(Message(Speaker.ASSISTANT, (Text(text),)))]

    assert found("a b") == [[0]]
    assert found(" ab") == [[1]]
    assert found("a\nb") == [[2]]
    assert found("a  b") == [[0], [1], [2]]


def test_of_equal_calls_the_one_with_the_replayed_id_is_found(parser):
    turns, tools = SampledTurns(), parser.accept([EXEC])
    said = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'
    read = [parser.read(said, tools, name, truncated=False) for name in ("one", "two")]
    for number, turn in enumerate(read):
        turns.add(turn, Graft(np.array([number]), True), tools)
    for number, turn in enumerate(read):
        message = Message(Speaker.ASSISTANT, (Thinking(""), ToolCall(turn.calls[0].id, "exec", '{"cmd":"ls"}')))
        assert [each.graft.ids.tolist() for each in turns.whole(message)] == [[number]]
