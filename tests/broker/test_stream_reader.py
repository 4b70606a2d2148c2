"""The reader neither loses nor repeats, whatever happens to it, to the server and to the stream."""

from __future__ import annotations

import anyio
import pytest
from broker_scripts import QUICK, call, plain_client, set_up, take

from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.stream_reader import MESSAGES_PER_REQUEST, read_stream

pytestmark = pytest.mark.anyio

STREAM, SUBJECT = "clawpipe-RECORDS", "clawpipe.records.>"


async def publish(broker, count, start=0, prompt_tokens=3):
    for index in range(start, start + count):
        await broker.publish_call(call("r-1", index, prompt_tokens))


async def take_sequences(reader, count):
    """Leaves the reader open."""
    with anyio.fail_after(30):
        return [(await anext(reader))[0] for _ in range(count)]


async def consumers(js):
    return [info.name for info in await js.consumers_info(STREAM)]


async def test_a_reader_that_stalls_until_its_consumer_is_forgotten_goes_on_where_it_was(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 300)
        reader = read_stream(js._nc, js, STREAM, SUBJECT, idle_s=0.2)
        assert await take_sequences(reader, 2) == [1, 2]
        with anyio.fail_after(10):
            while await consumers(js):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await publish(broker, 100, 300)
        assert await take_sequences(reader, 398) == list(range(3, 401))
        await reader.aclose()


async def test_what_is_purged_under_a_reader_is_not_given_and_the_rest_is(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 600)
        reader = read_stream(js._nc, js, STREAM, SUBJECT)
        assert await take_sequences(reader, 100) == list(range(1, 101))
        await broker.purge_records(500)
        fetched_before = MESSAGES_PER_REQUEST
        assert await take_sequences(reader, 257) == [*range(101, fetched_before + 1), *range(500, 601)]
        await publish(broker, 2, 600)
        assert await take_sequences(reader, 2) == [601, 602]
        await reader.aclose()


async def test_sequences_that_were_deleted_are_skipped_without_a_new_consumer(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 10)
        for sequence in (1, 4, 5, 10):
            await js.delete_msg(STREAM, sequence)
        await publish(broker, 1, 10)
        reader = read_stream(js._nc, js, STREAM, SUBJECT)
        assert await take_sequences(reader, 1) == [2]
        first = await consumers(js)
        assert await take_sequences(reader, 6) == [3, 6, 7, 8, 9, 11]
        assert await consumers(js) == first
        await reader.aclose()


class Lossy:
    """A client that throws some of the messages away that come, as one does that is too slow for them."""

    def __init__(self, client, lost):
        self._client = client
        self._lost = set(lost)
        self._num = 0
        self.new_inbox, self.publish = client.new_inbox, client.publish

    async def subscribe(self, subject, cb):
        async def pass_on(msg):
            self._num += 1
            if self._num not in self._lost:
                await cb(msg)

        return await self._client.subscribe(subject, cb=pass_on)


@pytest.mark.parametrize("lost", [[1], [3, 4], [6], [2, 8, 9]])
async def test_a_client_that_drops_messages_gets_them_again_and_in_order(nats_server, lost):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 6)
        reader = read_stream(Lossy(js._nc, lost), js, STREAM, SUBJECT, wait_s=0.2)
        assert await take_sequences(reader, 6) == [1, 2, 3, 4, 5, 6]
        await reader.aclose()


async def test_a_server_killed_again_and_again_under_load_loses_and_repeats_nothing(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker, anyio.create_task_group() as tasks:

        async def interrupt():
            for _ in range(2):
                await anyio.sleep(0.4)
                nats_server.kill()
                nats_server.start()

        async def publish_all():
            for start in range(0, 1000, 50):
                await publish(broker, 50, start)
                await anyio.sleep(0.05)

        tasks.start_soon(interrupt)
        tasks.start_soon(publish_all)
        entries = await take(broker.records(), 1000, 60)
    assert [entry.record.index for entry in entries] == list(range(1000))
    assert [entry.sequence for entry in entries] == list(range(1, 1001))


async def test_a_single_new_message_is_given_at_once(nats_server):
    """No waiting for more: the assembler's answer to a manifest depends on it."""
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        reader = read_stream(js._nc, js, STREAM, SUBJECT)
        for index in range(5):
            await publish(broker, 1, index)
            began_s = anyio.current_time()
            assert await take_sequences(reader, 1) == [index + 1]
            if index:
                assert anyio.current_time() - began_s < 0.5
        await reader.aclose()


async def test_a_stream_that_is_deleted_under_its_reader_is_an_error_that_says_so(nats_server):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await publish(broker, 1)
        reader = read_stream(js._nc, js, STREAM, SUBJECT, wait_s=0.2)
        assert await take_sequences(reader, 1) == [1]
        await js.delete_stream(STREAM)
        with pytest.raises(BrokerError, match="stream clawpipe-RECORDS is gone"):
            await take_sequences(reader, 1)
