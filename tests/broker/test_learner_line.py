"""Questions of the learner: answered once, whatever gets lost."""

from __future__ import annotations

import anyio
import pytest
from broker_scripts import set_up

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.records import Lease, NotYet, Ok

pytestmark = pytest.mark.anyio


async def test_a_slow_answer_is_worked_out_once_though_it_was_asked_for_again(nats_server):
    asked = []

    async def slow(message):
        asked.append(message)
        await anyio.sleep(2.5)
        return NotYet() if len(asked) == 1 else Ok()

    async with (
        set_up(nats_server) as learner,
        Broker.connect(nats_server.url, nats_server.token) as service,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(service.serve_learner, slow)
        assert await learner.ask(Lease(version=4), 20) == NotYet()
        assert asked == [Lease(version=4)]
        assert await learner.ask(Lease(version=4), 20) == Ok()  # another question, though the same words
        assert len(asked) == 2
        tasks.cancel_scope.cancel()


async def test_a_question_that_died_with_its_service_is_answered_by_the_next_within_seconds(nats_server):
    killed = anyio.Event()

    async def never(message):
        killed.set()
        await anyio.sleep_forever()

    async def handler(message):
        return Ok()

    async def restart(service, tasks):
        async with anyio.create_task_group() as first:
            first.start_soon(service.serve_learner, never)
            await killed.wait()
            first.cancel_scope.cancel()
        tasks.start_soon(service.serve_learner, handler)

    async with (
        set_up(nats_server) as learner,
        Broker.connect(nats_server.url, nats_server.token) as service,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(restart, service, tasks)
        with anyio.fail_after(6):
            assert await learner.ask(Lease(version=4), 20) == Ok()
        tasks.cancel_scope.cancel()


async def test_a_server_without_the_streams_of_the_run_is_one_clear_error(nats_server):
    async with Broker.connect(nats_server.url, nats_server.token, prefix="other") as broker:
        for question in (broker.last_records_sequence, broker.pending_requests, broker.dead_letters):
            with pytest.raises(BrokerError, match=r"\(stream not found\); check that \[nats\] prefix 'other' is"):
                await question()
