"""The losses of policy and value model: means over tokens with the same shares. Pure: tensors in, a scalar out.

Policy, GRPO: Shao et al. 2024 (arXiv 2402.03300), eq. 3; separate clip bounds: DAPO (arXiv 2503.14476), eq. 8;
the terms J_t: `correction`, for example w_t min(r_t A_i, clip(r_t, 1 - eps_low, 1 + eps_high) A_i).

    L = - 1/|B| sum_i 1/N_i sum_{t in U_i} J_t

PPO (ClawGym II, arXiv 2608.16798): the same with A_t = R_i - V(s_t) in the place of A_i, and for the value model

    L_V = 1/|B| sum_i 1/N_i sum_{t in U_i} (V(s_t) - R_i)^2

A rollout's reward comes at the last token of each of its kept branches; with gamma = lambda = 1 it is the return of
every token before it, whichever branches share the token, and nothing passes from one branch to another.

|B| counts all rows of the minibatch, those without entries (zero advantage) too: a row is a rollout, or what it
has in an auxiliary role when these are trained. N_i are all trainable tokens of row i, those left out for staleness
or by the correction too, so that leaving out never makes the others louder.

Shapes: R rows, E loss entries of one forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clawpipe.pipeline.forest import RolloutRow

Aggregation = Literal["rollout_mean", "token_mean"]


def policy_loss(objective_E: Tensor, scale_E: Tensor) -> Tensor:
    """The sum over these entries, to be minimised.

    `objective_E` is J with gradient, `scale_E` each entry's share of the mean (`shares`), 0 where it is left out.
    Zero entries give a zero that still carries a gradient graph.
    """
    return -(scale_E * objective_E).sum()


def ppo_advantages(return_E: Tensor, value_E: Tensor) -> Tensor:
    """A_t = R_i - V(s_t): generalised advantages (arXiv 1506.02438, eq. 18) with gamma = lambda = 1. No gradient."""
    return (return_E - value_E).detach()


def value_loss(value_E: Tensor, return_E: Tensor, scale_E: Tensor) -> Tensor:
    """The sum over these entries of (V - R)^2, by `scale_E` as in `policy_loss`. Gradient flows to `value_E`."""
    return (scale_E * (value_E - return_E).square()).sum()


def shares(rollouts: Sequence[RolloutRow], *, num_rows: int, num_entries: int, aggregation: Aggregation) -> Tensor:
    """Each row's share of the mean for one of its entries, float32 [R].

    rollout_mean: 1 / (|B| N_i), every row counts alike. token_mean: 1 / sum of N_i, every token does.
    `num_rows` and `num_entries` are those of the minibatch over all ranks.
    """
    if aggregation == "token_mean":
        return torch.full((len(rollouts),), 1.0 / max(num_entries, 1))
    counts_R = torch.tensor([row.num_trainable for row in rollouts], dtype=torch.float32)
    return 1.0 / (num_rows * counts_R.clamp(min=1.0))
