"""The policy loss: GRPO with token-level importance weights. Pure: tensors in, a scalar out.

GRPO: Shao et al. 2024 (arXiv 2402.03300), eq. 3; separate clip bounds: DAPO (arXiv 2503.14476), eq. 8;
the weight w_t outside of the clip: decoupled PPO (arXiv 2110.00641), eq. 3.

    L = - 1/|B| sum_i 1/N_i sum_{t in U_i} w_t min(r_t A_i, clip(r_t, 1 - eps_low, 1 + eps_high) A_i)
    r_t = pi_theta(t) / pi_old(t)

|B| counts all rows of the minibatch, those without entries (zero advantage) too: a row is a rollout, or what it
has in an auxiliary role when these are trained. N_i are all trainable tokens of row i, those masked for staleness
too, so that masking never makes the others louder.

Shapes: R rows, E loss entries of one forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clawpipe.learner.correction import log_ratio
from clawpipe.pipeline.forest import RolloutRow

Aggregation = Literal["rollout_mean", "token_mean"]


def grpo_loss(
    logprob_E: Tensor,
    old_E: Tensor,
    *,
    weight_E: Tensor,
    advantage_E: Tensor,
    scale_E: Tensor,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Tensor]:
    """The sum over these entries, and which of them were clipped (bool [E]: no gradient flows through them).

    `logprob_E` is log pi_theta with gradient, `old_E` log pi_old, `scale_E` each entry's share of the mean
    (`shares`). Zero entries give a zero that still carries a gradient graph.
    """
    ratio_E = log_ratio(logprob_E, old_E.detach()).exp()
    clipped_E = ratio_E.clamp(1.0 - eps_low, 1.0 + eps_high)
    objective_E = torch.minimum(ratio_E * advantage_E, clipped_E * advantage_E)
    loss = -(scale_E * weight_E.detach() * objective_E).sum()
    return loss, (clipped_E * advantage_E < ratio_E * advantage_E).detach()


def shares(rollouts: Sequence[RolloutRow], *, num_rows: int, num_entries: int, aggregation: Aggregation) -> Tensor:
    """Each row's share of the mean for one of its entries, float32 [R].

    rollout_mean: 1 / (|B| N_i), every row counts alike. token_mean: 1 / sum of N_i, every token does.
    `num_rows` and `num_entries` are those of the minibatch over all ranks.
    """
    if aggregation == "token_mean":
        return torch.full((len(rollouts),), 1.0 / max(num_entries, 1))
    counts_R = torch.tensor([row.num_trainable for row in rollouts], dtype=torch.float32)
    return 1.0 / (num_rows * counts_R.clamp(min=1.0))
