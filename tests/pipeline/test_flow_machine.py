"""The flow under a machine that delivers, spoils, crashes and resumes at random."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import flow_scripts
import msgspec
from flow_scripts import lease, make_flow, totals
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pipeline_scripts import Script, own, two_turns

from clawpipe.pipeline import restart
from clawpipe.pipeline.books import RolloutState, Standing
from clawpipe.pipeline.flow import Order
from clawpipe.pipeline.ledger_file import LedgerFile, reading
from clawpipe.pipeline.proof import first_breach
from clawpipe.pipeline.records import (
    BatchReady,
    CallRecord,
    Committed,
    Finished,
    Flaw,
    Hello,
    Infra,
    Lease,
    NotYet,
    Role,
    Scored,
    Stepped,
    StreamCursor,
    TimedOut,
)
from clawpipe.pipeline.throttle import allowed_staleness

seeds = st.integers(0, 2**16).map(Random)  # one draw each: hypothesis' own randoms are draws without end

options = st.fixed_dictionaries(
    {
        "max_reuse": st.sampled_from([1, 2]),
        "min_group": st.sampled_from([1, 2]),
        "skip_zero_spread": st.booleans(),
        "sampling": st.sampled_from([{"sampling": "oldest"}, {"sampling": "windowed", "window_groups": 3}]),
        "auxiliary": st.sampled_from(["exclude", "own_group"]),
        "throttles": st.booleans(),
    }
)

BAD_CALLS = ["cut_short", "newer", "without_blob", "unsound"]
AT_ONCE = {Flaw.UNREADABLE, Flaw.UNKNOWN_SCHEMA, Flaw.MISSING_BLOB, Flaw.UNADMITTED}  # whatever has become of it


def tables(chosen):
    throttle = {"kind": "truncated", "auto_throttle": {"ess_below": 0.5, "for_updates": 2}}
    return {
        "run": {"updates": 10_000},
        "correction": throttle if chosen["throttles"] else {"kind": "truncated"},
        "schedule": {"min_group": chosen["min_group"], "skip_zero_spread": chosen["skip_zero_spread"]},
        "replay": {
            "close_timeout_s": 10.0,
            "max_reuse": chosen["max_reuse"],
            "auxiliary": chosen["auxiliary"],
            **chosen["sampling"],
        },
    }


def ess(updates):
    """Of an update: four are low, then two are high."""
    return 0.1 if updates % 6 < 4 else 0.9


class Sent:
    """A message on its way: what the reader of the stream gets, and what a test must know of it."""

    def __init__(self, record, how="good"):
        self.record = record
        made = record if how == "garbage" else getattr(flow_scripts, how)(record)
        if how == "garbage":
            made = flow_scripts.garbage(record.rollout_id)
        self.message = made if callable(made) else flow_scripts.good(made)
        self.call_id = record.call_id if isinstance(record, CallRecord) and how in ("good", "orphaned") else None
        self.is_good = how == "good"


class Machine(RuleBasedStateMachine):
    """A run in which every process may die at any moment. The learner's truth is `trained`."""

    @initialize(chosen=options)
    def begin(self, chosen):
        self.folder = tempfile.TemporaryDirectory()
        self.file = LedgerFile(Path(self.folder.name, "ledger.sqlite"))
        self.tables, self.max_reuse = tables(chosen), chosen["max_reuse"]
        self.flow = make_flow(**self.tables)
        self.flow.ledger.stands(Standing())  # as the service does at a run's first start
        self.flush()
        self.queue = {}  # the work queue: rollout id -> (request, deliveries)
        self.outboxes = {}  # messages that an actor still has to publish
        self.stream = []  # [(sequence, Sent)]
        self.published = set()
        self.settled = set()  # rollouts of which all was published, and all was good
        self.next_sequence = 1
        self.position = 0  # of the service in the stream
        self.letters = {}  # sequence -> letter
        self.now = 0.0
        self.version = 0
        self.updates = 0
        self.trained = []  # [(updates, rollout ids)]
        self.held = None  # (BatchReady, rollout ids) that the learner has fetched
        self.saved = (0, StreamCursor())
        self.crashed = False
        self.ledger_was_lost = False

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
        number = int(request.group_id.removeprefix("g-"))
        reward = 0.5 if number % 4 == 3 else None  # every fourth group is without spread
        *calls, manifest = two_turns(request, deliveries + 1, version=self.version, reward=reward)
        kinds = ["died", "infra", "timed_out", "reordered", "sub-agent", "bad call", "bad manifest", "conflict"]
        kind = random.choice(["plain"] * 16 + [*kinds, "orphan", "nobody's", "garbage"])
        if kind == "died":
            return [Sent(call) for call in calls[: random.randrange(1, 3)]]
        if kind == "infra":
            manifest = msgspec.structs.replace(manifest, outcome=Infra(boundary="sandbox", message="gone"))
        if kind == "timed_out":
            manifest = msgspec.structs.replace(manifest, outcome=TimedOut(reward=0.25))
        if kind == "sub-agent":
            calls, manifest = self._with_subagent(request, deliveries + 1)
        sent = [Sent(record) for record in (*calls, manifest)]
        if kind == "reordered":
            sent = sent[::-1]
        return self._spoiled(kind, sent, random)

    def _with_subagent(self, request, attempt):
        script = Script(request.rollout_id, attempt, request.harness, request.task_id)
        t = own(request.rollout_id)
        script.call([1, t], [t + 1], version=self.version)
        script.call([5, t], [t + 2, t + 3], version=self.version, role=Role.SUBAGENT)
        script.call([1, t, t + 1, 4], [t + 4], version=self.version)
        place = int(request.rollout_id.split("-")[2])
        return script.records, script.manifest(Scored(reward=float(place % 2)), version=request.version)

    def _spoiled(self, kind, sent, random):
        """The same messages, one of them bad."""
        at = random.randrange(len(sent) - 1)
        if kind == "bad call":
            sent[at] = Sent(sent[at].record, random.choice(BAD_CALLS))
        if kind == "bad manifest":
            sent[-1] = Sent(sent[-1].record, random.choice(BAD_CALLS))
        if kind == "conflict":
            sent.insert(at + 1, Sent(sent[at].record, "altered"))
        if kind == "orphan":
            sent[at] = Sent(sent[at].record, "orphaned")
        if kind == "garbage":
            sent.insert(at, Sent(sent[at].record, "garbage"))
        if kind == "nobody's":
            sent.insert(at, Sent(Script(random.choice(["r-900000-0", "r-000000-9", "elsewhere"])).call([1], [2, 3])))
            sent[at].call_id = None
        return sent

    @rule(random=seeds, share=st.sampled_from([0.3, 1.0, 1.0]))
    def publish(self, random, share):
        """Some of what actors hold reaches the stream, interleaved, some of it twice; then they acknowledge."""
        for _ in range(round(share * sum(map(len, self.outboxes.values())))):
            rollout_id = random.choice(sorted(self.outboxes))
            sent = self.outboxes[rollout_id].pop(0)
            for _ in range(1 + (random.random() < 0.1 and sent.is_good and sent.call_id is not None)):
                self.stream.append((self.next_sequence, sent))
                self.next_sequence += 1
            if sent.call_id is not None:
                self.published.add(sent.call_id)
            if not self.outboxes[rollout_id]:
                del self.outboxes[rollout_id]
                is_call = isinstance(sent.record, CallRecord)
                if random.random() < (0.1 if is_call else 0.9):  # without a manifest: lost
                    self.queue.pop(rollout_id, None)

    # The service

    @rule()
    def read(self):
        for sequence, sent in self.stream:
            if sequence > self.position:
                self.flow.record(sent.message(sequence), self.now)
                self.position = sequence
                self._publish_letters()

    def _publish_letters(self):
        for letter in self.flow.dead_letters:
            before = self.letters.setdefault(letter.sequence, letter)
            assert before.flaw is letter.flaw, "set aside again for another reason"
        self.flow.dead_letters.clear()

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def tick(self, seconds):
        self.now += seconds
        self.flow.tick(self.now)
        self._publish_letters()

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
            metrics={"ess": ess(self.updates)},
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
        self.stream = [(sequence, sent) for sequence, sent in self.stream if sequence >= below]

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
            self.ledger_was_lost = True
            Path(self.folder.name, "ledger.sqlite").unlink()
        self.file = LedgerFile(Path(self.folder.name, "ledger.sqlite"))
        stored = self.file.read()
        self.flow = make_flow(restart.decided_caps(stored), **self.tables)
        if learner_too:
            self._restore_learner()
            message = Hello(version=self.version, updates=self.updates, cursor=self.saved[1])
        else:
            message = Lease(version=self.version)
        at = restart.anchor(message, stored)
        restart.prepare(self.flow, stored, at, self.letters.values())
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
    def nothing_is_trained_more_often_than_it_may(self):
        if not hasattr(self, "trained"):
            return
        counts = Counter(rollout_id for _, rollouts in self.trained for rollout_id in rollouts)
        assert max(counts.values(), default=1) <= self.max_reuse, counts.most_common(1)

    @invariant()
    def what_the_learner_was_given_is_what_is_booked(self):
        if not hasattr(self, "flow") or self.ledger_was_lost:
            return
        trained = {}
        for update, rollouts in self.trained:
            for rollout_id in rollouts:
                trained.setdefault(rollout_id, []).append(update)
        for row in self.flow.ledger.rows.values():
            assert sorted(row.updates) == trained.get(row.rollout_id, []), row

    @invariant()
    def the_staleness_that_is_admitted_follows_from_the_updates_that_stand(self):
        if not hasattr(self, "flow") or self.ledger_was_lost:
            return
        rule = self.flow.holdings.auto_throttle
        seen = [ess(update) for update, _ in sorted(self.trained)]
        assert self.flow.admission.max_staleness == (allowed_staleness(seen, rule, 2) if rule else 2)

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "flow"):
            return
        self.flow.check()
        found = totals(self.flow)
        places = ("in_flight", "queued", "leased", "trained")
        assert found.tokens["sampled"] == sum(found.tokens[p] for p in places) + found.dropped.total()

    @invariant()
    def every_message_that_cannot_be_read_was_set_aside_with_its_flaw(self):
        if not hasattr(self, "flow") or self.ledger_was_lost:
            return
        for sequence, sent in self.stream:
            entry = sent.message(sequence)
            if sequence <= self.position and entry.flaw is not None:
                assert self.letters[sequence].flaw is entry.flaw
            if sequence <= self.position and entry.rollout_id in ("r-900000-0", "elsewhere", "r-000000-9"):
                assert self.letters[sequence].flaw is Flaw.UNADMITTED

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
        self.nothing_is_trained_more_often_than_it_may()
        self.the_books_balance()
        if not self.crashed:
            copies = [each for each in self.letters.values() if self._is_a_copy(each)]
            assert totals(self.flow).calls == len(self.published) + len(copies)
        self._nothing_is_lost()
        self.file.close()
        self.folder.cleanup()

    def _is_a_copy(self, letter):
        """Whether it is a call that can be read and is not a rollout's own."""
        kinds = Flaw.UNSOUND, Flaw.CONFLICTING, Flaw.UNADMITTED
        return letter.flaw in kinds and ".call." in letter.subject

    def _nothing_is_lost(self):
        """What was requested is in the books, with a reason if it was dropped, and nothing is on its way for ever."""
        self.flush()
        if self.ledger_was_lost:
            return
        with reading(Path(self.folder.name, "ledger.sqlite")) as ledger:
            breach = first_breach(ledger.read(), ledger.calls(), max_reuse=self.max_reuse, over=False)
        assert breach is None, breach
        rows = {row.rollout_id: row for row in self.file.read().rows}
        for _, rollouts in self.trained:
            assert all(rows[rollout_id].updates for rollout_id in rollouts)
        for row in rows.values():
            assert row.state is not RolloutState.DROPPED or row.reason, row
            assert row.state is not RolloutState.IN_FLIGHT or row.rollout_id in self.queue, row

    def _lease_again(self):
        if self.flow.batches.lease is None:
            groups = self.flow.holdings.building
            self.flow.leased(self.flow.recipe.build(f"b-end-{self.version}", self.version, groups))
        self.held = self.flow.batches.lease.ready, self.flow.batches.lease.rollout_ids


TestAnyOrderOfDeliveriesAndCrashesKeepsTheBooks = Machine.TestCase
