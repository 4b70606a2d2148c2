"""A short run of the flow without processes: actors, service and learner in turn, to be killed at any moment.

What outlives the service is what outlives it in earnest: the record stream, the work queue, the ledger file and the
learner. What outlives the learner is its checkpoint. A message that was not answered is sent again.
"""

from __future__ import annotations

import uuid

from pipeline_scripts import configuration, entry, two_turns

from clawpipe.pipeline import restart
from clawpipe.pipeline.flow import Flow, Order
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import AskCursor, BatchReady, Committed, Hello, Lease, Stepped, StreamCursor
from clawpipe.pipeline.scheduler import parse

TASKS = tuple(f"filing/{number}" for number in range(4))
GROUP_SIZE = 2


class Killed(Exception):
    """Here the process died."""


class ShortRun:
    """`moments` counts the moments at which it could have died; it dies at number `dies_at`, once."""

    def __init__(self, folder, dies_at=None):
        self.path = folder / "ledger.sqlite"
        self.file = LedgerFile(self.path)
        self.moments, self.dies_at = 0, dies_at
        self.queue = {}  # requests that are not acknowledged
        self.requested = {}  # every request that was ever made
        self.stream = []  # [(sequence, record)]
        self.next_sequence = 1
        self.trained = []  # the learner's truth: [(updates, rollout ids)]
        self.told = []  # the same, as far as the service has written it down
        self.updates = self.version = 0
        self.saved = 0, StreamCursor()  # the learner's checkpoint
        self.learner = self.wants_work
        self.flow, self.position = self.make_flow(), 0

    def make_flow(self):
        config = configuration(run={"updates": 3}, schedule={"max_staleness": 5})  # a death takes a version
        return Flow(config, TASKS, Ledger(), EventLog("pipeline"), uuid.uuid4().hex)

    def moment(self):
        self.moments += 1
        if self.moments == self.dies_at:
            raise Killed

    def go(self):
        """To the end, or to the moment of death."""
        while self.updates < self.flow.limits.updates:
            self.request()
            self.act()
            self.read()
            self.learner()

    # Actors and service

    def request(self):
        for request in self.flow.requests(0.0):
            assert request.rollout_id not in self.requested
            self.queue[request.rollout_id] = self.requested[request.rollout_id] = request
            self.moment()
            self.flow.requested(request)

    def act(self):
        """All at the same time, the newest a little ahead: in the stream, what is trained first lies behind the
        beginning of what is trained last."""
        played = [two_turns(request, version=self.version) for request in reversed(self.queue.values())]
        for records in zip(*played, strict=True):
            for record in records:
                self.stream.append((self.next_sequence, record))
                self.next_sequence += 1
        self.queue.clear()

    def read(self):
        for sequence, record in self.stream:
            if sequence > self.position:
                self.flow.record(entry(sequence, record), 0.0)
                self.position = sequence
                self.moment()

    def answer(self, message):
        """What the flow says to it; no answer leaves before the ledger is written."""
        reply = self.reply(message)
        self.moment()
        self.file.write(self.flow.ledger.changes())
        if isinstance(message, Stepped):
            self.told = list(self.trained)
        self.moment()
        return reply

    def reply(self, message):
        match message:
            case Lease():
                reply = self.flow.lease(message.version)
                if isinstance(reply, Order):
                    built = self.flow.recipe.build(reply.batch_id, reply.version, reply.groups)
                    return self.flow.leased(built)
                return reply
            case Stepped():
                return self.flow.stepped(message, 0.0)
            case AskCursor():
                return self.flow.cursor()
            case Committed():
                below = self.flow.committed(message)
                self.stream = [(sequence, record) for sequence, record in self.stream if sequence >= below]

    # The learner: what it says next

    def wants_work(self):
        reply = self.answer(Lease(version=self.version))
        if isinstance(reply, BatchReady):
            self.updates, self.version = self.updates + 1, self.version + 1
            self.trained.append((self.updates, self.flow.batches.lease.rollout_ids))
            self.batch_id, self.learner = reply.batch_id, self.has_stepped

    def has_stepped(self):
        message = Stepped(batch_id=self.batch_id, version=self.version, updates=self.updates, metrics={})
        self.answer(message)
        self.learner = self.wants_checkpoint

    def wants_checkpoint(self):
        self.saved = self.updates, self.answer(AskCursor())
        self.learner = self.has_checkpoint

    def has_checkpoint(self):
        updates, cursor = self.saved
        self.answer(Committed(version=self.version, updates=updates, cursor=cursor, path=""))
        self.learner = self.wants_work

    # Deaths

    def revive(self, *, learner_too=False, ledger_too=False):
        """The service is started anew, and the learner from its checkpoint where it died as well."""
        self.file.close()
        if ledger_too:
            self.path.unlink()
        self.file = LedgerFile(self.path)
        stored, self.flow = self.file.read(), self.make_flow()
        message = self.restored_learner() if learner_too else Lease(version=self.version)
        at = restart.anchor(message, stored)
        restart.prepare(self.flow, stored, at)
        self.position = at.cursor.sequence - 1
        self.read()
        restart.complete(self.flow, stored, at, list(self.queue.values()))
        if learner_too:
            self.flow.hello(message)
        self.file.write(self.flow.ledger.changes())

    def restored_learner(self):
        self.updates, cursor = self.saved
        self.version += 1
        self.trained = [(updates, rollouts) for updates, rollouts in self.trained if updates <= self.updates]
        self.told = list(self.trained)
        self.learner = self.wants_work
        return Hello(version=self.version, updates=self.updates, cursor=cursor)

    # What can be seen from outside

    @property
    def groups(self):
        """The groups that were ever requested."""
        return {request.group_id for request in self.requested.values()}

    @property
    def trained_groups(self):
        """Those of which the service knows that they are trained."""
        return {parse(rollout_id).group_id for _, rollouts in self.told for rollout_id in rollouts}
