"""The loss against numbers worked out by hand and a float64 oracle that loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clawpipe.learner.loss import grpo_loss, shares
from clawpipe.pipeline.forest import RolloutRow


def row(n: int, name: str = "r") -> RolloutRow:
    return RolloutRow(rollout_id=name, group_id="g", harness="h", reward=0.0, advantage=0.0, num_trainable=n)


def entries(ratios: list[float], advantages: list[float], weights: list[float], scale: float):
    old = torch.full((len(ratios),), -1.0)
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    loss, clipped = grpo_loss(
        new,
        old,
        weight_E=torch.tensor(weights),
        advantage_E=torch.tensor(advantages),
        scale_E=torch.full((len(ratios),), scale),
        eps_low=0.2,
        eps_high=0.28,
    )
    loss.backward()
    return loss.item(), new.grad.tolist(), clipped.tolist()


def test_golden_case_without_clipping():
    # r = 1 everywhere: loss = -(0.5 * 2 + 1 * -3) / 4 = 0.5, and d/dlogprob = -scale * w * r * A.
    loss, grad, clipped = entries([1.0, 1.0], [2.0, -3.0], [0.5, 1.0], 0.25)
    assert loss == pytest.approx(0.5)
    assert grad == pytest.approx([-0.25, 0.75])
    assert clipped == [False, False]


def test_a_rising_ratio_is_clipped_for_good_tokens_only():
    # A > 0, r = 1.5: min(1.5, 1.28) = 1.28 and no gradient. A < 0, r = 1.5: min(-1.5, -1.28) = -1.5, gradient.
    loss, grad, clipped = entries([1.5, 1.5], [1.0, -1.0], [1.0, 1.0], 1.0)
    assert loss == pytest.approx(-1.28 + 1.5, abs=1e-6)
    assert grad == pytest.approx([0.0, 1.5], abs=1e-6)
    assert clipped == [True, False]


def test_a_falling_ratio_is_clipped_for_bad_tokens_only():
    # A < 0, r = 0.5: min(-0.5, -0.8) = -0.8, no gradient. A > 0, r = 0.5: min(0.5, 0.8) = 0.5, gradient.
    loss, grad, clipped = entries([0.5, 0.5], [-1.0, 1.0], [1.0, 1.0], 1.0)
    assert loss == pytest.approx(0.8 - 0.5, abs=1e-6)
    assert grad == pytest.approx([0.0, -0.5], abs=1e-6)
    assert clipped == [True, False]


def test_no_gradient_reaches_weights_or_old_logprobs():
    new, old, weight = (torch.tensor([-1.0], requires_grad=True) for _ in range(3))
    loss, _ = grpo_loss(
        new,
        old,
        weight_E=weight,
        advantage_E=torch.ones(1),
        scale_E=torch.ones(1),
        eps_low=0.2,
        eps_high=0.2,
    )
    loss.backward()
    assert (old.grad, weight.grad) == (None, None)
    assert new.grad.item() == pytest.approx(1.0)  # -scale * w * r * A with w = -1


def test_a_forest_without_entries_still_has_a_graph():
    new = torch.empty(0, requires_grad=True)
    none = torch.empty(0)
    loss, _ = grpo_loss(new * 2, none, weight_E=none, advantage_E=none, scale_E=none, eps_low=0.2, eps_high=0.2)
    loss.backward()
    assert loss.item() == 0.0
    assert new.grad.shape == (0,)


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_equals_the_formula_in_float64(aggregation: str):
    rng = np.random.default_rng(7)
    counts = [3, 1, 8, 0]
    advantages = [1.5, -2.0, 0.5, 0.0]
    owner = np.repeat(np.arange(4), counts)
    old, new = rng.normal(-2, 1, 12), rng.normal(-2, 1, 12)
    weight = rng.uniform(0, 2, 12)

    expected = 0.0
    for i in range(12):
        ratio, a = math.exp(new[i] - old[i]), advantages[owner[i]]
        term = weight[i] * min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        mean = 1 / (4 * counts[owner[i]]) if aggregation == "rollout_mean" else 1 / 12
        expected -= mean * term

    share_R = shares([row(n) for n in counts], num_rows=4, num_entries=12, aggregation=aggregation)
    loss, _ = grpo_loss(
        torch.tensor(new, dtype=torch.float32),
        torch.tensor(old, dtype=torch.float32),
        weight_E=torch.tensor(weight, dtype=torch.float32),
        advantage_E=torch.tensor(advantages)[owner],
        scale_E=share_R[owner],
        eps_low=0.2,
        eps_high=0.28,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_shares_of_a_rollout_add_up_to_one_over_the_batch():
    share_R = shares([row(4), row(2), row(0)], num_rows=3, num_entries=6, aggregation="rollout_mean")
    assert share_R[0].item() * 4 == pytest.approx(1 / 3)
    assert share_R[1].item() * 2 == pytest.approx(1 / 3)


def test_extreme_ratios_stay_finite():
    new = torch.tensor([-500.0, -0.1], requires_grad=True)
    loss, _ = grpo_loss(
        new,
        torch.tensor([-0.1, -500.0]),
        weight_E=torch.ones(2),
        advantage_E=torch.tensor([-1.0, -1.0]),
        scale_E=torch.ones(2),
        eps_low=0.2,
        eps_high=0.28,
    )
    loss.backward()
    # 0.8 for the vanished token; exp(20) for the one that exploded, whose gradient the clamp ends.
    assert loss.item() == pytest.approx(0.8 + math.exp(20), rel=1e-6)
    assert new.grad.tolist() == [0.0, 0.0]
