"""Survivor bias: how what was trained differs from what was dropped, in length and reward. Pure.

A filter that drops long rollouts, or good ones, teaches the policy to be short, or bad: the means of what was
dropped against those of what was trained say so, by reason and by harness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from clawpipe.pipeline.books import TRAINED, Row, Sums, end_of

DROPPED = "dropped"  # for whatever reason
EVERY_HARNESS = ""
QUANTITIES = ("sampled", "calls", "wall_s", "reward")

_READ: dict[str, Callable[[Row], float | None]] = {
    "sampled": lambda row: row.sampled,
    "calls": lambda row: row.calls,
    "wall_s": lambda row: row.ended_s - row.started_s if row.outcome else None,
    "reward": lambda row: row.reward,
}


class Measure(Struct, frozen=True, kw_only=True):
    """One quantity of some rollouts. Lengths in tokens, calls or seconds. None: not measured of any of them."""

    count: int  # rollouts of which it is known
    mean: float | None
    median: float | None
    p90: float | None
    ratio: float | None  # of the mean to that of the trained rollouts of the same harness; None also where that is 0


class Survival(Struct, frozen=True, kw_only=True):
    """The rollouts of one harness (or of all, EVERY_HARNESS) that ended alike."""

    harness: str
    end: str  # "trained", DROPPED, or one reason
    rollouts: int
    measures: dict[str, Measure]  # by QUANTITIES


def survivors(rows: Iterable[Row]) -> tuple[Survival, ...]:
    """All harnesses together first, then each; in each the trained, the dropped, and these by reason.

    Rollouts that have not ended, and those taken back before they ran, are in none.
    """
    ended = [(row, end) for row in rows if (end := end_of(row))]
    names = sorted({row.harness for row, _ in ended})
    groups = [(EVERY_HARNESS, ended), *((name, [pair for pair in ended if pair[0].harness == name]) for name in names)]
    return tuple(line for name, pairs in groups for line in _of_harness(name, pairs))


def means(ends: Mapping[str, Sums]) -> dict[str, Any]:
    """What the summary says from sums alone: by end, how many rollouts and the means of their quantities."""
    return {end: {"rollouts": sums.rollouts, **_means(sums)} for end, sums in sorted(ends.items())}


def _means(sums: Sums) -> dict[str, float | None]:
    return {
        "sampled": _ratio(sums.sampled, sums.rollouts),
        "calls": _ratio(sums.calls, sums.rollouts),
        "wall_s": _ratio(sums.run_s, sums.num_settled),
        "reward": _ratio(sums.reward_sum, sums.num_graded),
    }


def _of_harness(harness: str, ended: Sequence[tuple[Row, str]]) -> list[Survival]:
    trained = [row for row, end in ended if end == TRAINED]
    dropped = [(row, end) for row, end in ended if end != TRAINED]
    found = {TRAINED: trained, DROPPED: [row for row, _ in dropped]}
    for reason in sorted({end for _, end in dropped}):
        found[reason] = [row for row, end in dropped if end == reason]
    return [
        Survival(harness=harness, end=end, rollouts=len(rows), measures=_measures(rows, trained))
        for end, rows in found.items()
    ]


def _measures(rows: Sequence[Row], trained: Sequence[Row]) -> dict[str, Measure]:
    return {name: _measure(_values(name, rows), _values(name, trained)) for name in QUANTITIES}


def _values(quantity: str, rows: Sequence[Row]) -> list[float]:
    return [value for row in rows if (value := _READ[quantity](row)) is not None]


def _measure(values: Sequence[float], trained: Sequence[float]) -> Measure:
    if not values:
        return Measure(count=0, mean=None, median=None, p90=None, ratio=None)
    mean = float(np.mean(values))
    return Measure(
        count=len(values),
        mean=mean,
        median=float(np.median(values)),
        p90=float(np.percentile(values, 90)),
        ratio=_ratio(mean, float(np.mean(trained))) if trained else None,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
