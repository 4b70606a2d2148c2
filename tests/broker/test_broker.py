"""The broker against a real nats-server, killed and restarted in the middle."""

from __future__ import annotations

import anyio
import pytest
from broker_scripts import QUICK, STORE_BYTES, call, logged, plain_client, request, set_up, take, take_one

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.processes import free_port
from clawpipe.pipeline.records import EngineState, Lease, NotYet, PushReport, RolloutManifest, Scored, WeightVersion

pytestmark = pytest.mark.anyio


async def test_records_come_back_in_order_and_once(nats_server):
    async with set_up(nats_server) as broker:
        for index in (0, 1, 1, 2):
            await broker.publish_call(call("r-1", index))
        manifest = RolloutManifest(
            rollout_id="r-1",
            attempt=1,
            group_id="g",
            task_id="t",
            harness="h",
            calls=(),
            outcome=Scored(reward=0.5),
        )
        await broker.publish_manifest(manifest)
        found = await take(broker.records(), 4)
        assert [entry.sequence for entry in found] == [1, 2, 3, 4]
        assert [entry.record.index for entry in found[:3]] == [0, 1, 2]
        assert found[3].record == manifest
        assert [entry.sequence for entry in await take(broker.records(3), 2)] == [3, 4]
        await broker.purge_records(3)
        assert [entry.sequence for entry in await take(broker.records(1), 2)] == [3, 4]


async def test_an_unacknowledged_request_comes_again_and_an_acknowledged_one_does_not(nats_server):
    async with set_up(nats_server) as broker:
        await broker.publish_request(request(0))
        await broker.publish_request(request(1))
        first = await broker.pull_request()
        second = await broker.pull_request()
        assert first.request.rollout_id == "r-0"
        await first.nak()
        await second.ack()
        again = await broker.pull_request()
        assert again.request.rollout_id == "r-0"
        assert again.attempt > first.attempt >= 1
        assert [r.rollout_id for r in await broker.pending_requests()] == ["r-0"]
        await again.ack()
        assert await broker.pull_request(0.1) is None
        assert await broker.pending_requests() == ()


async def test_attempts_rise_even_when_the_server_forgets_how_often_it_delivered(nats_server):
    """As one does that is killed; here the consumer, which counts, is made anew."""
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await broker.publish_request(request(0))
        first = await broker.pull_request()
        await js.delete_consumer("clawpipe-REQUESTS", "runners")
        await broker.setup(STORE_BYTES)
        again = await broker.pull_request()
    assert again.request == first.request
    assert again._msg.metadata.num_delivered == 1
    assert again.attempt > first.attempt


async def test_an_engine_entry_that_cannot_be_read_is_passed_over(nats_server, caplog):
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        state = EngineState(name="0", url="http://x", version=3, healthy=True)
        await broker.set_engine(state)
        await js.publish("$KV.clawpipe-CONTROL.engine.1", b"hello")
        reader = broker.engines()
        assert await take_one(reader) == {"0": state}
        await js.publish("$KV.clawpipe-CONTROL.engine.2", b"\x81\xa1a" * 20_000)  # deeper than a decoder goes
        newer = EngineState(name="0", url="http://x", version=4, healthy=True)
        await broker.set_engine(newer)
        assert await take_one(reader) == {"0": newer}
        await reader.aclose()
    passed_over = logged(caplog, "a message cannot be read and is passed over")
    assert [fields["subject"] for fields in passed_over] == [
        "$KV.clawpipe-CONTROL.engine.1",
        "$KV.clawpipe-CONTROL.engine.2",
    ]


async def test_a_push_report_that_cannot_be_read_is_passed_over(nats_server, caplog):
    report = PushReport(engine="0", version=1, pause_s=0.25, applied_s=0.5)
    async with set_up(nats_server) as broker, plain_client(nats_server) as js:
        await js.publish("clawpipe.weights.applied", b"hello")
        await broker.report_push(report)
        assert await take(broker.pushes(), 1) == [report]
    [fields] = logged(caplog, "a message cannot be read and is passed over")
    assert (fields["subject"], fields["bytes"]) == ("clawpipe.weights.applied", 5)


async def test_a_killed_server_loses_nothing_and_readers_go_on(nats_server):
    async with set_up(nats_server, pace=QUICK) as broker:
        await broker.publish_call(call("r-1", 0))
        reader = broker.records()
        assert (await take_one(reader)).sequence == 1
        nats_server.kill()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(broker.publish_call, call("r-1", 1))
            await anyio.sleep(0.5)
            nats_server.start()
            assert (await take_one(reader)).sequence == 2
        await reader.aclose()


async def test_a_restarted_run_finds_its_streams_whatever_they_reserve(nats_server):
    """The server's store is the fixture's 2 GiB: a second reservation of the record stream would not fit."""
    async with set_up(nats_server, 1024**3) as broker:
        await broker.publish_call(call("r-1", 0))
    nats_server.kill()
    nats_server.start()
    async with set_up(nats_server, 1024**3) as broker:
        assert [entry.sequence for entry in await take(broker.records(), 1)] == [1]


async def test_a_store_that_is_too_large_for_the_server_is_one_clear_error(nats_server):
    async with Broker.connect(nats_server.url, nats_server.token) as broker:
        with pytest.raises(BrokerError, match=r"lower \[nats\] max_store_bytes"):
            await broker.setup(1024**4)


async def test_a_late_reader_of_weights_gets_the_newest_version_only(nats_server):
    async with set_up(nats_server) as broker:
        assert await broker.last_weights() is None
        for version in (0, 1, 2):
            await broker.publish_weights(WeightVersion(version=version, path="p", num_bytes=1, created_s=0.0))
        reader = broker.weights()
        assert (await take_one(reader)).version == 2
        await broker.publish_weights(WeightVersion(version=7, path="p", num_bytes=1, created_s=0.0))
        assert (await take_one(reader)).version == 7
        await reader.aclose()


async def test_engine_states_and_the_drain_mark_are_seen(nats_server):
    async with set_up(nats_server) as broker:
        early = broker.engines()
        assert await take_one(early) == {}
        state = EngineState(name="0", url="http://x", version=3, healthy=True)
        await broker.set_engine(state)
        assert await take_one(early) == {"0": state}
        late = broker.engines()
        assert await take_one(late) == {"0": state}
        newer = EngineState(name="0", url="http://x", version=4, healthy=True)
        await broker.set_engine(newer)
        for reader in (early, late):
            assert await take_one(reader) == {"0": newer}
            await reader.aclose()
        with anyio.move_on_after(0.3) as scope:
            await broker.drained()
        assert scope.cancelled_caught
        await broker.request_drain()
        with anyio.fail_after(5):
            await broker.drained()
        await broker.clear_drain()
        with anyio.move_on_after(0.3) as scope:
            await broker.drained()
        assert scope.cancelled_caught


async def test_the_learner_is_answered_by_a_service_that_comes_late(nats_server):
    async def handler(message):
        assert message == Lease(version=4)
        return NotYet()

    async with (
        Broker.connect(nats_server.url, nats_server.token) as learner,
        Broker.connect(nats_server.url, nats_server.token) as service,
        anyio.create_task_group() as tasks,
    ):

        async def late():
            await anyio.sleep(0.1)
            await service.serve_learner(handler)

        tasks.start_soon(late)
        assert await learner.ask(Lease(version=4), timeout_s=20) == NotYet()
        tasks.cancel_scope.cancel()


async def test_no_server_is_one_clear_error():
    with pytest.raises(BrokerError, match=r"no connection .* check \[nats\] url"):
        async with Broker.connect(f"nats://127.0.0.1:{free_port()}", timeout_s=1):
            pass


async def test_a_request_is_taken_back_or_run_and_never_both(nats_server):
    taken: list[str] = []
    stop, under_way = anyio.Event(), anyio.Event()

    async def pull(broker: Broker) -> None:
        while not stop.is_set():
            if (delivery := await broker.pull_request(0.2)) is not None:
                taken.append(delivery.request.rollout_id)
            if len(taken) >= 20:
                under_way.set()

    async with set_up(nats_server) as broker:
        for round_ in range(3):
            taken.clear()
            stop, under_way = anyio.Event(), anyio.Event()
            wanted = {f"r-{100 * round_ + index}" for index in range(100)}
            for index in range(100):
                await broker.publish_request(request(100 * round_ + index))
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(pull, broker)
                await under_way.wait()
                back = [r.rollout_id for r in await broker.withdraw_requests()]
                await anyio.sleep(0.3)
                stop.set()
            assert len(taken) >= 20
            assert back
            assert sorted([*taken, *back]) == sorted(wanted)
