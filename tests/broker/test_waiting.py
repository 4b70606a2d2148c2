"""A server that cannot store: publishing waits, says so, and goes through, or ends with what to do."""

from __future__ import annotations

import anyio
import pytest
from broker_scripts import QUICK, THROUGH, WAITING, call, logged, plain_client, set_up, take, until

from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.patience import NO_CONNECTION, STREAM_FULL

pytestmark = pytest.mark.anyio

MIB = 1024**2
TOKENS = 25_000  # 100 KB


async def fill(broker, rollout="r-0"):
    """Publishes until the stream takes no more; returns how many it holds."""
    for index in range(100):
        try:
            await broker.publish_call(call(rollout, index, TOKENS), 0.3)
        except BrokerError:
            return index
    raise AssertionError("the stream is larger than it was made")


async def test_a_full_stream_is_waited_for_and_a_purge_lets_the_record_through(nats_server, caplog):
    caplog.set_level("INFO", "clawpipe")
    async with set_up(nats_server, MIB, pace=QUICK) as broker, anyio.create_task_group() as tasks:
        num_stored = await fill(broker)
        assert num_stored == 10
        caplog.clear()
        for index in range(3):
            tasks.start_soon(broker.publish_call, call("r-1", index, TOKENS))
        await until(lambda: logged(caplog, WAITING))
        await broker.purge_records(5)
        await until(lambda: logged(caplog, THROUGH))
        entries = await take(broker.records(), 9)
        assert [entry.sequence for entry in entries] == list(range(5, 14))
        assert {entry.record.index for entry in entries[6:]} == {0, 1, 2}
    [waiting] = logged(caplog, WAITING)  # one speaks for the three
    assert (waiting["why"], waiting["waiting"]) == (STREAM_FULL, 3)
    assert QUICK.first_try_s <= waiting["waited_s"] < QUICK.say_again_s
    [through] = logged(caplog, THROUGH)
    assert through["waited_s"] >= waiting["waited_s"]


async def test_a_full_stream_at_the_bound_is_an_error_that_says_what_to_do(nats_server):
    async with set_up(nats_server, MIB, pace=QUICK) as broker:
        await fill(broker)
        with pytest.raises(BrokerError) as caught:
            await broker.publish_call(call("r-1", 0, TOKENS), 0.5)
    assert str(caught.value) == (
        "NATS did not store r-1.a1.c0 on clawpipe.records.call.r-1 within 0.5 s: the stream is full; raise [nats] "
        "max_store_bytes, lower keep_records_bytes, or let the learner write checkpoints more often: records are "
        "removed below them"
    )


async def test_a_large_record_waits_for_room_in_the_object_store(nats_server):
    """The object store has half a MiB here: no body of 600 KiB fits, whatever the record stream holds."""
    async with set_up(nats_server, MIB, pace=QUICK) as broker:
        with pytest.raises(BrokerError, match=r"did not store the body of r-1\.a1\.c0 within 1 s: the stream is full"):
            await broker.publish_call(call("r-1", 0, 150 * 1024), 1.0)
        await broker.publish_call(call("r-1", 1), 1.0)
        assert [entry.record.index for entry in await take(broker.records(), 1)] == [1]


async def test_a_killed_server_is_waited_for_and_said(nats_server, caplog):
    caplog.set_level("INFO", "clawpipe")
    async with set_up(nats_server, pace=QUICK) as broker:
        nats_server.kill()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(broker.publish_call, call("r-1", 0))
            await until(lambda: logged(caplog, WAITING))
            nats_server.start()
        assert [entry.record for entry in await take(broker.records(), 1)] == [call("r-1", 0)]
    [waiting] = logged(caplog, WAITING)
    assert waiting["why"] == NO_CONNECTION
    assert waiting["to"] == "store r-1.a1.c0 on clawpipe.records.call.r-1"
    assert len(logged(caplog, THROUGH)) == 1


async def test_no_server_at_the_bound_is_an_error_that_says_what_to_do(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker:
        nats_server.kill()
        await anyio.sleep(0.1)
        with pytest.raises(BrokerError, match=r"no connection to the server; check \[nats\] url and that the server"):
            await broker.publish_call(call("r-1", 0), 0.5)


async def test_questions_about_the_streams_wait_for_a_restarted_server(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker:
        await broker.publish_call(call("r-1", 0))
        nats_server.kill()
        found = []

        async def ask():
            found.append(await broker.last_records_sequence())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.3)
            nats_server.start()
        assert found == [1]


async def test_a_stored_record_is_said_by_nobody(nats_server, caplog):
    caplog.set_level("INFO", "clawpipe")
    async with set_up(nats_server) as broker:
        await broker.publish_call(call("r-1", 0))
    assert caplog.records == []


async def test_a_message_that_the_server_refuses_is_an_error_at_once(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker, plain_client(nats_server) as js:
        config = (await js.stream_info("clawpipe-RECORDS")).config
        config.max_msg_size = 1000
        await js.update_stream(config)
        with anyio.fail_after(1), pytest.raises(BrokerError, match=r"NATS refuses r-1\.a1\.c0 with 4"):
            await broker.publish_call(call("r-1", 0, 1000))


async def test_a_stream_that_was_deleted_is_an_error_that_says_so(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker, plain_client(nats_server) as js:
        await js.delete_stream("clawpipe-RECORDS")
        with pytest.raises(
            BrokerError, match="there is no such stream, or the server's JetStream is switched off; look"
        ):
            await broker.publish_call(call("r-1", 0), 0.5)


async def test_a_long_wait_is_said_again_and_again_but_not_at_every_try(nats_server, caplog):
    caplog.set_level("INFO", "clawpipe")
    async with set_up(nats_server, pace=QUICK) as broker, anyio.create_task_group() as tasks:
        nats_server.kill()
        tasks.start_soon(broker.publish_call, call("r-1", 0), 60.0)
        await until(lambda: len(logged(caplog, WAITING)) == 2)
        nats_server.start()
    first_s, second_s = (fields["waited_s"] for fields in logged(caplog, WAITING)[:2])
    assert first_s >= QUICK.first_try_s
    assert second_s - first_s >= QUICK.say_again_s
    assert len(logged(caplog, THROUGH)) == 1
