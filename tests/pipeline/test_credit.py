from __future__ import annotations

import pytest

from clawpipe.pipeline.credit import Spread, credit


def test_golden_advantages_of_a_group_of_four():
    # mean 0.5, population deviation 0.5
    found = credit([1, 1, 0, 0], eps=0.0)
    assert found.advantages == (1.0, 1.0, -1.0, -1.0)
    assert found.spread is Spread.SPREAD


def test_the_deviation_is_the_populations_and_eps_is_added_to_it():
    # mean 1, population deviation sqrt((1 + 0 + 1) / 3) = 0.816497; the sample's would be 1
    found = credit([0, 1, 2], eps=0.1)
    assert found.advantages == pytest.approx((-1 / 0.916497, 0.0, 1 / 0.916497), abs=1e-6)


def test_a_rollout_that_is_left_out_shifts_neither_mean_nor_deviation():
    # [1, 1, 0, 0] without one of its ones: mean 1/3, deviations from it 2/3, -1/3, -1/3
    deviation = (2 / 9) ** 0.5
    expected = [share / deviation for share in (2 / 3, -1 / 3, -1 / 3)]
    assert credit([1, 0, 0], eps=0.0).advantages == pytest.approx(expected)


def test_equal_rewards_give_zero_and_not_the_noise_of_a_mean():
    found = credit([0.7, 0.7, 0.7], eps=1e-8)
    assert found.advantages == (0.0, 0.0, 0.0)
    assert found.spread is Spread.ZERO_SPREAD


def test_a_single_rollout_has_no_baseline():
    assert credit([1.0], eps=1e-4) == credit([0.0], eps=1e-4)
    assert credit([1.0], eps=1e-4).spread is Spread.SINGLE
    assert credit([1.0], eps=1e-4).advantages == (0.0,)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not all are finite"):
        credit([1.0, float("nan")], eps=1e-4)
