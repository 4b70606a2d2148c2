from __future__ import annotations

import contextlib
import sqlite3

import msgspec
import pytest
from pipeline_scripts import Script, configuration, two_turns

from clawpipe.pipeline.books import BatchRow, RolloutState, Standing, UpdateRow
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile, reading
from clawpipe.pipeline.records import PushReport, Role, RolloutRequest, StreamCursor, TimedOut
from clawpipe.pipeline.report import status, summary
from clawpipe.pipeline.segments import DropReason


def request(place, number=0, harness="agentloop"):
    return RolloutRequest(
        rollout_id=f"r-{number:06d}-{place}", group_id=f"g-{number:06d}", task_id="filing/0", harness=harness
    )


def update(number, *, version=0, reward=0.5, entries=6, masked=None, metrics=None, at=0.0, mean=0.0, most=0):
    return UpdateRow(
        updates=number,
        version=version,
        stepped_s=at,
        reward_mean=reward,
        num_rollouts=2,
        num_groups=1,
        num_entries=entries,
        staleness_mean=mean,
        staleness_max=most,
        groups_without_spread=0,
        masked=masked or {},
        metrics=metrics or {},
    )


def settle(ledger, place, number=0, *, reason=None, outcome=None, aborted=0, harness="agentloop"):
    """A rollout of two calls and three sampled tokens runs from its request to its end."""
    asked = request(place, number, harness)
    ledger.requested(asked)
    script = Script(asked.rollout_id, harness=harness)
    for call in two_turns(asked)[:-1]:
        ledger.sampled(call, asked.group_id)
        script.records.append(call)
    ledger.settled(script.closed(outcome, aborted=aborted), asked.group_id, reason, last_sequence=3)
    return asked.rollout_id


def train(ledger, rollouts, number, *, set_aside=None, waiting=(), **fields):
    ledger.leased(BatchRow(batch_id=f"b{number}", version=0, rollouts=tuple(rollouts)), set_aside or {})
    ledger.stepped(f"b{number}", update(number, **fields), waiting)


def tokens(ledger):
    return summary(ledger, [], 0.0)["tokens"]


def test_tokens_go_from_flight_to_the_queue_to_the_lease_to_training():
    ledger = Ledger()
    ledger.requested(request(0))
    script = Script("r-000000-0")
    ledger.sampled(script.call([1], [2, 3]), "g-000000")
    assert tokens(ledger)["in_flight"] == 2
    ledger.settled(script.closed(), "g-000000", None, 2)
    assert tokens(ledger)["queued"] == 2
    ledger.leased(BatchRow(batch_id="b1", version=0, rollouts=("r-000000-0",)), {})
    assert tokens(ledger)["leased"] == 2
    ledger.stepped("b1", update(1))
    assert tokens(ledger) == {"sampled": 2, "trained": 2, "dropped": {}, "in_flight": 0, "queued": 0, "leased": 0}


def test_what_a_lost_step_trained_is_queued_again_and_its_update_never_happened():
    ledger = Ledger()
    first = settle(ledger, 0)
    train(ledger, [first], 1, set_aside={first: {DropReason.ZERO_SPREAD: 3}})
    assert tokens(ledger)["dropped"] == {"zero_spread": 3}
    ledger.requeued("b1")
    ledger.rewound(0)
    assert tokens(ledger)["queued"] == 3
    assert tokens(ledger)["dropped"] == {}
    assert ledger.updates == {}
    assert ledger.rows[first].updates == []


def test_a_rollout_that_is_queued_cannot_be_trained_without_a_lease():
    ledger = Ledger()
    first = settle(ledger, 0)
    ledger.batches["b1"] = BatchRow(batch_id="b1", version=0, rollouts=(first,))
    with pytest.raises(AssertionError, match="r-000000-0 is queued, and trained"):
        ledger.stepped("b1", update(1))


def test_a_call_that_came_and_is_in_no_fate_breaks_the_law():
    ledger = Ledger()
    ledger.requested(request(0))
    script = Script("r-000000-0")
    ledger.sampled(script.call([1], [2, 3]), "g-000000")
    ledger.settled(Script("r-000000-0").closed(), "g-000000", None, 2)
    with pytest.raises(AssertionError, match="rollout r-000000-0: 2 tokens sampled, 0 accounted for"):
        ledger.check({"r-000000-0": (RolloutState.QUEUED, 0)})


def test_finished_rollouts_leave_the_memory_and_stay_in_the_sums():
    ledger = Ledger()
    ids = [settle(ledger, place) for place in range(2)]
    train(ledger, ids, 1)
    before = summary(ledger, [], 0.0)
    ledger.committed(["b1"])
    assert sorted(ledger.finish(updates=1)) == ids
    assert ledger.rows == {}
    assert summary(ledger, [], 0.0) == before


def test_what_no_checkpoint_holds_stays_in_memory():
    ledger = Ledger()
    train(ledger, [settle(ledger, 0)], 2)
    settle(ledger, 1)
    assert ledger.finish(updates=1) == []


def test_the_summary_is_what_the_rollouts_measured():
    ledger = Ledger()
    ids = [settle(ledger, 0), settle(ledger, 1, outcome=TimedOut(reward=0.25), aborted=2)]
    other = settle(ledger, 0, 1, harness="x", reason=DropReason.OVER_BRANCHED)
    title = Script(other).call([1], [2, 3, 4, 5], role=Role.TITLE)
    title = msgspec.structs.replace(title, harness="x", graft_broken="foreign", malformed_tool_call=True)
    ledger.stray(title, "g-000001", DropReason.LATE, sequence=9)
    train(
        ledger,
        ids,
        1,
        set_aside={ids[0]: {DropReason.STALE: 1}},
        mean=1.0,
        most=2,
        reward=0.125,
        metrics={"train_s": 2.0, "wait_s": 1.0},
    )
    train(ledger, [settle(ledger, 0, 2)], 2, entries=3, mean=2.0, most=2, reward=0.5, at=4.0)
    pushes = [PushReport(engine="e", version=v, pause_s=s, applied_s=0.0) for v, s in [(0, 0.1), (1, 0.3), (1, 0.5)]]
    found = summary(ledger, pushes, 60.0)
    assert found["updates"] == 2
    assert found["reward"] == {"first": 0.3125, "last": 0.3125, "per_update": [0.125, 0.5]}
    assert found["rollouts"] == {"settled": 4, "scored": 3, "timed_out": 1, "agent_failed": 0, "infra": 0, "lost": 0}
    assert (found["calls"], found["calls_aborted"]) == (9, 2)
    assert found["tokens"] == {
        "sampled": 16,
        "trained": 8,
        "dropped": {"late": 4, "over_branched": 3, "stale": 1},
        "in_flight": 0,
        "queued": 0,
        "leased": 0,
    }
    assert (found["versions_pushed"], found["push_pause_s"]["p50"]) == (2, 0.3)
    assert found["push_pause_s"]["p99"] == pytest.approx(0.496)
    assert found["staleness"] == {"mean": pytest.approx((6 * 1.0 + 3 * 2.0) / 9), "max": 2}
    assert found["harness"]["x"] == {
        "rollouts": 1,
        "outcomes": {"scored": 1},
        "calls": 3,
        "calls_aborted": 0,
        "roles": {"main": 2, "title": 1},
        "malformed_tool_calls": 1,
        "broken_grafts": {"foreign": 1},
        "prefix_reuse": 5 / 10,  # the second call's prompt begins with the 5 tokens of the first, prompts of 3, 6, 1
        "tokens": {"sampled": 7, "trained": 0, "dropped": {"late": 4, "over_branched": 3}},
        "reward_mean": 0.0,
        "per_update": {"rollouts": [0, 0], "reward": [None, None]},
    }
    assert found["harness"]["agentloop"]["reward_mean"] == pytest.approx((0.0 + 0.25 + 0.0) / 3)
    assert found["time"]["rollout_s"] == 8.0
    assert found["time"]["learner_train_s"] == 2.0
    assert found["time"]["update_wall_s"] == [4.0]


def test_tokens_that_the_learner_left_out_are_not_trained():
    ledger = Ledger()
    train(ledger, [settle(ledger, 0)], 1, entries=3)
    ledger.updates[1] = update(1, masked={"nonfinite_gradient": 3})
    assert tokens(ledger)["trained"] == 0
    assert tokens(ledger)["dropped"] == {"nonfinite_gradient": 3}


def test_the_status_says_how_much_time_is_left():
    ledger = Ledger()
    for number in (1, 2, 3):
        train(ledger, [settle(ledger, 0, number)], number, at=10.0 * number)
    found = status(ledger, phase="running", updates_total=10, held={})
    assert found["updates"] == 3
    assert found["left_s"] == pytest.approx(70.0)


def test_an_empty_run_has_a_summary():
    found = summary(Ledger(), [], 1.0)
    assert found["reward"] == {"first": None, "last": None, "per_update": []}
    assert found["push_pause_s"] == {"p50": None, "p99": None}
    assert found["staleness"] == {"mean": 0.0, "max": 0}


def test_the_file_gives_back_what_was_written_and_nothing_of_what_was_discarded(tmp_path):
    ledger, path = Ledger(), tmp_path / "ledger.sqlite"
    file = LedgerFile(path)
    assert file.read().empty
    ids = [settle(ledger, place) for place in range(3)]
    train(ledger, ids[:2], 1)
    ledger.stands(Standing(cursor=StreamCursor(sequence=7, done=("x",)), updates=1, written=True))
    file.write(ledger.changes())
    file.close()
    stored = LedgerFile(path).read()
    assert {row.rollout_id: row.state for row in stored.rows} == {
        ids[0]: RolloutState.TRAINED,
        ids[1]: RolloutState.TRAINED,
        ids[2]: RolloutState.QUEUED,
    }
    assert stored.rows[0] == ledger.rows[ids[0]]
    assert stored.batches == (BatchRow(batch_id="b1", version=0, rollouts=tuple(ids[:2]), updates=1),)
    assert stored.updates == (update(1),)
    assert stored.standing == Standing(cursor=StreamCursor(sequence=7, done=("x",)), updates=1, written=True)
    again = Ledger()
    again.restore(stored.rows[:2], (), stored.updates)
    again.discard([ids[2]], ["b1"])
    file = LedgerFile(path)
    file.write(again.changes())
    assert {row.rollout_id for row in file.read().rows} == set(ids[:2])
    assert file.read().batches == ()
    assert summary(again, [], 0.0)["tokens"]["trained"] == 6
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM calls").fetchone() == (4,)


def test_writing_twice_is_writing_once(tmp_path):
    ledger = Ledger()
    train(ledger, [settle(ledger, 0)], 1)
    changes = ledger.changes()
    file = LedgerFile(tmp_path / "ledger.sqlite")
    file.write(changes)
    before = file.read()
    file.write(changes)
    assert file.read() == before
    assert ledger.changes().rows == ()


def test_tokens_that_were_trained_stay_trained_while_their_rollout_waits_to_be_trained_again():
    ledger = Ledger()
    first = settle(ledger, 0)
    train(ledger, [first], 1, set_aside={first: {DropReason.STALE: 1}}, waiting=[first])
    assert ledger.rows[first].state is RolloutState.QUEUED
    assert tokens(ledger) == {
        "sampled": 3, "trained": 2, "dropped": {"stale": 1}, "in_flight": 0, "queued": 0, "leased": 0,
    }  # fmt: skip
    # More of it is too old at the second training; what the first one trained stays trained.
    train(ledger, [first], 2, set_aside={first: {DropReason.STALE: 2}})
    assert ledger.rows[first].updates == [1, 2]
    assert tokens(ledger)["trained"] == 2
    ledger.requeued("b2")
    assert (ledger.rows[first].updates, tokens(ledger)["trained"]) == ([1], 2)
    ledger.requeued("b1")
    assert (ledger.rows[first].updates, tokens(ledger)["queued"]) == ([], 3)


def test_a_rollout_that_was_trained_and_leaves_the_queue_ends_as_trained():
    ledger = Ledger()
    first, other = settle(ledger, 0), settle(ledger, 1)
    train(ledger, [first], 1, waiting=[first])
    ledger.dropped(first, DropReason.STALE)
    ledger.dropped(other, DropReason.STALE)
    assert ledger.rows[first].state is RolloutState.TRAINED
    assert tokens(ledger)["dropped"] == {"stale": 3}
    assert ledger.finish(updates=1) == [first, other]


def test_what_is_refused_keeps_the_reason_of_the_tokens_that_were_set_aside_before():
    ledger = Ledger()
    ids = [settle(ledger, place) for place in range(2)]
    aside = {ids[0]: {DropReason.ZERO_SPREAD: 3}, ids[1]: {DropReason.STALE: 1}}
    ledger.leased(BatchRow(batch_id="b1", version=0, rollouts=tuple(ids)), aside)
    ledger.refused("b1", DropReason.REFUSED)
    assert [ledger.rows[key].reason for key in ids] == ["zero_spread", "refused"]
    assert tokens(ledger)["dropped"] == {"refused": 2, "stale": 1, "zero_spread": 3}


def test_a_call_of_a_rollout_that_left_the_memory_has_a_row_and_a_name_of_its_own(tmp_path):
    ledger = Ledger()
    first = settle(ledger, 0)
    train(ledger, [first], 1)
    ledger.committed(["b1"])
    ledger.finish(updates=1)
    late = Script(first, attempt=2).call([1], [2, 3, 4, 5])
    ledger.stray(late, "g-000000", DropReason.LATE, sequence=12)
    file = LedgerFile(tmp_path / "ledger.sqlite")
    file.write(ledger.changes())
    rows = {row.rollout_id: row for row in file.read().rows}
    name = f"{first}.a2.c0@12"
    assert (rows[first].sampled, rows[name].sampled, rows[name].group_id) == (3, 4, first)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        found = dict(db.execute("SELECT rollout_id, sum(sampled) FROM calls GROUP BY rollout_id"))
    assert found == {first: 3, name: 4}
    again = Ledger()
    again.restore(file.read().rows, (), file.read().updates)
    assert tokens(again) == tokens(ledger)
    assert (again.totals()["agentloop"].reasons, again.totals()["agentloop"].ends["trained"].rollouts) == ({}, 1)


def test_a_batch_stays_in_the_file_when_a_checkpoint_holds_it(tmp_path):
    ledger, file = Ledger(), LedgerFile(tmp_path / "ledger.sqlite")
    train(ledger, [settle(ledger, 0)], 1)
    ledger.committed(["b1"])
    assert ledger.batches == {}
    ledger.leased(BatchRow(batch_id="b2", version=0, rollouts=(settle(ledger, 1),), digest="d"), {})
    ledger.requeued("b2")
    file.write(ledger.changes())
    assert [(batch.batch_id, batch.updates) for batch in file.read().batches] == [("b1", 1)]


def test_a_row_that_is_made_anew_has_no_calls_of_the_one_before(tmp_path):
    ledger, file = Ledger(), LedgerFile(tmp_path / "ledger.sqlite")
    first = settle(ledger, 0)
    file.write(ledger.changes())
    again = Ledger()
    again.discard([first], [])
    again.requested(request(0))
    file.write(again.changes())
    assert [row.state for row in file.read().rows] == [RolloutState.IN_FLIGHT]
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("SELECT count(*) FROM calls").fetchone() == (0,)


def test_a_request_that_was_taken_back_and_is_in_the_queue_after_all_is_in_flight():
    ledger = Ledger()
    ledger.requested(request(0))
    ledger.withdrawn("r-000000-0", "g-000000")
    assert ledger.in_flight == ()
    ledger.requested(request(0))
    assert ledger.in_flight == ("r-000000-0",)


def test_the_leaves_and_the_tree_of_a_rollout_are_booked():
    ledger = Ledger()
    first = settle(ledger, 0)
    row = ledger.rows[first]
    assert (row.num_leaves, row.leaf_cap) == (1, 16)
    script = Script(first)
    script.records += two_turns(request(0))[:-1]
    assert row.tree == script.closed().tree_digest != ""


def test_a_file_that_is_no_ledger_is_an_error_that_says_what_to_do(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(ClawpipeError, match=r"ledger.sqlite: .* damaged, move it away"):
        LedgerFile(path)


@pytest.mark.parametrize(
    "change", ["sampled = 'abc'", "kept = NULL", "dropped = NULL", "dropped = '[]'", "role = x'ff'"]
)
def test_a_call_that_is_none_is_an_error_that_says_so(tmp_path, change):
    ledger, path = Ledger(), tmp_path / "ledger.sqlite"
    settle(ledger, 0)
    with contextlib.closing(LedgerFile(path)) as file:
        file.write(ledger.changes())
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE calls SET {change}")
    with pytest.raises(ClawpipeError, match=r"ledger.sqlite: not a ledger that can be read"), reading(path) as stored:
        list(stored.calls())


def test_the_scripts_configuration_is_valid():
    assert configuration(run={"updates": 9}).run.updates == 9
