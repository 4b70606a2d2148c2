"""Questions of the learner: answered once, whatever gets lost."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from broker_scripts import logged, plain_client, set_up

from clawpipe.pipeline import learner_line
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.records import Lease, NotYet, Ok

pytestmark = pytest.mark.anyio


async def test_a_slow_answer_is_worked_out_once_though_it_was_asked_for_again(nats_server):
    asked = []

    async def slow(message):
        asked.append(message)
        await anyio.sleep(0.7)
        return NotYet() if len(asked) == 1 else Ok()

    async with (
        plain_client(nats_server) as js,
        Broker.connect(nats_server.url, nats_server.token) as service,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(service.serve_learner, slow)
        ask = partial(learner_line.ask, js._nc, "clawpipe.learner", Lease(version=4), 20, again_s=0.2)
        assert await ask() == NotYet()
        assert asked == [Lease(version=4)]
        assert await ask() == Ok()  # another question, though the same words
        assert len(asked) == 2
        tasks.cancel_scope.cancel()


async def test_a_question_that_died_with_its_service_is_answered_by_the_next(nats_server):
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
        plain_client(nats_server) as js,
        Broker.connect(nats_server.url, nats_server.token) as service,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(restart, service, tasks)
        with anyio.fail_after(10):
            ask = partial(learner_line.ask, js._nc, "clawpipe.learner", Lease(version=4), 20, again_s=0.3)
            assert await ask() == Ok()
        tasks.cancel_scope.cancel()


async def test_a_question_that_cannot_be_read_ends_nobody(nats_server, caplog):
    async def handler(message):
        return Ok()

    async with set_up(nats_server) as broker, plain_client(nats_server) as js, anyio.create_task_group() as tasks:
        tasks.start_soon(broker.serve_learner, handler)
        assert await broker.ask(Lease(version=4), 20) == Ok()
        for poison in (b"hello", b"\x81\xa1a" * 100_000):
            await js._nc.publish("clawpipe.learner", poison)
        await js._nc.flush()
        assert await broker.ask(Lease(version=4), 20) == Ok()
        tasks.cancel_scope.cancel()
    passed_over = logged(caplog, "a message cannot be read and is passed over")
    assert [fields["bytes"] for fields in passed_over] == [5, 300_000]


async def test_a_server_without_the_streams_of_the_run_is_one_clear_error(nats_server):
    async with Broker.connect(nats_server.url, nats_server.token, prefix="other") as broker:
        for question in (broker.last_records_sequence, broker.pending_requests, broker.dead_letters):
            with pytest.raises(BrokerError, match=r"\(stream not found\); check that \[nats\] prefix 'other' is"):
                await question()
