"""What a purge of the records leaves."""

from __future__ import annotations

import pytest
from broker_scripts import STORE_BYTES, call, plain_client, set_up, take

pytestmark = pytest.mark.anyio

RECORDS = "clawpipe-RECORDS"


async def first_sequence(js):
    return (await js.stream_info(RECORDS)).state.first_seq


async def publish(broker, count, prompt_tokens=1000):
    for index in range(10, 10 + count):
        await broker.publish_call(call("r-1", index, prompt_tokens))


async def test_the_newest_bytes_below_the_cursor_stay(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 80)
        state = (await js.stream_info(RECORDS)).state
        await broker.purge_records(61, state.bytes // 80 * 20)
        assert await first_sequence(js) in (41, 42)
        await broker.purge_records(61)
        assert await first_sequence(js) == 61


async def test_nothing_goes_while_all_that_is_done_fits(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 20)
        await broker.purge_records(20, STORE_BYTES)
        assert await first_sequence(js) == 1


async def test_what_is_kept_never_takes_more_than_a_quarter_of_the_stream(nats_server):
    async with set_up(nats_server, 1024**2) as broker, plain_client(nats_server) as js:
        await publish(broker, 200)
        per_record = (await js.stream_info(RECORDS)).state.bytes / 200
        await broker.purge_records(200, 1024**3)
        assert await first_sequence(js) == 200 - int(1024**2 / 4 / per_record)


async def test_large_records_are_kept_with_their_blobs_and_count_with_them(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 10, prompt_tokens=150 * 1024)
        await broker.purge_records(11, 3 * 620_000)
        assert await first_sequence(js) == 8
        entries = await take(broker.records(), 3)
        assert [entry.record for entry in entries] == [call("r-1", index, 150 * 1024) for index in (17, 18, 19)]
        assert (await js.stream_info("OBJ_clawpipe-BLOBS")).state.messages == 3 * 6


async def test_a_purge_of_nothing_changes_nothing(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 3)
        for below in (-1, 0, 1):
            await broker.purge_records(below)
        assert await first_sequence(js) == 1
