"""The outcomes of a group -> advantages. Pure.

A group is the rollouts of one task under one harness (ClawGym II, arXiv 2608.16798). Only graded rollouts come
here: one that infrastructure lost, or that has nothing to train, is in no mean, no deviation, no denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Spread(StrEnum):
    """Whether a group's rewards tell its rollouts apart. Without spread every advantage is 0."""

    SPREAD = "spread"
    ZERO_SPREAD = "zero_spread"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Credit:
    """A group's advantages, one for each of its rollouts, in the order of the rewards."""

    advantages: tuple[float, ...]
    spread: Spread


def credit(rewards: Sequence[float], eps: float) -> Credit:
    """A_i = (R_i - mean(R)) / (std(R) + eps), population std (ClawGym II, GRPO).

    A group of one and a group of equal rewards give 0. ValueError for rewards that are not finite.
    """
    r = np.array(rewards, np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards {list(rewards)}: not all are finite numbers")
    if len(r) < 2 or r.min() == r.max():
        return Credit((0.0,) * len(r), Spread.SINGLE if len(r) < 2 else Spread.ZERO_SPREAD)
    return Credit(tuple(((r - r.mean()) / (r.std() + eps)).tolist()), Spread.SPREAD)
