"""The means over tokens against numbers worked out by hand and a float64 loop; J_t: `test_correction`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clawpipe.learner.loss import policy_loss, ppo_advantages, shares, value_loss
from clawpipe.pipeline.forest import RolloutRow


def row(n: int, name: str = "r") -> RolloutRow:
    return RolloutRow(rollout_id=name, group_id="g", harness="h", reward=0.0, advantage=0.0, num_trainable=n)


def test_the_loss_is_minus_the_terms_times_their_shares():
    # -(0.25 * 1 + 0.25 * -3 + 0 * 8) = 0.5
    terms = torch.tensor([1.0, -3.0, 8.0], requires_grad=True)
    loss = policy_loss(terms, torch.tensor([0.25, 0.25, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert terms.grad.tolist() == [-0.25, -0.25, 0.0]


def test_a_forest_without_entries_still_has_a_graph():
    terms = torch.empty(0, requires_grad=True)
    loss = policy_loss(terms * 2, torch.empty(0))
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
    loss = policy_loss(torch.tensor(terms, dtype=torch.float32), share_R[owner])
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_shares_of_a_rollout_add_up_to_one_over_the_batch():
    share_R = shares([row(4), row(2), row(0)], num_rows=3, num_entries=6, aggregation="rollout_mean")
    assert share_R[0].item() * 4 == pytest.approx(1 / 3)
    assert share_R[1].item() * 2 == pytest.approx(1 / 3)


def test_two_branches_that_share_a_token_have_its_value_and_its_share_once():
    # One rollout with return 1: p -> a, and after a both b and c. V(p) = 0.25, V(pa) = 0.5; three tokens.
    value_E = torch.tensor([0.25, 0.5, 0.5], requires_grad=True)
    returns_E, scale_E = torch.ones(3), shares([row(3)], num_rows=1, num_entries=3, aggregation="rollout_mean")[[0] * 3]
    advantage_E = ppo_advantages(returns_E, value_E)
    loss = value_loss(value_E, returns_E, scale_E)
    loss.backward()
    assert advantage_E.tolist() == [0.75, 0.5, 0.5]
    assert not advantage_E.requires_grad
    assert loss.item() == pytest.approx((0.5625 + 0.25 + 0.25) / 3)
    assert value_E.grad.tolist() == pytest.approx([-0.5, -1 / 3, -1 / 3])


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_the_value_loss_equals_the_formula_in_float64(aggregation: str):
    rng = np.random.default_rng(3)
    counts, returns = [3, 1, 8, 0], [1.0, 0.0, 0.4, 0.7]
    owner = np.repeat(np.arange(4), counts)
    values, left_out = rng.normal(0.5, 1, 12), {2, 9}

    expected, gradient = 0.0, np.zeros(12)
    for i in range(12):
        if i not in left_out:
            mean = 1 / (4 * counts[owner[i]]) if aggregation == "rollout_mean" else 1 / 12
            expected += mean * (values[i] - returns[owner[i]]) ** 2
            gradient[i] = 2 * mean * (values[i] - returns[owner[i]])

    share_R = shares([row(n) for n in counts], num_rows=4, num_entries=12, aggregation=aggregation)
    scale_E = share_R[owner] * torch.tensor([i not in left_out for i in range(12)])
    value_E = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    loss = value_loss(value_E, torch.tensor(returns)[owner], scale_E)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert value_E.grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-4, abs=1e-7)
