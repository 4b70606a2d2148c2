"""What a service that starts again makes of the ledger, the stream and the learner's first word."""

from __future__ import annotations

import pytest
from flow_scripts import Stream, cut_short, garbage, lease, make_flow, started, step, totals
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline import restart
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.records import AskCursor, Committed, Hello, StreamCursor


class Life:
    """A run of several services: its ledger file, its stream, its letters; a learner that lives on."""

    def __init__(self, folder, **tables):
        self.file = LedgerFile(folder / "ledger.sqlite")
        self.tables = tables
        self.stream = []  # records, the first with sequence 1
        self.letters = []
        self.flow = make_flow(**tables)

    def feed(self, *records, now=0.0):
        feeder = Stream(self.flow)
        feeder.sequence = len(self.stream)
        feeder(*records, now=now)
        self.stream += records
        self.letters += feeder.letters

    def flush(self):
        self.file.write(self.flow.ledger.changes())

    def restart(self, message=None, pending=()):
        stored = self.file.read()
        self.flow = make_flow(restart.decided_caps(stored), **self.tables)
        at = restart.anchor(message or AskCursor(), stored)
        restart.prepare(self.flow, stored, at, self.letters)
        feeder = Stream(self.flow)
        feeder.sequence = at.cursor.sequence - 1 if at.cursor.sequence else 0
        feeder(*self.stream[feeder.sequence :])
        restart.complete(self.flow, stored, at, pending)
        self.flush()
        return feeder

    def commit(self):
        updates = self.flow.updates
        self.flow.committed(Committed(version=updates, updates=updates, cursor=self.flow.cursor(), path=""))
        self.flush()

    def train(self):
        step(self.flow, lease(self.flow), version=0)
        self.flush()


@pytest.fixture
def life(tmp_path):
    def make(**tables):
        return Life(tmp_path, **{"run": {"updates": 100}, **tables})

    return make


def everything(run):
    requests = started(run.flow)
    for request in requests:
        run.feed(*two_turns(request))
    return requests


def test_a_record_that_nobody_asked_for_stays_turned_away_when_its_number_is_used_later(life):
    run = life()
    started(run.flow)
    run.feed(Script("r-000006-0").call([1], [2, 3]))  # groups 0 to 5 are out
    run.flow.scheduler.open(0)
    [request, *_] = started(run.flow)
    assert request.rollout_id == "r-000006-0"
    run.feed(*two_turns(request))
    run.flush()
    again = run.restart()
    assert [letter.sequence for letter in again.letters] == [1]
    assert totals(run.flow).dropped == {"unadmitted": 2}
    assert totals(run.flow).tokens["queued"] == 3


def test_a_record_of_a_number_far_beyond_what_was_asked_for_is_turned_away_while_reading_again(life):
    run = life()
    started(run.flow)
    run.flush()
    run.stream.append(Script("r-900000-0").call([1], [2, 3]))
    again = run.restart()
    assert [letter.flaw.value for letter in again.letters] == ["unadmitted"]
    assert run.flow.scheduler.next_number == 6


def test_a_rollout_that_the_clock_dropped_stays_dropped_though_its_call_came_later(life):
    run = life(replay={"close_timeout_s": 10.0})
    requests = started(run.flow)
    first, second, manifest = two_turns(requests[0])
    run.feed(first, manifest)
    run.flow.tick(11.0)
    [again] = started(run.flow)
    run.feed(second, *two_turns(again), *two_turns(requests[1]))
    run.flush()
    run.restart(pending=requests[2:])
    rows = {row.rollout_id: row.state.value for row in run.flow.ledger.rows.values()}
    assert rows["r-000000-0-1"] == "queued"
    assert [r.rollout_id for group in run.flow.replay.groups for r in group.rollouts] == ["r-000000-0-1", "r-000000-1"]
    assert totals(run.flow).reasons == {"incomplete": 1}


def test_what_was_too_old_for_a_batch_does_not_wait_again_behind_the_cursor_of_the_last_checkpoint(life):
    run = life()
    requests = everything(run)
    run.flow.lease(version=9)
    run.flush()
    cursor = run.flow.cursor()  # of a checkpoint that is being written
    assert cursor.sequence == len(run.stream) + 1
    run.restart()
    assert run.flow.cursor() == cursor
    assert run.flow.replay.groups == ()
    assert run.flow.admission.held == 0
    assert totals(run.flow).reasons == {"stale": len(requests)}


def test_a_group_of_which_every_rollout_vanished_is_asked_for_again(life):
    run = life()
    requests = started(run.flow)
    run.feed(two_turns(requests[0])[0])
    run.flush()
    run.restart()  # the work queue is empty, and there is one call in the stream
    assert sorted(request.rollout_id for request in started(run.flow)) == [f"{r.rollout_id}-1" for r in requests]
    assert run.flow.admission.held == 12


def test_what_a_lost_checkpoint_had_trained_is_run_again_where_its_records_are_no_longer_kept(life):
    run = life()
    everything(run)
    cursor = run.flow.cursor()
    run.train()
    run.commit()
    run.stream[:6] = [garbage("r-999999-0")] * 6  # the records of group 0, which are purged
    run.restart(Hello(version=9, updates=0, cursor=cursor))
    assert sorted(request.rollout_id for request in started(run.flow)) == ["r-000000-0-1", "r-000000-1-1"]
    assert [group.group_id for group in run.flow.replay.groups] == [f"g-{number:06d}" for number in range(1, 6)]
    assert totals(run.flow).reasons == {"lost": 2}


def test_a_group_of_which_nothing_is_known_but_a_call_does_not_hold_the_cursor_for_ever(life):
    run = life()
    requests = started(run.flow)
    run.feed(two_turns(requests[0])[0])  # and the ledger was never written
    run.restart()
    assert totals(run.flow).dropped == {"lost_attempt": 2}
    assert run.flow.cursor() == StreamCursor(sequence=2)


def test_a_batch_that_a_checkpoint_holds_is_not_claimed_and_stays_in_the_file(life):
    run = life()
    everything(run)
    run.train()
    run.commit()
    run.train()
    stored = run.file.read()
    at = restart.anchor(AskCursor(), stored)
    assert (at.checkpoint, at.updates) == (1, 2)
    assert [batch.updates for batch in stored.batches] == [1, 2]
    assert [batch.updates for batch in restart.claims(stored, at)] == [2]
    run.restart()
    assert [batch.updates for batch in run.file.read().batches] == [1, 2]
    assert [batch.digest for batch in run.file.read().batches] == [batch.digest for batch in stored.batches]
    assert totals(run.flow).tokens["trained"] == 24


def test_a_group_that_was_trained_once_is_trained_once_more_after_a_restart_and_not_twice(life):
    run = life(replay={"max_reuse": 2})
    everything(run)
    run.train()
    run.commit()  # a checkpoint in which groups 0 and 1 were trained once
    run.train()
    run.restart()
    assert {group.number: group.uses for group in run.flow.replay.groups} == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0}
    assert totals(run.flow).tokens["trained"] == 24
    assert run.flow.ledger.rows["r-000000-0"].updates == [1]
    assert run.flow.ledger.rows["r-000002-0"].updates == [2]
    assert run.flow.admission.held == 4  # of the two groups that were never trained
    for _ in range(4):
        run.train()
    assert run.flow.replay.num_groups == 0
    assert {tuple(row.updates) for row in run.flow.ledger.rows.values()} == {(1, 4), (2, 5), (3, 6)}


def test_a_learner_that_starts_anew_with_the_service_has_trained_what_its_checkpoint_says(life):
    run = life(replay={"max_reuse": 2})
    everything(run)
    run.train()
    cursor = run.flow.cursor()
    run.train()
    run.restart(Hello(version=9, updates=1, cursor=cursor))
    assert {group.number: group.uses for group in run.flow.replay.groups} == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}
    assert [batch.updates for batch in run.file.read().batches] == [1]
    assert totals(run.flow).tokens["trained"] == 12


def test_an_id_that_was_used_is_not_given_out_again_though_the_books_do_not_know_it(life):
    run = life()
    requests = started(run.flow)
    manifest = two_turns(requests[0])[-1]
    run.feed(cut_short(manifest), *two_turns(requests[1]))  # and the ledger was never written
    run.restart(pending=requests)
    assert [request.rollout_id for request in started(run.flow)] == ["r-000000-0-1"]


def test_a_restart_judges_by_the_leaf_caps_that_were_decided(life):
    cap = {"quantile": 0.5, "window_rollouts": 16, "at_least": 1, "at_most": 8}
    run = life(replay={"leaf_cap": cap, "max_reuse": 1}, schedule={"groups_per_step": 6, "group_size": 3})
    requests = started(run.flow)
    for request in requests:
        run.feed(*two_turns(request))
    run.flush()
    caps = {row.rollout_id: row.leaf_cap for row in run.file.read().rows}
    assert sorted(set(caps.values())) == [1, 8]  # the window was full after 16 rollouts
    decided = restart.decided_caps(run.file.read())
    assert decided == caps
    run.restart()
    assert {row.rollout_id: row.leaf_cap for row in run.flow.ledger.rows.values()} == caps
