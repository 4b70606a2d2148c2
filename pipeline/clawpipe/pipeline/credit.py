"""The outcomes of a group -> what each of its rollouts is credited with. Pure.

A group is the rollouts of one task under one harness (ClawGym II, arXiv 2608.16798). Only graded rollouts come
here: one that infrastructure lost, or that has nothing to train, is in no mean, no deviation, no denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Spread(StrEnum):
    """Whether a group's rewards tell its rollouts apart. Without spread every GRPO advantage is 0."""

    SPREAD = "spread"
    ZERO_SPREAD = "zero_spread"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Credit:
    """A group's credit, one number for each of its rollouts, in the order of the rewards."""

    advantages: tuple[float, ...]
    spread: Spread


def grpo(rewards: Sequence[float], eps: float) -> Credit:
    """A_i = (R_i - mean(R)) / (std(R) + eps), population std (ClawGym II, GRPO).

    A group of one and a group of equal rewards give 0. ValueError for rewards that are not finite.
    """
    r = _finite(rewards)
    if len(r) < 2 or r.min() == r.max():
        return Credit((0.0,) * len(r), Spread.SINGLE if len(r) < 2 else Spread.ZERO_SPREAD)
    return Credit(tuple(((r - r.mean()) / (r.std() + eps)).tolist()), Spread.SPREAD)


def ppo(rewards: Sequence[float]) -> Credit:
    """The return R_i, from which the learner takes V(s_t) (ClawGym II, PPO).

    A rollout's reward comes at the last token of each of its kept branches; with gamma = lambda = 1 it is the
    return of every token before it. The baseline is the value model's, so neither a group of one nor equal
    rewards make a rollout useless. ValueError for rewards that are not finite.
    """
    return Credit(tuple(_finite(rewards).tolist()), Spread.SPREAD)


def _finite(rewards: Sequence[float]) -> npt.NDArray[np.float64]:
    r = np.array(rewards, np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards {list(rewards)}: not all are finite numbers")
    return r
