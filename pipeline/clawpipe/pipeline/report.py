"""What a run measured, from its books: the summary at its end, and the status while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from clawpipe.pipeline import survivors
from clawpipe.pipeline.books import RolloutState, Sums, Totals, UpdateRow
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.records import LEARNER_SECONDS, PushReport
from clawpipe.pipeline.segments import DropReason

GRADED = ("scored", "timed_out", "agent_failed")
UNGRADED = ("infra", "verifier_infra")
EDGE_UPDATES = 3  # the first and the last reward are means over so many updates

_SUMMED = (
    "calls", "prompt_tokens", "reused_tokens", "malformed", "num_aborted", "reward_sum", "num_graded", "run_s",
)  # fmt: skip


def summary(ledger: Ledger, pushes: Sequence[PushReport], wall_s: float) -> dict[str, Any]:
    """The summary of a run as --summary writes it, and under "time" where the seconds went.

    `wall_s`: how long this process has run the pipeline. Rewards are means over the rollouts of an update;
    `lost` are rollouts of which no manifest ever came.
    """
    harnesses = ledger.totals()
    total = summed(harnesses.values())
    updates = [ledger.updates[number] for number in sorted(ledger.updates)]
    return {
        **counts(harnesses, updates),
        "reward": _rewards(updates),
        "versions_pushed": len({report.version for report in pushes}),
        "push_pause_s": _percentiles([report.pause_s for report in pushes]),
        "staleness": _staleness(updates),
        "survivors": survivors.means(total.ends),
        "harness": {name: _harness(name, totals, updates) for name, totals in sorted(harnesses.items())},
        "time": _time(total, updates, wall_s),
    }


def counts(harnesses: Mapping[str, Totals], updates: Sequence[UpdateRow]) -> dict[str, Any]:
    """The counts of the summary that follow from the rows of the books alone.

    Tokens that the learner left out of an update, other than stale ones, are known by update only: with max_reuse
    over 1 they count as dropped, also if another update trained them.
    """
    total = summed(harnesses.values())
    return {
        "updates": updates[-1].updates if updates else 0,
        "rollouts": _rollouts(total),
        "calls": total.calls,
        "calls_aborted": total.num_aborted,
        "tokens": _tokens(total, updates),
    }


def status(ledger: Ledger, *, phase: str, updates_total: int, held: Mapping[str, int]) -> dict[str, Any]:
    """What `clawpipe status` shows. `held`: counts of what is where just now."""
    total = summed(ledger.totals().values())
    updates = [ledger.updates[number] for number in sorted(ledger.updates)]
    return {
        "phase": phase,
        "updates": updates[-1].updates if updates else 0,
        "updates_total": updates_total,
        "reward": {"per_update": _rewards(updates)["per_update"]},
        "rollouts": _rollouts(total),
        "held": dict(held),
        "tokens": _tokens(total, updates),
        "staleness": _staleness(updates[-1:]) if updates else None,
        "left_s": _left_s(updates, updates_total),
    }


def summed(parts: Iterable[Totals]) -> Totals:
    """The sum of several totals."""
    found = Totals()
    for part in parts:
        for name in ("outcomes", "reasons", "roles", "broken", "tokens", "dropped"):
            getattr(found, name).update(getattr(part, name))
        for end, sums in part.ends.items():
            found.ends[end] = _both(found.ends.get(end, Sums()), sums)
        for name in _SUMMED:
            setattr(found, name, getattr(found, name) + getattr(part, name))
    return found


def _both(a: Sums, b: Sums) -> Sums:
    return Sums(**{name: getattr(a, name) + getattr(b, name) for name in Sums.__struct_fields__})


def _rewards(updates: Sequence[UpdateRow]) -> dict[str, Any]:
    rewards = [row.reward_mean for row in updates]
    return {
        "first": _mean(rewards[:EDGE_UPDATES]),
        "last": _mean(rewards[-EDGE_UPDATES:]),
        "per_update": rewards,
    }


def _rollouts(total: Totals) -> dict[str, int]:
    infra = sum(total.outcomes[name] for name in UNGRADED)
    graded = {name: total.outcomes[name] for name in GRADED}
    lost = total.reasons[DropReason.LOST.value]
    return {"settled": sum(graded.values()) + infra, **graded, "infra": infra, "lost": lost}


def _tokens(total: Totals, updates: Sequence[UpdateRow]) -> dict[str, Any]:
    dropped = Counter(total.dropped)
    trained = total.tokens[RolloutState.TRAINED.value]
    for update in updates:
        # Stale tokens are in the rows' own books, by rollout.
        others = {reason: n for reason, n in update.masked.items() if reason != DropReason.STALE.value}
        dropped.update(others)
        trained -= sum(others.values())
    return {
        "sampled": total.tokens["sampled"],
        "trained": trained,
        "dropped": {reason: n for reason, n in sorted(dropped.items()) if n},
        "in_flight": total.tokens[RolloutState.IN_FLIGHT.value],
        "queued": total.tokens[RolloutState.QUEUED.value],
        "leased": total.tokens[RolloutState.LEASED.value],
    }


def _staleness(updates: Sequence[UpdateRow]) -> dict[str, float]:
    """Over trained tokens: those over max_staleness are not counted."""
    weights = [row.num_entries - row.masked.get(DropReason.STALE.value, 0) for row in updates]
    steps = sum(row.staleness_mean * weight for row, weight in zip(updates, weights, strict=True))
    return {
        "mean": steps / sum(weights) if sum(weights) else 0.0,
        "max": max((row.staleness_max for row in updates), default=0),
    }


def _harness(name: str, totals: Totals, updates: Sequence[UpdateRow]) -> dict[str, Any]:
    rewards = [row.rewards.get(name, ()) for row in updates]
    return {
        "rollouts": sum(totals.outcomes.values()),
        "outcomes": dict(sorted(totals.outcomes.items())),
        "calls": totals.calls,
        "calls_aborted": totals.num_aborted,
        "roles": dict(sorted(totals.roles.items())),
        "malformed_tool_calls": totals.malformed,
        "broken_grafts": dict(sorted(totals.broken.items())),
        "prefix_reuse": totals.reused_tokens / totals.prompt_tokens if totals.prompt_tokens else None,
        "tokens": {
            "sampled": totals.tokens["sampled"],
            "trained": totals.tokens[RolloutState.TRAINED.value],
            "dropped": {reason: n for reason, n in sorted(totals.dropped.items()) if n},
        },
        "reward_mean": totals.reward_sum / totals.num_graded if totals.num_graded else None,
        "per_update": {"rollouts": [len(each) for each in rewards], "reward": [_mean(each) for each in rewards]},
    }


def _time(total: Totals, updates: Sequence[UpdateRow], wall_s: float) -> dict[str, Any]:
    learner = {name: [row.metrics.get(name, 0.0) for row in updates] for name in LEARNER_SECONDS}
    stepped = [row.stepped_s for row in updates]
    return {
        "wall_s": wall_s,
        "rollout_s": total.run_s,
        "update_wall_s": [b - a for a, b in pairwise(stepped)],
        **{f"learner_{name}": sum(values) for name, values in learner.items()},
        "per_update": learner,
    }


def _left_s(updates: Sequence[UpdateRow], updates_total: int) -> float | None:
    recent = [row.stepped_s for row in updates[-6:]]
    if len(recent) < 2:
        return None
    return (recent[-1] - recent[0]) / (len(recent) - 1) * max(0, updates_total - updates[-1].updates)


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p99": None}
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
