"""What a call costs: text is encoded once, a rollout that waits takes little."""

from __future__ import annotations

import gc
import socket
import tracemalloc

import anyio
import pytest
from conversation import USER, conversation, result

from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.listen import Listener, serving
from clawpipe.actors.proxy.messages import Answer, Head, Turn
from clawpipe.actors.proxy.stream import Reply, deliver
from clawpipe.pipeline.records import Role

pytestmark = pytest.mark.anyio

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'


END = "<|im_end|>"


class Counting:
    """A tokenizer that counts what it is asked to encode."""

    def __init__(self, tokenizer) -> None:
        self._encode_batch = tokenizer.backend_tokenizer.encode_batch_fast
        self.encoded = 0

    @property
    def backend_tokenizer(self):
        return self

    def encode_batch_fast(self, texts: list[str], **options):
        found = self._encode_batch(texts, **options)
        self.encoded += sum(len(each.ids) for each in found)
        return found


@pytest.mark.parametrize("foreign", [False, True])
async def test_every_later_call_of_a_conversation_encodes_its_new_tokens_alone(renderer, make_parser, sampler, foreign):
    sampler.script = [CALL] * 8
    counting = Counting(renderer.tokenizer)
    history = [{"role": "system", "content": "words " * 2000}, USER]
    if foreign:
        history += [{"role": "assistant", "content": "A summary. " * 300}, USER]
    async with conversation(
        renderer, make_parser("hermes", "qwen3"), sampler, encoder=Encoder(counting, end_of_turn=END)
    ) as talk:
        for number in range(8):
            before = counting.encoded
            turn = await talk.ask(*history)
            new = len(talk.prompt(number))
            if number:
                new -= len(talk.prompt(number - 1)) + len(talk.completion(number - 1))
            assert counting.encoded - before == new
            history += [turn, result(turn["tool_calls"][0], f"line {number}\n" * 50)]


async def test_a_message_that_moves_to_the_end_costs_itself_and_what_is_new(renderer, make_parser, sampler):
    """OpenClaw's default: the same words come last in every request."""
    sampler.script = [CALL] * 4
    counting = Counting(renderer.tokenizer)
    history, last = [{"role": "system", "content": "words " * 2000}, USER], {"role": "user", "content": "note " * 50}
    async with conversation(
        renderer, make_parser("hermes", "qwen3"), sampler, encoder=Encoder(counting, end_of_turn=END)
    ) as talk:
        for number in range(4):
            before = counting.encoded
            turn = await talk.ask(*history, last)
            if number:
                assert counting.encoded - before < 500
                assert talk.stream.records[number].graft_broken is None
            history += [turn, result(turn["tool_calls"][0], f"line {number}\n")]


async def test_what_rollouts_share_is_encoded_once_though_they_all_open_at_the_same_time(renderer):
    counting, text = Counting(renderer.tokenizer), "words " * 2000
    found = []

    async def encode(encoder: Encoder) -> None:
        found.append(await encoder.encode(text))

    encoder = Encoder(counting)
    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(encode, encoder)
    assert counting.encoded == len(found[0])
    assert all(ids is found[0] for ids in found)


async def test_an_encoding_that_is_given_up_is_made_for_those_who_wait_for_it(renderer):
    encoder, text = Encoder(renderer.tokenizer), "words " * 2000
    found = []

    async def wait() -> None:
        found.append(await encoder.encode(text))

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            scope.cancel()
            group.start_soon(wait)
            await encoder.encode(text)
    assert renderer.decode(found[0]) == text


async def test_a_rollout_that_waits_takes_a_few_kilobytes():
    async def app(scope, receive, send) -> None: ...

    config, kept = serving(app), []

    async def wait(number: int) -> None:
        session = Session(f"r-{number}", 1, "agentloop", lambda wire: Role.MAIN)
        sock = socket.create_server(("127.0.0.1", 0))
        kept.append((session, await Listener.open(sock, config, {"session": session}, 128)))

    await wait(0)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(50):
            await wait(number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for _, listener in kept:
            listener.close()
    assert (after - before) / 50 < 20_000


@pytest.mark.parametrize(("words", "parts"), [(10, 1), (10_000, 2)])
async def test_a_short_answer_that_comes_at_once_goes_out_in_one_and_the_end_of_a_long_one_alone(words, parts):
    sent = []

    async def send(message) -> None:
        sent.append(message)

    ask = Chat().read({"model": "m", "messages": [USER], "stream": True})
    call = Call("digest")
    call.head = Head(id="a", prompt_tokens=1, created_s=0.0)
    call.finish(Answer(head=call.head, turn=Turn(text="word " * words), completion_tokens=1))
    await deliver(Reply(send, anyio.Event()), Chat(), ask, call, 5.0)
    start, *body = sent
    assert start["status"] == 200
    assert len(body) == parts
    assert body[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert call.delivered_s is not None
