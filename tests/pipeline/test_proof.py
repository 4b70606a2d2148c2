"""The proof over a ledger written by hand, which is then broken in every way that the law forbids."""

from __future__ import annotations

import json
import sqlite3

import msgspec
import pytest
from pipeline_scripts import configuration

from clawpipe.pipeline import audit as auditing
from clawpipe.pipeline import config as configurations
from clawpipe.pipeline import report
from clawpipe.pipeline.books import (
    BatchRow,
    CallRow,
    Changes,
    RolloutState,
    Row,
    Standing,
    Totals,
    UpdateRow,
    copy_id,
)
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger_file import FORM, LedgerFile, Stored, reading
from clawpipe.pipeline.proof import first_breach

change = msgspec.structs.replace
STRAY = copy_id("r-000000-0.a1.c9", 9)


def row(rollout_id, state, sequence, **fields):
    task = {"task_id": f"filing/{rollout_id[7]}", "harness": "agentloop"}
    graded = {"outcome": "scored", "reward": 0.5} if state in ("queued", "leased", "trained") else {}
    fields = {**task, **graded, **fields}
    group = fields.pop("group_id", f"g-{rollout_id[2:8]}")
    return Row(rollout_id=rollout_id, group_id=group, state=RolloutState(state), last_sequence=sequence, **fields)


def call(rollout_id, number, kept, **dropped):
    return CallRow(
        call_id=f"{rollout_id}.a1.c{number}",
        rollout_id=rollout_id,
        role="main",
        sampled=kept + sum(dropped.values()),
        kept=kept,
        dropped=dropped,
    )


def update(number):
    return UpdateRow(
        updates=number,
        version=0,
        stepped_s=0.0,
        reward_mean=0.5,
        num_rollouts=2,
        num_groups=1,
        num_entries=6,
        staleness_mean=0.0,
        staleness_max=0,
        groups_without_spread=0,
        masked={},
        metrics={},
    )


ROWS = (
    row(
        "r-000000-0", "trained", 3, sampled=4, kept=3, calls=2, dropped={"dead_leaf": 1}, updates=[1], roles={"main": 2}
    ),
    row("r-000000-1", "trained", 6, sampled=3, kept=3, calls=1, set_aside={"stale": 1}, updates=[1], roles={"main": 1}),
    row("r-000001-0", "dropped", 7, outcome="infra", reason="infra", sampled=2, dropped={"infra": 2}, calls=1),
    row("r-000001-1", "queued", 8, sampled=5, kept=5, calls=1),
    row(STRAY, "dropped", 9, task_id="", reason="late", sampled=2, dropped={"late": 2}, calls=1, group_id="r-000000-0"),
    row("r-000002-0", "leased", 10, sampled=1, kept=1, calls=1, set_aside={"single": 1}, reason="single"),
    row("r-000002-1", "in_flight", 0, sampled=2, open=2, calls=1),
    row("r-000003-0", "withdrawn", 0),
)
CALLS = (
    call("r-000000-0", 0, 2),
    call("r-000000-0", 1, 1, dead_leaf=1),
    call("r-000000-1", 0, 3),
    call("r-000001-0", 0, 0, infra=2),
    call("r-000001-1", 0, 5),
    change(call(STRAY, 0, 0, late=2), call_id=STRAY),
    call("r-000002-0", 0, 1),
)
BATCHES = (
    BatchRow(batch_id="b1", version=0, rollouts=("r-000000-0", "r-000000-1"), updates=1),
    BatchRow(batch_id="b2", version=1, rollouts=("r-000002-0",)),
)


def prove(rows=ROWS, calls=CALLS, batches=BATCHES, updates=(1,), *, max_reuse=1, over=False):
    stored = Stored(rows=tuple(rows), batches=tuple(batches), updates=tuple(map(update, updates)), standing=None)
    found = first_breach(stored, calls, max_reuse=max_reuse, over=over)
    return None if found is None else str(found)


def with_row(rollout_id, **fields):
    return [change(each, **fields) if each.rollout_id == rollout_id else each for each in ROWS]


def with_call(call_id, **fields):
    return [change(each, **fields) if each.call_id == call_id else each for each in CALLS]


def test_books_that_balance_break_no_law():
    assert prove() is None


def test_an_empty_ledger_breaks_no_law():
    assert prove((), (), (), ()) is None


BROKEN_ROWS = {
    "tokens vanish": ("r-000001-1", {"sampled": 7}, "it sampled 7 tokens, 5 are accounted for: 2 too few"),
    "tokens appear": ("r-000001-1", {"dropped": {"late": 3}}, "it sampled 5 tokens, 8 are accounted for: 3 too many"),
    "a call is missing": ("r-000000-0", {"calls": 3}, "its calls have 2 calls, its row 3: 1 too few"),
    "kept and dropped are mixed up": (
        "r-000000-0",
        {"kept": 4, "dropped": {}},
        "its calls have 3 kept tokens, its row 4: 1 too few",
    ),
    "another reason": (
        "r-000001-0",
        {"dropped": {"verifier_infra": 2}},
        "its calls have 0 tokens dropped as verifier_infra, its row 2: 2 too few",
    ),
    "a reason that is none": ("r-000001-0", {"dropped": {"tired": 2}}, "dropped as 'tired', which is no reason"),
    "a rollout's reason that is none": ("r-000001-0", {"reason": ""}, "it is dropped as '', which is no reason"),
    "less than nothing": ("r-000001-1", {"open": -1, "kept": 6}, "it has a negative number of tokens: -1"),
    "more set aside than kept": ("r-000000-1", {"set_aside": {"stale": 5}}, "5 tokens are set aside of 3 kept: 2 too"),
    "kept and dropped": (
        "r-000001-1",
        {"state": RolloutState.DROPPED, "reason": "stale", "set_aside": {"stale": 4}},
        "it is dropped, and 1 of its 5 kept tokens have no reason",
    ),
    "open and settled": (
        "r-000001-1",
        {"open": 5, "kept": 0},
        "its calls have 5 sampled tokens, its row 0: 5 too many",
    ),
    "queued and not graded": ("r-000001-1", {"outcome": "", "reward": None}, "it is queued, and its outcome is none"),
    "graded without a reward": ("r-000001-1", {"reward": None}, "its outcome is scored, and its reward None"),
    "an outcome that is none": ("r-000001-0", {"outcome": "bored"}, "its outcome is 'bored', which is none"),
    "in flight and graded": ("r-000002-1", {"outcome": "scored", "reward": 1.0}, "it is in flight, and has scored"),
    "withdrawn and sampled": ("r-000003-0", {"sampled": 1, "open": 1}, "it was withdrawn, and sampled 1 tokens"),
    "trained and in no update": ("r-000000-0", {"updates": []}, "it is trained, and in no update"),
    "dropped and trained": ("r-000001-0", {"updates": [1]}, "it is dropped, and was trained in update 1"),
    "trained twice": ("r-000000-0", {"updates": [1, 2]}, "it was trained 2 times, 1 more than max_reuse"),
    "an unknown update": ("r-000000-0", {"updates": [7]}, "it was trained in update 7, of which the ledger has no row"),
    "the same update twice": ("r-000000-0", {"updates": [1, 1]}, "its updates [1, 1] are not each later"),
    "queued and leased": (
        "r-000002-0",
        {"state": RolloutState.QUEUED},
        "it is queued, and in 1 batch that the learner holds",
    ),
    "leased by nobody": (
        "r-000001-1",
        {"state": RolloutState.LEASED},
        "it is leased, and in 0 batches that the learner holds",
    ),
    "a group of two tasks": (
        "r-000000-1",
        {"task_id": "filing/8"},
        "it is of filing/8/agentloop, and r-000000-0 of its group g-000000 of filing/0/agentloop",
    ),
    "a group of two harnesses": ("r-000000-1", {"harness": "openclaw"}, "it is of filing/0/openclaw"),
    "usable and of no task": ("r-000001-1", {"task_id": ""}, "it is usable, and of no task"),
}


@pytest.mark.parametrize("how", BROKEN_ROWS)
def test_a_row_that_breaks_the_law_is_named(how):
    rollout_id, fields, what = BROKEN_ROWS[how]
    found = prove(with_row(rollout_id, **fields))
    assert found is not None
    assert found.startswith(f"rollout {rollout_id}: ")
    assert what in found


def test_a_call_whose_tokens_do_not_add_up_is_named():
    found = prove(calls=with_call("r-000000-0.a1.c1", sampled=5))
    assert found == ("rollout r-000000-0: call r-000000-0.a1.c1 sampled 5 tokens, 2 are accounted for: 3 too few")


def test_a_rollout_in_a_batch_of_an_update_that_it_does_not_know_is_named():
    batches = [*BATCHES, BatchRow(batch_id="b3", version=1, rollouts=("r-000000-1",), updates=2)]
    found = prove(batches=batches, updates=(1, 2))
    assert found == "rollout r-000000-1: its row says update 1, and it is in the batches of updates 1, 2"


def test_a_rollout_may_be_trained_as_often_as_max_reuse_says():
    rows = with_row("r-000000-0", updates=[1, 2])
    batches = [*BATCHES, BatchRow(batch_id="b3", version=1, rollouts=("r-000000-0",), updates=2)]
    assert prove(rows, batches=batches, updates=(1, 2), max_reuse=2) is None
    found = prove(rows, batches=batches, updates=(1, 2), max_reuse=1)
    assert found == "rollout r-000000-0: it was trained 2 times, 1 more than max_reuse"


def test_what_is_in_flight_when_the_run_is_over_breaks_the_law():
    assert prove(over=True) == "rollout r-000002-1: it is in flight, and the run is over"


def test_a_call_or_a_batch_of_a_rollout_without_a_row_breaks_the_law():
    found = prove(calls=[*CALLS, call("r-000009-0", 0, 4)])
    assert found == "rollout r-000009-0: it has no row, and 1 call of 4 tokens"
    found = prove(batches=[*BATCHES, BatchRow(batch_id="b3", version=1, rollouts=("r-000008-0",), updates=1)])
    assert found == "rollout r-000008-0: it has no row, and batch b3"


def test_of_several_breaches_the_rollout_that_settled_first_is_named():
    broken = {"r-000001-1", "r-000000-1", "r-000002-1"}
    rows = [change(each, sampled=99) if each.rollout_id in broken else each for each in ROWS]
    assert prove(reversed(rows)).startswith("rollout r-000000-1: it sampled 99 tokens")


# The file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path):
    file = LedgerFile(tmp_path / "ledger.sqlite")
    file.write(
        Changes(
            rows=ROWS,
            removed_rows=(),
            calls=CALLS,
            batches=BATCHES,
            removed_batches=(),
            updates=(update(1),),
            removed_updates_above=None,
            standing=Standing(),
        )
    )
    file.close()
    (tmp_path / "config.json").write_bytes(configurations.dump(configuration()))
    return tmp_path


def counts():
    harnesses = {}
    for each in ROWS:
        harnesses.setdefault(each.harness, Totals()).add(each)
    return report.counts(harnesses, [update(1)])


def test_the_audit_of_a_file_counts_rollouts_calls_and_tokens(run_dir):
    found = auditing.audit(run_dir, goes_on=False)
    assert found.wrong is None
    account = found.accounts["agentloop"]
    assert account == found.accounts[""]
    assert account.rollouts == {
        "trained": 2, "dropped: infra": 1, "queued": 1, "leased": 1, "in_flight": 1, "withdrawn": 1,
    }  # fmt: skip
    assert account.calls == {"main": 3}
    assert account.tokens == {
        "sampled": 19, "trained": 5, "queued": 5, "in_flight": 2,
        "dropped: dead_leaf": 1, "dropped: stale": 1, "dropped: infra": 2, "dropped: late": 2, "dropped: single": 1,
    }  # fmt: skip
    assert auditing.lines(found)[-1] == "the books balance"
    assert json.loads(auditing.as_json(found))["accounts"][""]["tokens"]["trained"] == 5


def test_the_audit_of_a_broken_file_says_who_broke_it(run_dir):
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        db.execute("UPDATE calls SET kept = 1 WHERE call_id = 'r-000000-0.a1.c0'")
    db.close()
    found = auditing.audit(run_dir, goes_on=False)
    assert found.rollout == "r-000000-0"
    assert auditing.lines(found)[-1] == (
        "rollout r-000000-0: call r-000000-0.a1.c0 sampled 2 tokens, 1 are accounted for: 1 too few"
    )


def test_a_summary_that_says_otherwise_than_the_rows_is_said(run_dir):
    path = run_dir / "summary.json"
    path.write_text(json.dumps(counts()))
    assert auditing.audit(run_dir, goes_on=False).wrong is None
    path.write_text(json.dumps({**counts(), "calls": 11}))
    found = auditing.audit(run_dir, goes_on=False)
    assert found.wrong == "summary.json: calls is 11, by the ledger's rows it is 8: off by +3"
    assert found.rollout is None
    # A service that the launcher had to start anew has left one: it is older than the ledger.
    assert auditing.audit(run_dir, goes_on=True).wrong is None


def test_the_ledger_of_a_run_that_writes_on_is_read_as_of_one_moment(run_dir):
    writing = LedgerFile(run_dir / "ledger.sqlite")
    with reading(run_dir / "ledger.sqlite") as ledger:
        before = ledger.read()
        writing.write(
            Changes(
                rows=(change(ROWS[-1], state=RolloutState.IN_FLIGHT),),
                removed_rows=("r-000000-0",),
                calls=(),
                batches=(),
                removed_batches=("b2",),
                updates=(),
                removed_updates_above=0,
                standing=None,
            )
        )
        assert ledger.read() == before
        assert [each.call_id for each in ledger.calls("r-000000-0")] == ["r-000000-0.a1.c0", "r-000000-0.a1.c1"]
    assert auditing.audit(run_dir, goes_on=True).rollout == "r-000000-1"
    writing.close()


def test_reading_a_ledger_changes_nothing_in_it(run_dir):
    before = (run_dir / "ledger.sqlite").read_bytes()
    auditing.audit(run_dir, goes_on=False)
    assert (run_dir / "ledger.sqlite").read_bytes() == before


def test_a_ledger_of_another_version_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rollouts (rollout_id TEXT PRIMARY KEY, row BLOB)")
    db.close()
    with pytest.raises(ClawpipeError, match=rf"another version of clawpipe \(form 0, this one reads form {FORM}\)"):
        LedgerFile(path)
    with pytest.raises(ClawpipeError, match="use the version that wrote it"), reading(path):
        pass
