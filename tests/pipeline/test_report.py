"""What was trained against what was dropped, by hand-computed numbers."""

from __future__ import annotations

import msgspec
import pytest

from clawpipe.pipeline.audit import Audit, accounts
from clawpipe.pipeline.audit import lines as audit_lines
from clawpipe.pipeline.books import RolloutState, Row, Totals
from clawpipe.pipeline.report import counts, summed
from clawpipe.pipeline.survivors import Measure, means, survivors

TRAINED = [(10, 1, 2.0, 0.0), (20, 2, 4.0, 1.0), (60, 6, 6.0, 0.5)]  # sampled tokens, calls, seconds, reward
STALE = [(90, 3, 8.0, 1.0), (30, 3, 4.0, 1.0)]


def rollout(number, ended, *, state, harness="openclaw", reason="", **fields):
    sampled, calls, seconds, reward = ended
    return Row(
        rollout_id=f"r-{number:06d}-0",
        group_id=f"g-{number:06d}",
        harness=harness,
        state=state,
        reason=reason,
        outcome="scored",
        reward=reward,
        started_s=100.0,
        ended_s=100.0 + seconds,
        calls=calls,
        sampled=sampled,
        **fields,
    )


def ended_rows():
    trained = [rollout(n, e, state=RolloutState.TRAINED, kept=e[0]) for n, e in enumerate(TRAINED)]
    stale = [
        rollout(10 + n, e, state=RolloutState.DROPPED, reason="stale", kept=e[0], set_aside={"stale": e[0]})
        for n, e in enumerate(STALE)
    ]
    level = rollout(
        20,
        (15, 1, 5.0, 1.0),
        state=RolloutState.TRAINED,
        harness="agentloop",
        kept=14,
        set_aside={"zero_spread": 14},
        dropped={"cut": 1},
    )
    lost = Row(
        rollout_id="r-000030-0",
        group_id="g-000030",
        harness="agentloop",
        state=RolloutState.DROPPED,
        reason="lost",
        calls=2,
        sampled=5,
        dropped={"lost": 5},
    )
    waiting = rollout(40, (1000, 50, 90.0, 1.0), state=RolloutState.QUEUED, kept=1000)
    return [*trained, *stale, level, lost, waiting]


def test_survivors_are_measured_by_harness_and_reason():
    found = {(each.harness, each.end): each for each in survivors(ended_rows())}
    assert list(found) == [
        ("", "trained"), ("", "dropped"), ("", "lost"), ("", "stale"), ("", "zero_spread"),
        ("agentloop", "trained"), ("agentloop", "dropped"), ("agentloop", "lost"), ("agentloop", "zero_spread"),
        ("openclaw", "trained"), ("openclaw", "dropped"), ("openclaw", "stale"),
    ]  # fmt: skip
    assert [each.rollouts for each in found.values()] == [3, 4, 1, 2, 1, 0, 2, 1, 1, 3, 2, 2]
    trained, stale = found["openclaw", "trained"].measures, found["openclaw", "stale"].measures
    # 90% between the second and the third of three: 20 + 0.8 * 40.
    assert trained["sampled"] == Measure(count=3, mean=30.0, median=20.0, p90=pytest.approx(52.0), ratio=1.0)
    assert stale["sampled"] == Measure(count=2, mean=60.0, median=60.0, p90=pytest.approx(84.0), ratio=2.0)
    assert stale["calls"] == Measure(count=2, mean=3.0, median=3.0, p90=3.0, ratio=1.0)
    assert stale["wall_s"] == Measure(count=2, mean=6.0, median=6.0, p90=pytest.approx(7.6), ratio=1.5)
    assert stale["reward"] == Measure(count=2, mean=1.0, median=1.0, p90=1.0, ratio=2.0)


def test_what_was_never_measured_is_in_no_mean():
    found = {(each.harness, each.end): each for each in survivors(ended_rows())}
    dropped = found["", "dropped"].measures
    assert dropped["sampled"].mean == (90 + 30 + 15 + 5) / 4
    assert (dropped["reward"].count, dropped["reward"].mean) == (3, 1.0)
    nothing = Measure(count=0, mean=None, median=None, p90=None, ratio=None)
    assert found["agentloop", "lost"].measures["wall_s"] == nothing
    assert found["agentloop", "trained"].measures["reward"] == nothing
    assert found["agentloop", "zero_spread"].measures["sampled"].ratio is None


def test_the_summary_has_the_means_of_the_same_rollouts():
    by_harness = {}
    for row in ended_rows():
        by_harness.setdefault(row.harness, Totals()).add(row)
    found = means(summed(by_harness.values()).ends)
    assert found == {
        "lost": {"rollouts": 1, "sampled": 5.0, "calls": 2.0, "wall_s": None, "reward": None},
        "stale": {"rollouts": 2, "sampled": 60.0, "calls": 3.0, "wall_s": 6.0, "reward": 1.0},
        "trained": {"rollouts": 3, "sampled": 30.0, "calls": 3.0, "wall_s": 4.0, "reward": 0.5},
        "zero_spread": {"rollouts": 1, "sampled": 15.0, "calls": 1.0, "wall_s": 5.0, "reward": 1.0},
    }
    for each in survivors(ended_rows()):
        if each.harness == "" and each.end in found:
            assert {name: each.measures[name].mean for name in ("sampled", "calls", "wall_s", "reward")} == {
                name: found[each.end][name] for name in ("sampled", "calls", "wall_s", "reward")
            }


def test_adding_sums_up_leaves_their_parts_as_they_were():
    row = rollout(0, TRAINED[0], state=RolloutState.TRAINED, kept=10)
    parts = [Totals(), Totals()]
    for part in parts:
        part.add(row)
    assert summed(parts).ends["trained"].sampled == 20
    assert [part.ends["trained"].sampled for part in parts] == [10, 10]


def test_tokens_that_are_set_aside_are_dropped_and_not_trained():
    totals = Totals()
    for row in ended_rows():
        totals.add(row)
    tokens = counts({"": totals}, [])["tokens"]
    assert tokens == {
        "sampled": 90 + 120 + 15 + 5 + 1000,
        "trained": 90,
        "dropped": {"cut": 1, "lost": 5, "stale": 120, "zero_spread": 14},
        "in_flight": 0,
        "queued": 1000,
        "leased": 0,
    }


def test_the_ledger_table_has_a_column_for_each_harness():
    rows = ended_rows()
    audited = Audit(
        run_dir="runs/x",
        goes_on=True,
        accounts=accounts(rows),
        survivors=survivors(rows[:5]),
        wrong=None,
        rollout=None,
    )
    found = audit_lines(audited)
    assert found[:20] == [
        "runs/x: 8 rollouts, 0 calls, 1230 tokens sampled",
        "",
        "rollouts             all  agentloop  openclaw",
        "queued                 1          0         1",
        "trained                3          0         3",
        "dropped: lost          1          1         0",
        "dropped: stale         2          0         2",
        "unused: zero_spread    1          1         0",
        "",
        "calls  all  agentloop  openclaw",
        "",
        "tokens                 all  agentloop  openclaw",
        "queued                1000          0      1000",
        "sampled               1230         20      1210",
        "trained                 90          0        90",
        "dropped: cut             1          1         0",
        "dropped: lost            5          5         0",
        "dropped: stale         120          0       120",
        "dropped: zero_spread    14         14         0",
        "",
    ]
    dropped = "2 60 / 60 / 84 (x2.00) 3 / 3 / 3 (x1.00) 6 / 6 / 7.6 (x1.50) 1 / 1 / 1 (x2.00)"
    assert [" ".join(line.split()) for line in found[21:25]] == [
        "harness ended rollouts tokens calls seconds reward",
        "all trained 3 30 / 20 / 52 (x1.00) 3 / 2 / 5.2 (x1.00) 4 / 4 / 5.6 (x1.00) 0.5 / 0.5 / 0.9 (x1.00)",
        f"all dropped {dropped}",
        f"all stale {dropped}",
    ]
    assert len({len(line) for line in found[21:28]}) == 1
    assert found[-1] == "the books balance so far: the run goes on"
    assert msgspec.to_builtins(audited)["survivors"][1]["measures"]["sampled"]["ratio"] == 2.0
