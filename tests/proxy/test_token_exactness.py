"""Random conversations: a prompt is the earlier tokens, the sampled ids as they are, and new text encoded apart."""

from __future__ import annotations

import json
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.identity import Session
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import CallRecord, FinishReason, Role, ints
from clawpipe.pipeline.tree import resolve

END = "<|im_end|>"
NEXT = "<|im_start|>assistant\n"


class Stream:
    """A broker that keeps what is published."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    async def publish_call(self, record: CallRecord, timeout_s: float) -> None:
        self.records.append(record)


arguments = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8), st.booleans(), st.none()),
    max_size=3,
)
calls_text = st.tuples(st.sampled_from(["", "  ", "Now.\n"]), st.lists(arguments, min_size=1, max_size=2)).map(
    lambda given: (
        given[0]
        + "\n".join(f'<tool_call>\n{{"name": "list", "arguments": {json.dumps(a)}}}\n</tool_call>' for a in given[1])
    )
)
said = st.one_of(
    calls_text,
    st.sampled_from(
        ['<tool_call>\n{"name": "list", "argu', "<tool_call>{}</tool_call>", " ", "\n\n", "", "  x  ", "x"]
    ),
    st.text(max_size=12),
    st.lists(st.integers(3, 400), min_size=1, max_size=8),  # any tokens: halves of characters, marks, odd spaces
)
turns = st.lists(
    st.tuples(said, st.sampled_from(["end", "end", "other end", "limit"]), st.text("ab \n", max_size=6), st.booleans()),
    min_size=1,
    max_size=5,
)


def replay(message: dict[str, Any], tidy: bool) -> dict[str, Any]:
    """The assistant's message as a harness sends it back; tidy ones re-write what may be re-written."""
    if not tidy:
        return message
    content = message["content"] if (message["content"] or "").strip() else None
    calls = [
        {
            "id": "".join(letter for letter in call["id"] if letter.isalnum()),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(
                    as_javascript(json.loads(call["function"]["arguments"])), separators=(",", ":")
                ),
            },
        }
        for call in message.get("tool_calls", [])
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def as_javascript(value: Any) -> Any:
    """Numbers as JSON.parse and JSON.stringify leave them."""
    if isinstance(value, dict):
        return {key: as_javascript(item) for key, item in reversed(value.items())}
    if isinstance(value, int | float) and not isinstance(value, bool):
        double = float(value)
        return int(double) if double.is_integer() and abs(double) < 2**53 else double
    return value


@pytest.fixture
def make_calls(renderer, parser, sampler):
    def make(group, stream: Stream) -> Calls:
        return Calls(
            renderer=renderer,
            encoder=Encoder(renderer.tokenizer, end_of_turn=renderer.end_of_turn),
            parser=parser,
            sampler=sampler,
            recorder=Recorder(stream, 1.0),
            limits=Limits(context_tokens=10**6, max_completion_tokens=100, retry_window_s=0.0),
            group=group,
            log=EventLog("proxy"),
        )

    return make


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=turns)
def test_a_replayed_history_is_the_sampled_tokens_and_nothing_is_encoded_twice(
    conversation, make_calls, sampler, make_sampled, renderer, tools
):
    endings = {
        "end": ([renderer.end_of_turn_id], FinishReason.STOP),
        "other end": ([renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")], FinishReason.STOP),
        "limit": ([], FinishReason.LENGTH),
    }
    stream, sampler.prompts = Stream(), []

    async def talk() -> list[list[int]]:
        session = Session("r", 1, "agentloop", lambda body: Role.MAIN)
        chat, expected, before = Chat(), [], []
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        new = f"<|im_start|>user\ngo{END}\n{NEXT}"
        head = "<|im_start|>system\n# Tools\n" + "".join(json.dumps(tool) + "\n" for tool in tools) + END + "\n"
        async with anyio.create_task_group() as group:
            calls = make_calls(group, stream)
            for text, ending, answer, tidy in conversation:
                ids = sampler.ids(text) if isinstance(text, str) else text
                ids = [token for token in ids if token not in renderer.stop_ids]
                tail, finish = endings[ending]
                if not ids + tail:
                    continue
                sampler.script = [make_sampled(ids + tail, finish)]
                expected.append(before + sampler.ids(head + new if not before else new))
                before = expected[-1] + ids + tail
                body = {"model": "m", "messages": messages, "tools": tools}
                ask = chat.read(body)
                call = await calls.start(session, ask, body)
                await call.done.wait()
                message = json.loads(chat.whole(ask, call.outcome))["choices"][0]["message"]
                messages = [*messages, replay(message, tidy)]
                new = "\n" if ending == "end" else END + "\n"
                if message.get("tool_calls"):
                    results = [
                        {"role": "tool", "tool_call_id": made["id"], "content": answer}
                        for made in message["tool_calls"]
                    ]
                    new += "<|im_start|>user" + len(results) * f"\n<tool_response>\n{answer}\n</tool_response>"
                    new += f"{END}\n{NEXT}"
                    messages += results
                else:
                    messages = [*messages, {"role": "user", "content": answer}]
                    new += f"<|im_start|>user\n{answer}{END}\n{NEXT}"
        return expected

    expected = anyio.run(talk)
    assert sampler.prompts == expected
    rebuilt: dict[str, list[int]] = {}
    for record, prompt in zip(stream.records, expected, strict=True):
        shared = rebuilt[record.parent][: record.parent_tokens] if record.parent else []
        assert shared + ints(record.prompt_delta).tolist() == prompt
        assert record.graft_broken is None
        rebuilt[record.call_id] = prompt + ints(record.completion_ids).tolist()
    for made in resolve(stream.records):
        assert made.prompt_tokens + len(made.completion) == len(rebuilt[made.call_id])
    for earlier, record in zip(stream.records, stream.records[1:], strict=False):
        assert record.parent_tokens == len(rebuilt[earlier.call_id])


def test_equal_turns_in_other_tokens_are_told_apart_by_their_place(make_calls, sampler, make_sampled, renderer):
    whole, pieces = sampler.ids("hello"), [token for letter in "hello" for token in sampler.ids(letter)]
    assert whole != pieces
    stop = [renderer.end_of_turn_id]
    sampler.script = [make_sampled(whole + stop), make_sampled(pieces + stop), *[make_sampled(stop)] * 2]
    user = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "hello"}

    async def talk() -> None:
        session = Session("r", 1, "agentloop", lambda body: Role.MAIN)
        async with anyio.create_task_group() as group:
            calls = make_calls(group, Stream())
            other = {"role": "user", "content": "b"}
            for messages in ([user], [other], [user, said, user], [other, said, user]):
                body = {"model": "m", "messages": messages}
                call = await calls.start(session, Chat().read(body), body)
                await call.done.wait()

    anyio.run(talk)
    assert sampler.prompts[2][: len(sampler.prompts[0] + whole + stop)] == sampler.prompts[0] + whole + stop
    assert sampler.prompts[3][: len(sampler.prompts[1] + pieces + stop)] == sampler.prompts[1] + pieces + stop


def test_what_a_harness_changes_is_named_and_counted_once(make_calls, sampler, tools):
    call = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'
    user = {"role": "user", "content": "a"}
    session = Session("r", 1, "agentloop", lambda body: Role.MAIN)
    stream = Stream()

    async def talk() -> None:
        sampler.script = ["text " + call, *["."] * 5]
        async with anyio.create_task_group() as group:
            calls = make_calls(group, stream)

            async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
                body = {"model": "m", "messages": [user, *messages], "tools": tools}
                read = Chat().read(body)
                made = await calls.start(session, read, body)
                await made.done.wait()
                return json.loads(Chat().whole(read, made.outcome))["choices"][0]["message"]

            turn = await ask()
            made = turn["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": made["id"], "content": "r"}
            other = {**made, "function": {"name": "exec", "arguments": '{"cmd": "rm"}'}}
            new_text = {**turn, "content": "other"}
            new_calls = {**turn, "tool_calls": [other]}
            await ask(new_text, result)
            await ask(new_text, result, user)
            await ask(new_calls, result)
            await ask({"role": "assistant", "content": "never said"}, user)

    anyio.run(talk)
    reasons = [record.graft_broken for record in stream.records]
    assert reasons == [None, "text_changed", "text_changed", "calls_changed", "foreign"]
    assert session.broken == {"text_changed": 1, "calls_changed": 1, "foreign": 1}


def test_the_prefix_index_finds_the_longest_shared_prefix():
    from clawpipe.actors.proxy.prefixes import PrefixIndex

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8), st.lists(st.integers(0, 2), max_size=8))
    def agrees_with_comparing_all(sequences, asked):
        index = PrefixIndex()
        for call, sequence in enumerate(sequences):
            index.insert(np.array(sequence, np.int32), call)
        call, shared = index.longest(np.array(asked, np.int32))

        def common(sequence):
            n = 0
            while n < min(len(sequence), len(asked)) and sequence[n] == asked[n]:
                n += 1
            return n

        assert shared == max((common(sequence) for sequence in sequences), default=0)
        assert (call is None) == (shared == 0)
        if call is not None:
            assert common(sequences[call]) == shared

    agrees_with_comparing_all()
