"""The mean over tokens against numbers worked out by hand and a float64 loop; its terms: `test_correction`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clawpipe.learner.loss import grpo_loss, shares
from clawpipe.pipeline.forest import RolloutRow


def row(n: int, name: str = "r") -> RolloutRow:
    return RolloutRow(rollout_id=name, group_id="g", harness="h", reward=0.0, advantage=0.0, num_trainable=n)


def test_the_loss_is_minus_the_terms_times_their_shares():
    # -(0.25 * 1 + 0.25 * -3 + 0 * 8) = 0.5
    terms = torch.tensor([1.0, -3.0, 8.0], requires_grad=True)
    loss = grpo_loss(terms, torch.tensor([0.25, 0.25, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert terms.grad.tolist() == [-0.25, -0.25, 0.0]


def test_a_forest_without_entries_still_has_a_graph():
    terms = torch.empty(0, requires_grad=True)
    loss = grpo_loss(terms * 2, torch.empty(0))
    loss.backward()
    assert loss.item() == 0.0
    assert terms.grad.shape == (0,)


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_equals_the_formula_in_float64(aggregation: str):
    rng = np.random.default_rng(7)
    counts = [3, 1, 8, 0]
    advantages = [1.5, -2.0, 0.5, 0.0]
    owner = np.repeat(np.arange(4), counts)
    terms = rng.normal(0, 2, 12) * np.repeat(advantages, counts)

    expected = 0.0
    for i in range(12):
        mean = 1 / (4 * counts[owner[i]]) if aggregation == "rollout_mean" else 1 / 12
        expected -= mean * terms[i]

    share_R = shares([row(n) for n in counts], num_rows=4, num_entries=12, aggregation=aggregation)
    loss = grpo_loss(torch.tensor(terms, dtype=torch.float32), share_R[owner])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_shares_of_a_rollout_add_up_to_one_over_the_batch():
    share_R = shares([row(4), row(2), row(0)], num_rows=3, num_entries=6, aggregation="rollout_mean")
    assert share_R[0].item() * 4 == pytest.approx(1 / 3)
    assert share_R[1].item() * 2 == pytest.approx(1 / 3)
