"""Records that no message holds: blobs in the object store, claims in the stream."""

from __future__ import annotations

from datetime import timedelta

import anyio
import msgspec
import numpy as np
import pytest
from broker_scripts import QUICK, STORE_BYTES, call, plain_client, set_up, take

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.claims import Claim, Claims, claim_for
from clawpipe.pipeline.records import CallEntry, Flaw, RolloutManifest, Scored, encode
from clawpipe.pipeline.streams import CLAIM_BYTES, Names

pytestmark = pytest.mark.anyio

TOKENS = 600 * 1024 // 4
BLOBS = "OBJ_clawpipe-BLOBS"


def large(rollout, index):
    return call(rollout, index, prompt_tokens=TOKENS)


async def subjects(js, kind):
    """The subjects of the bucket: C for chunks, M for descriptions."""
    return sorted((await js.stream_info(BLOBS, f"$O.clawpipe-BLOBS.{kind}.>")).state.subjects or ())


async def test_a_record_of_600_kib_comes_back_equal_and_its_blob_goes_with_the_purge(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        for index in range(2):
            await broker.publish_call(large("r-1", index))
        await broker.publish_call(call("r-1", 2))
        entries = await take(broker.records(), 3)
        assert [entry.record for entry in entries] == [large("r-1", 0), large("r-1", 1), call("r-1", 2)]
        assert [entry.subject for entry in entries] == ["clawpipe.records.call.r-1.claim"] * 2 + [
            "clawpipe.records.call.r-1"
        ]
        assert [(entry.message_id, entry.kind, entry.flaw) for entry in entries] == [
            (f"r-1.a1.c{index}", "call", None) for index in range(3)
        ]
        assert len(await subjects(js, "C")) == len(await subjects(js, "M")) == 2
        kept = await subjects(js, "M")

        await broker.purge_records(2)

        assert len(await subjects(js, "C")) == 1
        [left] = await subjects(js, "M")
        assert left in kept
        assert [entry.record for entry in await take(broker.records(), 2)] == [large("r-1", 1), call("r-1", 2)]
        await broker.purge_records(4)
        assert (await js.stream_info(BLOBS)).state.messages == 0


async def test_a_large_manifest_comes_back_equal(nats_server):
    manifest = RolloutManifest(
        rollout_id="r-1",
        attempt=1,
        group_id="g",
        task_id="t",
        harness="h",
        calls=tuple(CallEntry(call_id=f"r-1.a1.c{index}", delivered=True) for index in range(20_000)),
        outcome=Scored(reward=0.5),
    )
    assert len(encode(manifest)) > CLAIM_BYTES
    async with set_up(nats_server) as broker:
        await broker.publish_manifest(manifest)
        [entry] = await take(broker.records(), 1)
        assert (entry.record, entry.kind) == (manifest, "manifest")


@pytest.mark.parametrize("num_bytes", [CLAIM_BYTES, CLAIM_BYTES + 1])
async def test_a_server_with_the_default_max_payload_takes_every_size(nats_server, num_bytes):
    """1 MiB, where the embedded server takes 8."""
    with open(nats_server.argv[2], "r+") as config:  # noqa: ASYNC230
        text = config.read().replace(f"max_payload: {8 * 1024**2}\n", "")
        config.seek(0)
        config.truncate()
        config.write(text)
    nats_server.kill()
    nats_server.start()
    small = call("r-1", 0)
    padding = num_bytes - len(encode(msgspec.structs.replace(small, requested={"x": b""}))) - 3  # bin32 header for bin8
    record = msgspec.structs.replace(small, requested={"x": bytes(padding)})
    assert len(encode(record)) == num_bytes
    huge = call("r-1", 1, prompt_tokens=1_000_000)
    async with set_up(nats_server) as broker:
        await broker.publish_call(record)
        await broker.publish_call(huge)
        first, second = await take(broker.records(), 2)
        assert first.record == record
        assert first.subject.endswith(".claim") == (num_bytes > CLAIM_BYTES)
        assert second.record == huge


async def test_the_same_large_record_twice_is_one_record_and_one_blob(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        for _ in range(2):
            await broker.publish_call(large("r-1", 0))
        await broker.publish_call(call("r-1", 1))
        assert [entry.record.index for entry in await take(broker.records(), 2)] == [0, 1]
        assert (await js.stream_info(BLOBS)).state.messages == 6  # five chunks of 128 KiB, one description


async def test_a_blob_is_an_object_that_other_clients_of_nats_can_read(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        body = encode(large("r-1", 0))
        found = await (await js.object_store("clawpipe-BLOBS")).get(claim_for("r-1.a1.c0", body).blob)
        assert found.data == body


async def test_a_put_that_was_cut_short_is_made_good_by_the_next(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        claim = claim_for("r-1.a1.c0", encode(large("r-1", 0)))
        for _ in range(3):
            await js.publish(f"$O.clawpipe-BLOBS.C.{claim.digest}.earlier", bytes(128 * 1024))
        await broker.publish_call(large("r-1", 0))
        assert (await js.stream_info(BLOBS)).state.messages == 6
        await js.publish(f"$O.clawpipe-BLOBS.C.{claim.digest}.earlier", b"a chunk that was still on its way")
        assert [entry.record for entry in await take(broker.records(), 1)] == [large("r-1", 0)]
        await broker.purge_records(2)
        assert (await js.stream_info(BLOBS)).state.messages == 0


async def test_a_blob_that_was_removed_is_named_and_the_stream_goes_on(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        await broker.publish_call(call("r-1", 1))
        await js.purge_stream(BLOBS)
        missing, following = await take(broker.records(), 2)
        assert (missing.sequence, missing.rollout_id, missing.message_id) == (1, "r-1", "r-1.a1.c0")
        assert (missing.record, missing.flaw) == (None, Flaw.MISSING_BLOB)
        assert missing.detail == f"blob {msgspec.msgpack.decode(missing.body)['blob']} is not in the object store"
        assert following.record == call("r-1", 1)


async def test_a_blob_without_one_of_its_chunks_is_missing(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        await js.delete_msg(BLOBS, 5)
        [missing] = await take(broker.records(), 1)
        assert (missing.record, missing.flaw) == (None, Flaw.MISSING_BLOB)


@pytest.mark.parametrize("description", [b"{", b"{}", b'{"nuid": 7}'])
async def test_a_blob_whose_description_cannot_be_read_is_missing(nats_server, description):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        [subject] = await subjects(js, "M")
        await js.publish(subject, description)
        [missing] = await take(broker.records(), 1)
        assert (missing.record, missing.flaw) == (None, Flaw.MISSING_BLOB)


async def test_a_blob_with_another_content_is_named(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        claim = claim_for("r-1.a1.c0", encode(large("r-1", 0)))
        store = await js.object_store("clawpipe-BLOBS")
        await store.put(claim.blob, encode(large("r-1", 7)))
        [entry] = await take(broker.records(), 1)
        assert (entry.record, entry.flaw) == (None, Flaw.MISSING_BLOB)
        assert f"where {claim.digest} was stored" in entry.detail


async def test_a_claim_that_cannot_be_read_is_named_and_stops_no_purge(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await js.publish("clawpipe.records.call.r-1.claim", b"\x81\xa4blob")
        hostile = msgspec.msgpack.encode({"blob": "x", "digest": ">", "num_bytes": 1})  # a wildcard
        await js.publish("clawpipe.records.call.r-1.claim", hostile)
        await broker.publish_call(large("r-1", 0))
        entries = await take(broker.records(), 2)
        assert [(entry.flaw, entry.body) for entry in entries] == [
            (Flaw.MISSING_BLOB, b"\x81\xa4blob"),
            (Flaw.MISSING_BLOB, hostile),
        ]
        await broker.purge_records(3)
        [following] = await take(broker.records(3), 1)
        assert following.record == large("r-1", 0)
        await broker.purge_records(4)
        assert (await js.stream_info(BLOBS)).state.messages == 0


async def test_a_purge_that_was_cut_short_is_finished_by_the_next(nats_server):
    """The chunks are gone, description and claim are not: as after a crash in the middle."""
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        [chunks] = await subjects(js, "C")
        await js.purge_stream(BLOBS, subject=chunks)
        await broker.purge_records(2)
        assert (await js.stream_info(BLOBS)).state.messages == 0
        assert not await broker.has_records(1)


async def test_what_a_killed_publisher_left_is_removed_when_it_is_old(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_call(large("r-1", 0))
        orphan = encode(large("r-1", 1))
        claims = Claims(js, Names("clawpipe"))
        await claims.put(claim_for("r-1.a1.c1", orphan), orphan, 5.0)  # no claim to it
        await js.publish("$O.clawpipe-BLOBS.C.half", b"a chunk whose description never came")
        await broker.setup(STORE_BYTES)
        assert len(await subjects(js, "C")) == 3  # all too young: somebody may be about to claim them
        assert await claims.delete_orphans(timedelta(0)) == 3
        assert len(await subjects(js, "C")) == len(await subjects(js, "M")) == 1
        assert [entry.record for entry in await take(broker.records(), 1)] == [large("r-1", 0)]


async def test_a_server_that_is_killed_while_blobs_are_stored_and_read_loses_none(nats_server):
    records = [large("r-1", index) for index in range(30)]
    async with (
        set_up(nats_server, pace=QUICK) as broker,
        Broker.connect(nats_server.url, nats_server.token, pace=QUICK) as reading,
    ):
        async with anyio.create_task_group() as tasks:

            async def publish():
                for record in records:
                    await broker.publish_call(record, 60.0)

            async def interrupt():
                for _ in range(2):
                    await anyio.sleep(0.15)
                    nats_server.kill()
                    nats_server.start()

            tasks.start_soon(publish)
            tasks.start_soon(interrupt)
            entries = await take(reading.records(), len(records), 60)
        assert [entry.record for entry in entries] == records


def test_a_claim_names_the_body_and_nothing_else():
    body = np.arange(10, dtype="<i4").tobytes()
    claim = claim_for("r-1.a1.c0", body)
    assert claim == Claim(blob=f"r-1.a1.c0-{claim.digest}", digest=claim.digest, num_bytes=40)
    assert claim_for("r-1.a1.c0", body[:-1] + b"\1").digest != claim.digest
