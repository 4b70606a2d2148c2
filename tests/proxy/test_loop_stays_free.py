"""One rollout's texts, however they are made, must not keep the others waiting."""

from __future__ import annotations

import json
import threading

import anyio
import anyio.lowlevel
import pytest
from conversation import EXEC, USER, conversation
from hypothesis import given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy import messages, turns
from clawpipe.actors.proxy.encoder import MAX_CUTS, Encoder
from clawpipe.actors.proxy.graft import SampledTurns
from clawpipe.actors.proxy.intake import MAX_ESCAPED_OPENINGS, Intake
from clawpipe.actors.proxy.messages import CallError, canonical_arguments
from clawpipe.actors.proxy.parse import MAX_MARKS, MAX_TOOLS

END = "<|im_end|>"
SPECIAL = [END, "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "a"}}\n</tool_call>'
XML = "<tool_call>\n<function=exec>\n<parameter=cmd>\na\n</parameter>\n</function>\n</tool_call>"


class WatchedTokenizer:
    """A tokenizer that notes how many texts it is given at a time, and in which thread."""

    def __init__(self, tokenizer) -> None:
        self._encode_batch = tokenizer.backend_tokenizer.encode_batch_fast
        self.batches: list[tuple[int, threading.Thread]] = []

    @property
    def backend_tokenizer(self):
        return self

    def encode_batch_fast(self, texts: list[str], **options):
        self.batches.append((len(texts), threading.current_thread()))
        return self._encode_batch(texts, **options)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.text(max_size=8) | st.sampled_from(SPECIAL), max_size=12), times=st.sampled_from([1, 2, 300]))
def test_ids_are_those_that_the_tokenizer_gives_to_the_text_alone(parts, times, renderer):
    text = "".join(parts) * times
    ids = anyio.run(Encoder(renderer.tokenizer).encode, text)
    mended = text.encode("utf-8", "replace").decode()
    assert ids.tolist() == renderer.tokenizer.backend_tokenizer.encode(mended, add_special_tokens=False).ids


def test_many_small_pieces_are_encoded_at_once_and_in_a_thread(renderer):
    watched = WatchedTokenizer(renderer.tokenizer)
    encoder = Encoder(watched)
    texts = [f"piece {number} of many" for number in range(1000)]
    found = anyio.run(encoder.encode_all, texts)
    [(size, thread)] = watched.batches
    assert size == 1000
    assert thread is not threading.main_thread()
    assert "".join(renderer.decode(ids) for ids in found) == "".join(texts)


def test_a_text_of_nothing_but_ends_is_cut_into_few_pieces(renderer):
    watched = WatchedTokenizer(renderer.tokenizer)
    encoder = Encoder(watched, end_of_turn=END)
    watched.batches.clear()
    text = "".join(f"{number}{END}" for number in range(5000))
    ids = anyio.run(encoder.encode, text)
    assert [size for size, _ in watched.batches] == [MAX_CUTS + 1]
    assert ids.tolist() == renderer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.anyio
async def test_others_run_between_pieces_that_are_encoded_without_a_thread(renderer):
    encoder, others = Encoder(renderer.tokenizer), 0

    async def other() -> None:
        nonlocal others
        while True:
            await anyio.lowlevel.checkpoint()
            others += 1

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        for number in range(50):
            await encoder.encode(f"short {number}")
        group.cancel_scope.cancel()
    assert others >= 49


def test_more_tools_than_anybody_has_are_refused(parser):
    many = [{"type": "function", "function": {"name": f"t{number}"}} for number in range(MAX_TOOLS + 1)]
    assert len(parser.accept(many[1:]).tools) == MAX_TOOLS
    with pytest.raises(CallError, match=f"{MAX_TOOLS + 1} tools, of {MAX_TOOLS} at most"):
        parser.accept(many)


def test_very_long_arguments_stand_for_themselves():
    short, long = json.dumps({"a": [1.0] * 10}), json.dumps({"a": [1.0] * messages.MAX_COMPARED_CHARS})
    assert canonical_arguments(short) != short
    assert canonical_arguments(long) is long


@pytest.mark.anyio
async def test_what_a_foreign_turn_means_is_found_out_once_per_request(renderer, parser, sampler):
    asked = []

    class Watched(SampledTurns):
        def meaning(self, message):
            asked.append(message)
            return super().meaning(message)

    sampler.script = ["ok"]
    call = {"id": "a", "type": "function", "function": {"name": "exec", "arguments": json.dumps({"cmd": [[]] * 9})}}
    foreign = {"role": "assistant", "content": "", "tool_calls": [call]}
    async with conversation(renderer, parser, sampler) as talk:
        talk.session.turns = Watched()
        await talk.ask(USER, foreign, {"role": "tool", "tool_call_id": "a", "content": "r"})
    assert len(asked) == 1


@pytest.mark.parametrize(("name", "call"), [("hermes", CALL), ("qwen3_coder", XML), ("qwen3_xml", XML)])
def test_a_flood_of_calls_is_malformed_however_good_they_are(make_parser, name, call):
    said = call * (MAX_MARKS + 1)
    turn = make_parser(name).parse(said, [EXEC], "abc", truncated=False)
    assert (turn.text, turn.calls, turn.malformed) == (said, (), True)


def test_as_many_calls_as_are_allowed_are_calls(make_parser):
    turn = make_parser("hermes").parse(CALL * MAX_MARKS, [EXEC], "abc", truncated=False)
    assert (len(turn.calls), turn.malformed) == (MAX_MARKS, False)


def test_a_flood_of_marks_is_split_from_its_thinking_where_that_ends(make_parser):
    parser = make_parser("hermes", "qwen3")
    for number in (1, MAX_MARKS + 1):
        turn = parser.parse("<think>hm" + "<parameter=" * number + "</think>so", [EXEC], "abc", truncated=False)
        assert (turn.thinking, turn.text) == ("hm" + "<parameter=" * number, "so")


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["word " * turns.INLINE_CHARS, "<b>" * 50])
async def test_what_takes_long_to_read_is_read_in_a_thread(renderer, make_parser, sampler, text):
    parser, threads = make_parser("hermes"), []
    sampler.script = [text]

    class Watching:
        def __getattr__(self, name):
            return getattr(parser, name)

        def read(self, *args, **options):
            threads.append(threading.current_thread())
            return parser.read(*args, **options)

    async with conversation(renderer, Watching(), sampler, max_completion_tokens=10**6) as talk:
        await talk.ask(USER)
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.anyio
async def test_a_body_that_is_read_the_slow_way_has_fewer_lists():
    lists = b"[" + b"[]," * MAX_ESCAPED_OPENINGS + b"1]"
    assert await Intake().read(lists, len) == len(lists)
    with pytest.raises(CallError, match="lists and objects"):
        await Intake().read(lists + b'"\\ud800"', len)
