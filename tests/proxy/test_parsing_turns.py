"""What a model said, through vLLM's real parsers, to what a harness gets."""

from __future__ import annotations

import copy
import json

import pytest

from clawpipe.actors.proxy.messages import CallError, ToolCall, canonical_arguments
from clawpipe.actors.proxy.parse import CACHED_TOOL_BYTES, MAX_CACHED_TOOLS, TurnParser, _well_formed
from clawpipe.pipeline.errors import ConfigError

HERMES = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls -la"}}\n</tool_call>'
XML = "<tool_call>\n<function=exec>\n<parameter=cmd>\nls -la\n</parameter>\n</function>\n</tool_call>"


def named(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "call"), [("hermes", HERMES), ("qwen3_coder", XML)])
def test_calls_and_the_text_before_them_are_told_apart(make_parser, tools, name, call):
    turn = make_parser(name).parse(f"Look.\n{call}\n{call}", tools, "abc", truncated=False)
    assert turn.text.strip() == "Look."
    assert named(turn.calls) == [("exec", {"cmd": "ls -la"})] * 2
    assert not turn.malformed
    assert len({turn_call.id for turn_call in turn.calls}) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": {"cmd": "a}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": {"cmd": "a"}}'),
        ("hermes", HERMES + '\n<tool_call>\n{"name": "exec", "argu'),
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": {"cmd": NaN}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "exec", "arguments": {"cmd": "\\ud800"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "", "arguments": {"cmd": "a"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {"cmd": "a"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n["exec"]\n</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("qwen3_coder", "<tool_call>\n<function=exec>\n<parameter=cmd>\nls"),
        ("qwen3_coder", "<tool_call>\n<function=exec>\n"),
        ("qwen3_coder", "<tool_call>\n<function=exec>\n</function>\n</tool_call>"),
        ("qwen3_coder", XML.replace("\n</tool_call>", "")),
        ("qwen3_coder", XML.replace("ls -la", "grep '</parameter>' a.xml")),
        ("qwen3_coder", XML + "\n" + XML[:-30]),
        ("qwen3_xml", XML[:50]),
        ("qwen3_xml", XML.replace("\n</function>\n</tool_call>", "")),
    ],
)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_call_that_is_none_stays_text_and_is_flagged(make_parser, tools, name, said, truncated):
    turn = make_parser(name).parse(said, tools, "abc", truncated=truncated)
    assert (turn.text, turn.calls, turn.malformed, turn.truncated) == (said, (), True, truncated)


def test_a_surrogate_pair_that_is_whole_is_a_character_like_any_other(parser, tools):
    said = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "\\ud83d\\ude00"}}\n</tool_call>'
    turn = parser.parse(said, tools, "abc", truncated=False)
    assert named(turn.calls) == [("exec", {"cmd": "\U0001f600"})]


def test_half_a_surrogate_pair_that_stays_an_escape_is_found_too(tools, parser):
    """Some parsers hand the model's own JSON on; Rust's reader, Codex's, fails at it."""
    accepted = parser.accept(tools)
    assert not _well_formed("exec", '{"cmd": ["\\ud83d"]}', accepted)
    assert not _well_formed("exec", '{"cmd": 1, "\\uDC00": 2}', accepted)
    assert _well_formed("exec", '{"cmd": "\\ud83d\\ude00 \\u00e9"}', accepted)


def test_tool_sets_are_remembered_up_to_a_size_and_large_ones_never(make_parser):
    def tool(name: str, size: int) -> dict:
        return {"type": "function", "function": {"name": name, "description": "x" * size, "parameters": {}}}

    parser = make_parser()
    large, first = [tool("large", MAX_CACHED_TOOLS)], parser.accept([tool("first", 10)])
    assert parser.accept(large) is not parser.accept(large)
    assert parser.accept([tool("first", 10)]) is first
    for number in range(CACHED_TOOL_BYTES // 900_000 + 1):
        last = parser.accept([tool(f"t{number}", 900_000)])
    assert parser.accept([tool(f"t{number}", 900_000)]) is last
    assert parser.accept([tool("first", 10)]) is not first


def test_marks_inside_a_value_that_the_parser_sees_through_do_no_harm(make_parser, tools):
    said = XML.replace("ls -la", "echo '<tool_call> </tool_call>'")
    turn = make_parser("qwen3_coder").parse(said, tools, "abc", truncated=False)
    assert named(turn.calls) == [("exec", {"cmd": "echo '<tool_call> </tool_call>'"})]


def test_reasoning_marks_stay_text_where_the_model_has_no_reasoning_parser(make_parser, tools):
    turn = make_parser("qwen3_coder").parse(f"<think>\nhm\n</think>\n\n{XML}", tools, "abc", truncated=False)
    assert turn.text.strip() == "<think>\nhm\n</think>"
    assert named(turn.calls) == [("exec", {"cmd": "ls -la"})]


def test_the_vocabulary_is_read_once_and_not_for_every_turn(renderer, tools):
    """With 150000 entries it takes a third of a second."""
    reads = []

    class Tokenizer(type(renderer.tokenizer)):
        def get_vocab(self):
            reads.append(1)
            return super().get_vocab()

    tokenizer = copy.copy(renderer.tokenizer)
    tokenizer.__class__ = Tokenizer
    parser = TurnParser(tokenizer, "qwen3_coder", "qwen3", renderer.generation_prompt)
    before = len(reads)
    for _ in range(3):
        parser.parse(f"<think>hm</think>{XML}", tools, "abc", truncated=False)
    assert len(reads) == before


def test_a_tool_that_requires_nothing_may_be_called_with_nothing(parser, tools):
    turn = parser.parse('<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>', tools, "abc", truncated=False)
    assert named(turn.calls) == [("list", {})]


def test_without_tools_a_call_is_plain_text(parser):
    turn = parser.parse(HERMES, [], "abc", truncated=False)
    assert (turn.text, turn.calls, turn.malformed) == (HERMES, (), False)


def test_call_ids_are_the_same_for_the_same_call_and_hold_letters_and_digits(parser, tools):
    first = parser.parse(HERMES, tools, "abc", truncated=False).calls[0].id
    assert first == parser.parse(HERMES, tools, "abc", truncated=False).calls[0].id
    assert first != parser.parse(HERMES, tools, "abd", truncated=False).calls[0].id
    assert first.startswith("call_")
    assert first.removeprefix("call_").isalnum()


@pytest.mark.parametrize(
    ("said", "thinking", "text"),
    [
        ("<think>\nhmm\n</think>\n\nhello", "\nhmm\n", "\n\nhello"),
        ("hello", "", "hello"),
        ("<think>unfinished", "unfinished", ""),
    ],
)
def test_thinking_is_split_off_and_an_answer_without_marks_is_an_answer(make_parser, said, thinking, text):
    turn = make_parser("hermes", "qwen3").parse(said, [], "abc", truncated=False)
    assert (turn.thinking, turn.text) == (thinking, text)


@pytest.mark.parametrize(("tool_parser", "reasoning_parser"), [("no_such", ""), ("hermes", "no_such"), ("mistral", "")])
def test_a_parser_that_cannot_be_used_is_an_error_that_names_the_key(make_parser, tool_parser, reasoning_parser):
    with pytest.raises(ConfigError, match=r"\[model\] (tool|reasoning)_parser"):
        make_parser(tool_parser, reasoning_parser)


def test_tools_that_vllm_refuses_are_the_callers_error(parser):
    with pytest.raises(CallError, match="tools cannot be used"):
        parser.accept([{"type": "function", "function": {"name": "a", "parameters": "none"}}])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": 1.0, "b": [1e2]}', '{"b":[100],"a":1}'),
        ('{"a": "x\\/y"}', '{"a": "x/y"}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
        ('{"a": -0.0}', '{"a": 0}'),
        ('{"a": 1e999}', '{"a": null}'),
        ('{"a": ' + "9" * 400 + "}", '{"a": null}'),
        (" ", "{}"),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
    ],
)
def test_arguments_are_compared_by_what_they_say(left, right):
    assert canonical_arguments(left) == canonical_arguments(right)


@pytest.mark.parametrize(
    ("left", "right"), [('{"a": 1}', '{"a": "1"}'), ('{"a": 1}', '{"a": true}'), ("{", "[")], ids=str
)
def test_arguments_that_differ_stay_different(left, right):
    assert canonical_arguments(left) != canonical_arguments(right)
