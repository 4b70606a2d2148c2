"""The flow between stream and learner, alone and under a machine that delivers, crashes and resumes at random."""

from __future__ import annotations

import tempfile
import uuid
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pipeline_scripts import Script, configuration, entry, two_turns

from clawpipe.pipeline import restart
from clawpipe.pipeline.books import Totals
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.flow import Flow, Order
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    BatchReady,
    CallRecord,
    Committed,
    Finished,
    Hello,
    Infra,
    Lease,
    NotYet,
    Stepped,
    StreamCursor,
    TimedOut,
)
from clawpipe.pipeline.report import summed

TASKS = [f"filing/{n}" for n in range(3)]


def make_flow(**tables):
    return Flow(configuration(**tables), TASKS, Ledger(), EventLog("pipeline"), uuid.uuid4().hex)


class Stream:
    """Feeds records to a flow with sequences of its own."""

    def __init__(self, flow):
        self.flow = flow
        self.sequence = 0

    def __call__(self, *records, now=0.0):
        for record in records:
            self.sequence += 1
            self.flow.record(entry(self.sequence, record), now)


def started(flow):
    requests = flow.requests(0.0)
    for request in requests:
        flow.requested(request)
    return requests


def lease(flow, version=0):
    reply = flow.lease(version)
    if isinstance(reply, Order):
        return flow.leased(flow.recipe.build(reply.batch_id, reply.version, reply.groups))
    return reply


def step(flow, ready, **changes):
    message = Stepped(batch_id=ready.batch_id, version=flow.version + 1, updates=flow.updates + 1, metrics={})
    flow.stepped(msgspec.structs.replace(message, **changes), 0.0)


def totals(flow) -> Totals:
    return summed(flow.ledger.totals().values())


def test_no_more_is_requested_than_the_credits_allow_and_a_step_frees_them():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)
    requests = started(flow)
    assert len(requests) == 12  # (2 + 1) steps of 2 groups of 2
    assert started(flow) == []
    for request in requests:
        feed(*two_turns(request))
    assert started(flow) == []  # queued is still in flight
    ready = lease(flow)
    assert started(flow) == []  # and so is leased
    step(flow, ready)
    assert len(started(flow)) == 4


def test_no_group_is_requested_that_no_update_is_left_for():
    assert len(started(make_flow(run={"updates": 1}))) == 4


def test_a_lease_asked_for_twice_is_the_same_batch():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    first = lease(flow)
    assert lease(flow) == first
    assert flow.batches.chunk("another", 0) == b""


def test_a_group_whose_rollouts_are_all_stale_is_dropped_whole_and_its_credits_return():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)
    requests = started(flow)
    for request in requests:
        feed(*two_turns(request, version=0 if request.group_id == "g-000000" else 4))
    ready = lease(flow, version=4)
    assert {r.group_id for r in flow.batches.lease.groups} == {"g-000001", "g-000002"}
    assert isinstance(ready, BatchReady)
    assert totals(flow).dropped == {"stale": 6}
    assert flow.admission.held == 10
    assert flow.spans.cursor().sequence == 7  # group 0, the first six records, is done


def test_equal_rewards_make_rows_without_entries_and_their_tokens_are_counted():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request, reward=0.5 if request.group_id == "g-000000" else None))
    ready = lease(flow)
    batch = flow.batches.lease
    assert set(batch.unused.values()) == {"zero_spread"}
    assert batch.num_entries == 6
    step(flow, ready)
    assert flow.ledger.updates[1].groups_without_spread == 1
    assert totals(flow).dropped == {"zero_spread": 6}
    assert totals(flow).tokens["trained"] == 6


def test_a_refused_batch_is_dropped_and_five_in_a_row_end_the_run():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)

    def refuse():
        for request in started(flow):
            feed(*two_turns(request))
        step(flow, lease(flow), updates=0, version=0, refused="no")

    for _ in range(4):
        refuse()
    with pytest.raises(ClawpipeError, match="refused 5 batches in a row, the last one because: no"):
        refuse()
    assert totals(flow).dropped == {"refused": 60}
    assert flow.updates == 0


def test_a_batch_without_a_step_is_dropped_and_no_update():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    step(flow, lease(flow), updates=0, version=0)
    assert flow.ledger.updates == {}
    assert totals(flow).dropped == {"no_step": 12}


def test_infrastructure_that_always_fails_ends_the_run_with_the_reason():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)

    def fail():
        for request in started(flow):
            script = Script(request.rollout_id, task_id=request.task_id)
            feed(script.manifest(Infra(boundary="sandbox", message="no space")))

    fail()
    with pytest.raises(ClawpipeError, match=r"16 rollouts in a row .* infra: sandbox: no space"):
        fail()


def test_a_second_manifest_of_a_rollout_trains_nothing_again():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    for request in requests:
        feed(*two_turns(request))
    feed(*two_turns(requests[0], attempt=2))  # its acknowledgement was lost: it was run again
    assert totals(flow).dropped == {"late": 3}
    assert totals(flow).tokens["queued"] == 36
    flow.check()


def test_a_record_that_nobody_asked_for_is_counted_and_disturbs_nothing():
    flow = make_flow()
    feed = Stream(flow)
    started(flow)
    feed(Script("r-000099-0").call([1], [2, 3]), Script("elsewhere").call([1], [2]))
    assert totals(flow).dropped == {"unadmitted": 3}
    assert flow.spans.cursor() == StreamCursor(sequence=3)
    flow.check()


def test_a_rollout_whose_request_vanished_is_lost_by_name_and_requested_again():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    feed(two_turns(requests[0])[0])
    flow.lost(requests[0].rollout_id)
    assert totals(flow).reasons == {"lost": 1}
    assert totals(flow).dropped == {"lost": 2}
    assert [r.rollout_id for r in started(flow)] == ["r-000000-0-1"]


def test_a_broken_account_names_the_first_rollout():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    flow.ledger.rows["r-000001-1"].kept += 1
    flow.ledger.rows["r-000002-0"].kept += 1
    with pytest.raises(AssertionError, match="rollout r-000001-1"):
        flow.check()


def test_a_rollout_that_somebody_holds_and_the_books_do_not_is_a_crash():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    flow.replay.remove("g-000001")
    with pytest.raises(AssertionError, match=r"rollout r-000001-0: booked .*, held None"):
        flow.check()


def test_the_cursor_stays_below_an_open_group_and_names_what_is_done_above():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    slow, *others = [two_turns(request) for request in requests]
    feed(slow[0])
    for records in others:
        feed(*records)
    step(flow, lease(flow))
    cursor = flow.cursor()
    assert cursor.sequence == 1
    assert cursor.done == ("r-000001-0", "r-000001-1", "r-000002-0", "r-000002-1")


seeds = st.integers(0, 2**16).map(Random)  # one draw each: hypothesis' own randoms are draws without end


class Machine(RuleBasedStateMachine):
    """A run in which every process may die at any moment. The learner's truth is `trained`."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.file = LedgerFile(Path(self.folder.name, "ledger.sqlite"))
        self.flow = make_flow(run={"updates": 10_000}, replay={"close_timeout_s": 10.0})
        self.queue = {}  # the work queue: rollout id -> (request, deliveries)
        self.outboxes = {}  # records that an actor still has to publish
        self.stream = []  # [(sequence, record)]
        self.published = set()
        self.next_sequence = 1
        self.position = 0  # of the service in the stream
        self.now = 0.0
        self.version = 0
        self.updates = 0
        self.trained = []  # [(updates, rollout ids)]
        self.held = None  # (BatchReady, rollout ids) that the learner has fetched
        self.saved = (0, StreamCursor())
        self.crashed = False

    # The actors

    @rule()
    def request(self):
        admission = self.flow.admission
        held = admission.held
        requests = self.flow.requests(0.0)
        assert 0 <= admission.held <= max(held, admission.capacity)
        for request in requests:
            assert request.rollout_id not in self.queue
            self.queue[request.rollout_id] = request, 0
            self.flow.requested(request)

    @rule(random=seeds, share=st.sampled_from([0.1, 0.5, 1.0, 1.0]))
    def take(self, random, share):
        """Actors take requests, some of them for a second time while the first actor still publishes."""
        self.request()
        for rollout_id in sorted(self.queue):
            if random.random() < share:
                self.outboxes[rollout_id] = self._play(rollout_id, random)

    def _play(self, rollout_id, random):
        request, deliveries = self.queue[rollout_id]
        self.queue[rollout_id] = request, deliveries + 1
        *calls, manifest = two_turns(request, deliveries + 1, version=self.version)
        kind = random.choice(["plain"] * 12 + ["died", "infra", "timed_out", "reordered"])
        if kind == "died":
            return calls[: random.randrange(1, 3)]
        if kind == "infra":
            manifest = msgspec.structs.replace(manifest, outcome=Infra(boundary="sandbox", message="gone"))
        if kind == "timed_out":
            manifest = msgspec.structs.replace(manifest, outcome=TimedOut(reward=0.25))
        records = [*calls, manifest]
        return records[::-1] if kind == "reordered" else records

    @rule(random=seeds, share=st.sampled_from([0.3, 1.0, 1.0]))
    def publish(self, random, share):
        """Some of what actors hold reaches the stream, interleaved, some of it twice; then they acknowledge."""
        for _ in range(round(share * sum(map(len, self.outboxes.values())))):
            rollout_id = random.choice(sorted(self.outboxes))
            record = self.outboxes[rollout_id].pop(0)
            for _ in range(1 + (random.random() < 0.1)):
                self.stream.append((self.next_sequence, record))
                self.next_sequence += 1
            if isinstance(record, CallRecord):
                self.published.add(record.call_id)
            if not self.outboxes[rollout_id]:
                del self.outboxes[rollout_id]
                if not isinstance(record, CallRecord) and random.random() < 0.9:
                    self.queue.pop(rollout_id, None)
                if isinstance(record, CallRecord) and random.random() < 0.1:
                    self.queue.pop(rollout_id, None)  # acknowledged without a manifest: lost

    # The service

    @rule()
    def read(self):
        for sequence, record in self.stream:
            if sequence > self.position:
                self.flow.record(entry(sequence, record), self.now)
                self.position = sequence

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def tick(self, seconds):
        self.now += seconds
        self.flow.tick(self.now)

    @rule()
    def flush(self):
        self.file.write(self.flow.ledger.changes())

    @rule()
    def audit(self):
        self.read()
        for rollout_id in set(self.flow.ledger.in_flight) - set(self.queue) - set(self.outboxes):
            self.flow.lost(rollout_id)

    # The learner

    @precondition(lambda self: self.held is None)
    @rule()
    def lease(self):
        self.read()
        reply = lease(self.flow, self.version)
        assert not isinstance(reply, Finished)
        if isinstance(reply, NotYet):
            return
        self.flush()
        assert reply.digest == self.flow.batches.lease.digest
        self.held = reply, self.flow.batches.lease.rollout_ids

    @precondition(lambda self: self.held is not None)
    @rule(refused=st.sampled_from([False] * 9 + [True]))
    def step(self, refused):
        ready, rollouts = self.held
        self.held = None
        if not refused:
            self.version, self.updates = self.version + 1, self.updates + 1
            self.trained.append((self.updates, rollouts))
        message = Stepped(
            batch_id=ready.batch_id,
            version=self.version,
            updates=self.updates,
            metrics={},
            refused="damaged" if refused else "",
        )
        self.flow.stepped(message, 0.0)
        assert self.flow.batches.lease is None
        self.flow.stepped(message, 0.0)
        self.flush()

    @rule(random=seeds, times=st.integers(1, 3), late=st.booleans())
    def cycle(self, random, times, late):
        """The ordinary course of things: rollouts run, a batch is trained."""
        for _ in range(times):
            self.take(random, 1.0)
            self.publish(random, 0.8 if late else 1.0)
            if self.held is None:
                self.lease()
            if self.held is not None:
                self.step(False)

    @rule(random=seeds)
    def cycle_once(self, random):
        self.cycle(random, 1, False)

    @rule(crash=st.booleans())
    def checkpoint(self, crash):
        cursor = self.flow.cursor()
        self.saved = self.updates, cursor
        if crash:
            self.crash_learner()
            return
        below = self.flow.committed(Committed(version=self.version, updates=self.updates, cursor=cursor, path=""))
        self.flush()
        self.stream = [(sequence, record) for sequence, record in self.stream if sequence >= below]

    @rule()
    def crash_learner(self):
        self._restore_learner()
        self.flow.hello(Hello(version=self.version, updates=self.updates, cursor=self.saved[1]))
        self.flush()

    def _restore_learner(self):
        self.updates = self.saved[0]
        self.version += 1
        self.held = None
        self.trained = [(u, rollouts) for u, rollouts in self.trained if u <= self.updates]

    # Crashes of the service

    @rule(learner_too=st.booleans(), ledger_lost=st.sampled_from([False] * 4 + [True]))
    def crash_service(self, learner_too, ledger_lost):
        self.crashed = True
        self.file.close()
        if ledger_lost and learner_too:
            Path(self.folder.name, "ledger.sqlite").unlink()
        self.file = LedgerFile(Path(self.folder.name, "ledger.sqlite"))
        stored = self.file.read()
        self.flow = make_flow(run={"updates": 10_000}, replay={"close_timeout_s": 10.0})
        if learner_too:
            self._restore_learner()
            message = Hello(version=self.version, updates=self.updates, cursor=self.saved[1])
        else:
            message = Lease(version=self.version)
        at = restart.anchor(message, stored)
        restart.prepare(self.flow, stored, at)
        self.position = at.cursor.sequence - 1
        self.read()
        pending = [request for request, _ in self.queue.values()]
        restart.complete(self.flow, stored, at, pending)
        if learner_too:
            self.flow.hello(message)
        if self.held is not None:
            assert self.flow.batches.lease.digest == self.held[0].digest
        assert self.flow.updates == self.updates
        self.flush()

    # What must hold

    @invariant()
    def nothing_is_trained_twice(self):
        if not hasattr(self, "trained"):
            return
        counts = Counter(rollout_id for _, rollouts in self.trained for rollout_id in rollouts)
        assert max(counts.values(), default=1) == 1, counts.most_common(1)

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "flow"):
            return
        self.flow.check()
        found = totals(self.flow)
        places = ("in_flight", "queued", "leased", "trained")
        assert found.tokens["sampled"] == sum(found.tokens[p] for p in places) + found.dropped.total()

    def teardown(self):
        if not hasattr(self, "flow"):
            return
        self.publish(Random(0), 1.0)
        self.read()
        self.audit()
        while self.held is not None or isinstance(self.flow.lease(self.version), Order | BatchReady):
            if self.held is None:
                self._lease_again()
            self.step(False)
        self.nothing_is_trained_twice()
        self.the_books_balance()
        if not self.crashed:
            assert totals(self.flow).calls == len(self.published)
        self.file.close()
        self.folder.cleanup()

    def _lease_again(self):
        if self.flow.batches.lease is None:
            groups = self.flow._building
            self.flow.leased(self.flow.recipe.build(f"b-end-{self.version}", self.version, groups))
        self.held = self.flow.batches.lease.ready, self.flow.batches.lease.rollout_ids


TestAnyOrderOfDeliveriesAndCrashesKeepsTheBooks = Machine.TestCase
