"""Makes pipeline_scripts importable for this room's tests; a run of the service between an actor and a learner."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from pipeline_scripts import configuration, two_turns

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    AskCursor,
    BatchReady,
    CallRecord,
    Chunk,
    Committed,
    Finished,
    Hello,
    Lease,
    Ok,
    Stepped,
    StreamCursor,
)
from clawpipe.pipeline.runtime import Runtime
from clawpipe.pipeline.service import serve

settings.register_profile(
    "pipeline", max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("CLAWPIPE_HYPOTHESIS", "pipeline"))


class Learner:
    """Trains by noting what it was given; what a checkpoint holds survives `crash`."""

    def __init__(self):
        self.broker = None  # set when the run connects it
        self.version = 0
        self.updates = 0
        self.trained = []  # (updates, batch)
        self.saved = 0, StreamCursor()

    async def hello(self):
        self.updates, cursor = self.saved
        self.trained = [(u, batch) for u, batch in self.trained if u <= self.updates]
        reply = await self.broker.ask(Hello(version=self.version, updates=self.updates, cursor=cursor), 20)
        assert reply == Ok()

    async def lease(self):
        while True:
            reply = await self.broker.ask(Lease(version=self.version), 20)
            if isinstance(reply, BatchReady | Finished):
                return reply

    async def fetch(self, ready):
        parts = [
            (await self.broker.ask(Chunk(batch_id=ready.batch_id, index=n), 20)).body for n in range(ready.num_chunks)
        ]
        body = b"".join(parts)
        assert hashlib.blake2b(body).hexdigest() == ready.digest
        return msgspec.msgpack.decode(body, type=Batch)

    async def step(self, batch):
        self.version, self.updates = self.version + 1, self.updates + 1
        self.trained.append((self.updates, batch))
        message = Stepped(batch_id=batch.batch_id, version=self.version, updates=self.updates, metrics={"train_s": 0.5})
        assert await self.broker.ask(message, 20) == Ok()
        assert await self.broker.ask(message, 20) == Ok()  # a reply may be lost

    async def checkpoint(self):
        cursor = (await self.broker.ask(AskCursor(), 20)).cursor
        self.saved = self.updates, cursor
        message = Committed(version=self.version, updates=self.updates, cursor=cursor, path="x")
        assert await self.broker.ask(message, 20) == Ok()

    async def train(self, updates=None, every=1):
        while updates is None or self.updates < updates:
            ready = await self.lease()
            if isinstance(ready, Finished):
                await self.checkpoint()
                return
            await self.step(await self.fetch(ready))
            if self.updates % every == 0:
                await self.checkpoint()

    async def hello_and_train(self):
        await self.hello()
        await self.train()

    def rollouts(self):
        return [row.rollout_id for _, batch in self.trained for row in batch.rollouts]


async def act(broker, play, version):
    """Runs requests for ever; `play` gives the records of each."""
    while True:
        delivery = await broker.pull_request(0.5)
        if delivery is None:
            continue
        for record in play(delivery.request, delivery.attempt, version=version()):
            if isinstance(record, CallRecord):
                await broker.publish_call(record)
            else:
                await broker.publish_manifest(record)
        await delivery.ack()


class Run:
    """A run folder, a learner, and the parts of a run on one nats-server."""

    def __init__(self, server, folder, **tables):
        self.server = server
        self.config = configuration(**tables)
        self.runtime = Runtime(run_id="test", run_dir=str(folder), nats_url=server.url, nats_token=server.token)
        self.learner = Learner()
        (folder / "tasks.json").write_text(json.dumps([f"filing/{n}" for n in range(5)]))

    def broker(self):
        return Broker.connect(self.server.url, self.server.token)

    @asynccontextmanager
    async def around(self, play=two_turns):
        """All but the service: the streams, the learner connected, an actor if there is a `play` for it.

        Gives a broker and the task group of the actor, which is cancelled at the end.
        """
        async with self.broker() as broker, self.broker() as acting, self.broker() as asking:
            await broker.setup(1024**3)
            self.learner.broker = asking
            async with anyio.create_task_group() as tasks:
                if play is not None:
                    tasks.start_soon(act, acting, play, lambda: self.learner.version)
                yield broker, tasks
                tasks.cancel_scope.cancel()

    async def serve(self, *, resume=False, audit_interval_s=60.0):
        runtime = msgspec.structs.replace(self.runtime, resume=resume)
        await serve(self.config, runtime, EventLog("pipeline"), audit_interval_s)

    async def serve_until(self, stop):
        """The service, ended at once when `stop` returns: as by SIGKILL, nothing is written at the end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.serve)
            await stop()
            tasks.cancel_scope.cancel()

    def summary(self):
        return json.loads(self.runtime.path("summary.json").read_bytes())

    def status(self):
        return json.loads(self.runtime.path("status.json").read_bytes())

    def rows(self, query):
        with sqlite3.connect(self.runtime.path("ledger.sqlite")) as db:
            return db.execute(query).fetchall()


@pytest.fixture
def run(nats_server, tmp_path):
    return functools.partial(Run, nats_server, tmp_path)
