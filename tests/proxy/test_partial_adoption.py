"""A harness that keeps a part of a turn: the sampled ids up to there live on, the rest is a counted dead leaf."""

from __future__ import annotations

import numpy as np
import pytest
from conversation import USER, conversation, result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy.cutting import Cutter
from clawpipe.actors.proxy.graft import Graft, SampledTurns
from clawpipe.actors.proxy.messages import Message, Speaker, Text, Thinking
from clawpipe.pipeline.segments import DropReason

pytestmark = pytest.mark.anyio

THINK = "<think>\nhm, é\n</think>\n\n"
END = "<|im_end|>"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "exec", "arguments": {{"cmd": "{command}"}}}}\n</tool_call>'


SAID = f"{THINK}Look.\n{call('ls')}\n{call('echo é</tool_cal')}\n{call('pwd')}"


@pytest.fixture
def reasoning_parser(make_parser):
    return make_parser("hermes", "qwen3")


@pytest.mark.parametrize(
    ("kept", "lives_on"),
    [
        ({"calls": 1}, f"{THINK}Look.\n{call('ls')}"),
        ({"calls": 2}, f"{THINK}Look.\n{call('ls')}\n{call('echo é</tool_cal')}"),
        ({"calls": 1, "thinking": False}, f"{THINK}Look.\n{call('ls')}"),
        ({"calls": 0}, f"{THINK}Look.\n"),
        ({"calls": 0, "content": "Look."}, f"{THINK}Look."),
        ({"calls": 0, "content": "Loo"}, f"{THINK}Loo"),
        ({"calls": 0, "content": None}, "<think>\nhm, é\n</think>"),
    ],
    ids=str,
)
async def test_the_part_that_is_kept_is_the_sampled_ids_up_to_its_end(
    renderer, reasoning_parser, sampler, kept, lives_on
):
    sampler.script = [SAID, "done"]
    async with conversation(renderer, reasoning_parser, sampler) as talk:
        turn = await talk.ask(USER)
        part = {**turn, "tool_calls": turn["tool_calls"][: kept["calls"]] or None}
        part["content"] = kept.get("content", turn["content"])
        if not kept.get("thinking", True):
            del part["reasoning_content"]
        after = [result(made) for made in part["tool_calls"] or []] or [USER]
        await talk.ask(USER, part, *after)
    adopted = sampler.ids(lives_on)
    whole = talk.completion(0)
    assert whole[: len(adopted)] == adopted
    prompt = talk.prompt(1)
    assert prompt[: len(talk.prompt(0)) + len(adopted)] == talk.prompt(0) + adopted
    assert renderer.decode(np.array(prompt[len(talk.prompt(0)) + len(adopted) :])).startswith(
        f"{END}\n<|im_start|>user"
    )
    assert talk.broken() == [None, None]


def xml(command: str) -> str:
    return f"<tool_call>\n<function=exec>\n<parameter=cmd>\n{command}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("name", ["qwen3_coder", "qwen3_xml"])
async def test_calls_written_as_xml_are_cut_behind_their_mark(renderer, make_parser, sampler, name):
    sampler.script = [f"{THINK}Look.\n{xml('ls')}\n{xml('pwd')}", "done"]
    async with conversation(renderer, make_parser(name, "qwen3"), sampler) as talk:
        turn = await talk.ask(USER)
        part = {**turn, "tool_calls": turn["tool_calls"][:1]}
        await talk.ask(USER, part, result(part["tool_calls"][0]))
    before = talk.prompt(0) + sampler.ids(f"{THINK}Look.\n{xml('ls')}") + sampler.ids(f"{END}\n<|im_start|>user\n")
    assert talk.prompt(1)[: len(before)] == before
    assert talk.broken() == [None, None]


@pytest.mark.parametrize("delivered", [True, False])
async def test_what_lives_on_is_trained_and_the_rest_is_counted(renderer, reasoning_parser, sampler, delivered):
    sampler.script = [SAID, "then something longer, as real conversations have it " * 5]
    async with conversation(renderer, reasoning_parser, sampler) as talk:
        turn = await talk.ask(USER)
        part = {**turn, "tool_calls": turn["tool_calls"][:1]}
        await talk.ask(USER, part, result(part["tool_calls"][0]))
    first, second = talk.selection(*() if delivered else (0,)).fates
    kept = len(sampler.ids(f"{THINK}Look.\n{call('ls')}"))
    assert (first.kept, first.dropped) == (kept, {DropReason.NOT_ADOPTED: len(talk.completion(0)) - kept})
    assert (second.kept, second.dropped) == (len(talk.completion(1)), {})
    [branch] = talk.selection(0).branches
    assert branch.tokens.tolist() == talk.prompt(1) + talk.completion(1)


async def test_a_part_that_ends_inside_a_token_is_not_taken_and_counted(renderer, reasoning_parser, sampler):
    [token] = sampler.ids("<tool_response>")
    sampler.script = ["<tool_response>", "."]
    async with conversation(renderer, reasoning_parser, sampler) as talk:
        turn = await talk.ask(USER)
        await talk.ask(USER, {**turn, "content": "<tool_res"}, USER)
    assert talk.broken() == [None, "partial"]
    assert talk.session.broken == {"partial": 1}
    assert token not in talk.prompt(1)


async def test_a_conversation_goes_on_from_a_part_and_the_later_calls_extend_it(renderer, reasoning_parser, sampler):
    sampler.script = [SAID, call("cat"), "done"]
    async with conversation(renderer, reasoning_parser, sampler) as talk:
        turn = await talk.ask(USER)
        part = {**turn, "tool_calls": turn["tool_calls"][:2]}
        history = [USER, part, *[result(made) for made in part["tool_calls"]]]
        second = await talk.ask(*history)
        await talk.ask(*history, second, result(second["tool_calls"][0]))
    longer = talk.prompt(1) + talk.completion(1)
    assert talk.prompt(2)[: len(longer)] == longer
    assert talk.broken() == [None, None, None]


async def test_of_two_turns_that_begin_alike_the_one_in_its_own_place_is_cut(renderer, parser, sampler, make_sampled):
    """The same words in other tokens: only the context tells which of them the harness kept a part of."""
    words, letters = sampler.ids("hello world"), [t for letter in "hello world" for t in sampler.ids(letter)]
    end = [renderer.end_of_turn_id]
    sampler.script = [make_sampled(words + end), make_sampled(letters + end), ".", "."]
    other = {"role": "user", "content": "other"}
    async with conversation(renderer, parser, sampler) as talk:
        for user in (USER, other):
            await talk.ask(user)
        for user in (USER, other):
            await talk.ask(user, {"role": "assistant", "content": "hello"}, user)
    first, second = talk.prompt(0) + sampler.ids("hello"), talk.prompt(1) + letters[:5]
    assert talk.prompt(2)[: len(first)] == first
    assert talk.prompt(3)[: len(second)] == second


def test_a_part_is_cut_once_however_often_it_is_replayed_and_again_for_a_new_turn_that_begins_like_it(parser):
    turns, tools, cuts = SampledTurns(), parser.accept([]), []

    def add(text: str) -> None:
        turns.add(parser.read(text, tools, "c", truncated=False), Graft(np.arange(9), True), tools)

    def cut(said, message):
        cuts.append(said.turn.text)
        return Graft(said.graft.ids[:1], False)

    part = Message(Speaker.ASSISTANT, (Text("so far"),))
    add("so far so good")
    for _ in range(3):
        assert len(turns.parts(part, cut)) == 1
    add("other")
    turns.parts(part, cut)
    assert cuts == ["so far so good"]
    add("so far, well")
    assert len(turns.parts(part, cut)) == 2
    assert cuts[1:] == ["so far, well", "so far so good"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), raw=st.lists(st.integers(3, 400), min_size=1, max_size=30))
def test_a_cut_is_always_a_prefix_of_the_ids_that_reads_as_the_text_that_was_kept(
    data, raw, renderer, parser, make_sampled
):
    """Any tokens: halves of characters, marks, odd spaces."""
    ids = np.array([token for token in raw if token not in renderer.stop_ids], np.int32)
    text = renderer.decode(ids)
    turns, tools = SampledTurns(), parser.accept([])
    turns.add(parser.read(text, tools, "c", truncated=False), Graft(ids, False), tools)
    kept = text[: data.draw(st.integers(0, len(text)))]
    message = Message(Speaker.ASSISTANT, (Text(kept),))
    if turns.whole(message):
        return
    for said in turns.longer(message):
        graft = Cutter(renderer, parser).part(said, message)
        boundaries = {renderer.decode(ids[:n]) for n in range(len(ids) + 1)}
        spaced = {kept.rstrip() + text[len(kept.rstrip()) :][:n] for n in range(len(text))}
        ends = {end for end in spaced if end.strip() == kept.strip() and text.startswith(end)}
        assert (graft is None) == (not boundaries & ends)
        if graft is not None:
            assert ids[: len(graft.ids)].tolist() == graft.ids.tolist()
            assert renderer.decode(graft.ids).strip() == kept.strip()
            assert not graft.complete


def test_offsets_are_only_computed_for_a_turn_that_is_not_there_whole(renderer, parser):
    decoded = []

    class Counting:
        def __getattr__(self, name):
            return getattr(renderer, name)

        def decode(self, ids):
            decoded.append(len(ids))
            return renderer.decode(ids)

    ids = renderer.tokenizer.backend_tokenizer.encode("hello world " * 400).ids
    turns, tools = SampledTurns(), parser.accept([])
    turns.add(parser.read("hello world " * 400, tools, "c", truncated=False), Graft(np.array(ids), False), tools)
    message = Message(Speaker.ASSISTANT, (Thinking(""), Text("hello world " * 100)))
    [said] = turns.longer(message)
    graft = Cutter(Counting(), parser).part(said, message)
    assert graft is not None
    assert renderer.decode(graft.ids) == ("hello world " * 100).rstrip()
    assert len(decoded) < 64  # of 800 tokens
