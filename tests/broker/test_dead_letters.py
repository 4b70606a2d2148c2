"""Messages that cannot be used: they get a reason, a place of their own, and stop nobody."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from broker_scripts import call, plain_client, request, set_up, take

from clawpipe.pipeline import entries
from clawpipe.pipeline.entries import DETAIL_CHARS, KEPT_BYTES, LETTER_BYTES, MAX_DEPTH
from clawpipe.pipeline.records import SCHEMA, DeadLetter, Flaw, encode

pytestmark = pytest.mark.anyio

SUBJECT = "clawpipe.records.call.r-1"
NESTED = b"\x81\xa1a" * 100_000
TOO_DEEP = "maximum recursion depth exceeded while deserializing an object"


def letter(sequence, flaw=Flaw.UNREADABLE, **fields):
    plain = {"detail": "cut short", "subject": SUBJECT, "message_id": f"r-1.a1.c{sequence}", "rollout_id": "r-1"}
    return DeadLetter(flaw=flaw, sequence=sequence, **{**plain, **fields})


@pytest.mark.parametrize(
    ("subject", "body", "flaw", "detail"),
    [
        (SUBJECT, encode(call("r-1", 0))[:-1], Flaw.UNREADABLE, "Input data was truncated"),
        (SUBJECT, b"", Flaw.UNREADABLE, "Input data was truncated"),
        (SUBJECT, b"hello", Flaw.UNREADABLE, "Expected `object`, got `int`"),
        (SUBJECT, NESTED, Flaw.UNREADABLE, TOO_DEEP),
        (
            SUBJECT,
            encode(msgspec.structs.replace(call("r-1", 0), schema=SCHEMA + 1)),
            Flaw.UNKNOWN_SCHEMA,
            f"its schema is {SCHEMA + 1}, this clawpipe reads up to {SCHEMA}; run all processes with one version",
        ),
        (
            SUBJECT,
            msgspec.msgpack.encode({"schema": SCHEMA + 1, "rollout_id": 7}),
            Flaw.UNKNOWN_SCHEMA,
            f"its schema is {SCHEMA + 1}, this clawpipe reads up to {SCHEMA}; run all processes with one version",
        ),
        (
            "clawpipe.records.call.r-2",
            encode(call("r-1", 0)),
            Flaw.UNSOUND,
            "it names rollout r-1, and came as one of r-2",
        ),
        ("clawpipe.records.note.r-1", encode(call("r-1", 0)), Flaw.UNREADABLE, "there are no records of kind 'note'"),
        ("clawpipe.records.call", encode(call("r-1", 0)), Flaw.UNSOUND, "it names rollout r-1, and came as one of "),
    ],
)
async def test_a_bad_message_is_an_entry_with_its_flaw_and_the_stream_goes_on(nats_server, subject, body, flaw, detail):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await js.publish(subject, body, headers={"Nats-Msg-Id": "bad"})
        await broker.publish_call(call("r-1", 1))
        bad, good = await take(broker.records(), 2)
        assert (bad.sequence, bad.subject, bad.message_id) == (1, subject, "bad")
        assert (bad.record, bad.flaw, bad.detail, bad.body) == (None, flaw, detail, body)
        assert bad.rollout_id == ("" if subject.endswith("call") else subject.rsplit(".", 1)[1])
        assert (good.record, good.flaw) == (call("r-1", 1), None)


async def test_a_dead_letter_that_is_set_aside_twice_is_one(nats_server):
    """A restarted reader comes by the same message again, minutes later, when no duplicate window helps."""
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        for sequence, flaw in ((3, Flaw.UNREADABLE), (5, Flaw.UNREADABLE), (8, Flaw.UNADMITTED)):
            await broker.set_aside(letter(sequence, flaw))
        again = encode(letter(3, detail="again"))
        await js.publish("clawpipe.dead.unreadable.3", again, headers={"Nats-Msg-Id": "none that was used before"})
        assert await broker.dead_letters() == {"unreadable": 2, "unadmitted": 1}
        letters = await broker.read_dead_letters()
        assert letters == (letter(5), letter(8, Flaw.UNADMITTED), letter(3, detail="again"))


async def test_no_dead_letters_are_none(nats_server):
    async with set_up(nats_server) as broker:
        assert await broker.dead_letters() == {}
        assert await broker.read_dead_letters() == ()


async def test_an_entry_becomes_a_letter_with_the_body_as_it_came(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await js.publish(SUBJECT, b"hello", headers={"Nats-Msg-Id": "r-1.a1.c0"})
        [entry] = await take(broker.records(), 1)
        await broker.set_aside(entry.dead(entry.flaw, entry.detail))
        [found] = await broker.read_dead_letters()
        assert (found.flaw, found.sequence, found.subject) == (Flaw.UNREADABLE, 1, SUBJECT)
        assert (found.message_id, found.rollout_id, found.body) == ("r-1.a1.c0", "r-1", b"hello")


async def test_of_a_long_body_the_beginning_and_the_digest_are_kept(nats_server):
    body = bytes(range(256)) * 4096
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    async with set_up(nats_server) as broker:
        await broker.set_aside(letter(1, body=body, detail="x" * 2 * DETAIL_CHARS))
        await broker.set_aside(letter(2, body=body[:LETTER_BYTES]))
        cut, whole = await broker.read_dead_letters()
        assert cut.body == body[:KEPT_BYTES]
        assert cut.detail == "x" * DETAIL_CHARS + f" [body of {1024**2} bytes, blake2b {digest}, cut to {KEPT_BYTES}]"
        assert whole == letter(2, body=body[:LETTER_BYTES])


async def test_the_newest_thousand_letters_are_read(nats_server):
    async with set_up(nats_server) as broker:
        for sequence in range(1, 1004):
            await broker.set_aside(letter(sequence))
        assert [found.sequence for found in await broker.read_dead_letters()] == list(range(4, 1004))
        assert await broker.dead_letters() == {"unreadable": 1003}


async def test_a_request_that_cannot_be_read_is_set_aside_and_the_next_one_runs(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await js.publish("clawpipe.requests", b"poison", headers={"Nats-Msg-Id": "r-9"})
        await broker.publish_request(request(1))
        await broker.set_aside(letter(1))  # of the record stream: another message with the same sequence
        assert await broker.pending_requests() == (request(1),)
        assert await broker.pull_request(1.0) is None
        delivery = await broker.pull_request(1.0)
        assert delivery.request == request(1)
        await delivery.ack()
        assert (await js.stream_info("clawpipe-REQUESTS")).state.messages == 0
        assert await broker.dead_letters() == {"unreadable": 2}
        [poison] = [found for found in await broker.read_dead_letters() if found.subject == "clawpipe.requests"]
        assert (poison.rollout_id, poison.sequence, poison.body) == ("r-9", 1, b"poison")


async def test_a_request_that_cannot_be_read_is_withdrawn_with_the_others(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_request(request(1))
        await js.publish("clawpipe.requests", b"\x81\xa1a" * 20_000)
        await broker.publish_request(request(2))
        assert await broker.withdraw_requests() == (request(1), request(2))
        assert (await js.stream_info("clawpipe-REQUESTS")).state.messages == 0


def test_a_short_letter_is_not_cut():
    assert entries.cut(letter(1, body=b"x")) == letter(1, body=b"x")


async def test_a_letter_of_the_longest_names_is_stored(nats_server):
    """A subject of 4 KiB that is no UTF-8 has 12 KiB as text, and twice."""
    name = "\ufffd" * 3900
    longest = letter(
        1,
        message_id="\U0001f600" * 16_000,
        rollout_id=name,
        subject=f"clawpipe.records.call.{name}",
        detail="\U0001f600" * 2000,
        body=bytes(LETTER_BYTES),
    )
    async with set_up(nats_server) as broker:
        await broker.set_aside(longest)
        await broker.set_aside(msgspec.structs.replace(longest, sequence=2, body=bytes(LETTER_BYTES + 1)))
        whole, shortened = await broker.read_dead_letters()
        assert (whole.rollout_id, whole.body) == (name, longest.body)
        assert len(whole.message_id) == len(shortened.message_id) == DETAIL_CHARS
        assert shortened.body == bytes(KEPT_BYTES)


def nested(depth):
    found = {}
    for _ in range(depth - 1):
        found = {"a": found}
    return encode(msgspec.structs.replace(call("r-1", 0), requested=found))


def test_a_call_is_read_only_if_it_can_be_written_again():
    assert entries.read(1, SUBJECT, "id", nested(MAX_DEPTH)).flaw is None
    deep = entries.read(1, SUBJECT, "id", nested(MAX_DEPTH + 1))
    assert (deep.flaw, deep.detail) == (Flaw.UNREADABLE, f"it is nested deeper than {MAX_DEPTH}")
