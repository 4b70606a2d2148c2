from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawpipe.pipeline.credit import Spread, grpo, ppo

exact = partial(grpo, eps=0.0)


def test_golden_advantages_of_a_group_of_four():
    # mean 0.5, population deviation 0.5
    found = exact([1, 1, 0, 0])
    assert found.advantages == (1.0, 1.0, -1.0, -1.0)
    assert found.spread is Spread.SPREAD


def test_golden_advantages_when_a_failed_rollout_is_left_out():
    # [1, 1, 0]: mean 2/3, population deviation sqrt(2/9) = 0.4714; 1/3 / 0.4714 = 0.7071
    assert exact([1, 1, 0]).advantages == pytest.approx((0.7071, 0.7071, -1.4142), abs=5e-5)
    assert grpo([1, 1, 0], eps=1e-4).advantages == pytest.approx((0.70696, 0.70696, -1.41391), abs=5e-6)


def test_golden_advantages_when_a_successful_rollout_is_left_out():
    # [1, 0, 0]: mean 1/3, the same deviation
    assert exact([1, 0, 0]).advantages == pytest.approx((1.4142, -0.7071, -0.7071), abs=5e-5)


def test_golden_advantages_of_what_is_left_of_a_group_when_infrastructure_took_most_of_it():
    # Two of eight: mean 0.5, population deviation 0.2
    assert exact([0.7, 0.3]).advantages == pytest.approx((1.0, -1.0))


def test_golden_advantages_of_a_group_of_eight():
    # sum 4, mean 0.5; deviations -.5 -.3 -.1 0 0 .1 .3 .5, squares sum to 0.70; population deviation 0.295804
    rewards = [0.0, 0.2, 0.4, 0.5, 0.5, 0.6, 0.8, 1.0]
    expected = [-1.690309, -1.014185, -0.338062, 0.0, 0.0, 0.338062, 1.014185, 1.690309]
    assert exact(rewards).advantages == pytest.approx(expected, abs=1e-6)


def test_the_deviation_is_the_populations_and_eps_is_added_to_it():
    # mean 1, population deviation sqrt((1 + 0 + 1) / 3) = 0.816497; the sample's would be 1
    found = grpo([0, 1, 2], eps=0.1)
    assert found.advantages == pytest.approx((-1 / 0.916497, 0.0, 1 / 0.916497), abs=1e-6)


def test_equal_rewards_give_zero_and_not_the_noise_of_a_mean():
    found = grpo([0.7, 0.7, 0.7], eps=1e-8)
    assert found.advantages == (0.0, 0.0, 0.0)
    assert found.spread is Spread.ZERO_SPREAD


def test_a_single_rollout_has_no_baseline():
    for reward in (0.0, 1.0):
        found = grpo([reward], eps=1e-4)
        assert found.advantages == (0.0,)
        assert found.spread is Spread.SINGLE


def test_a_reward_that_is_no_number_is_refused():
    for credit in (exact, ppo):
        with pytest.raises(ValueError, match="not all are finite"):
            credit([1.0, float("nan")])


def test_a_return_is_the_reward_itself_whatever_the_group():
    # No group baseline: a group of one and equal rewards are trained too.
    for rewards in ([0.25], [0.25, 0.25], [0.25, 1.0, 0.0]):
        found = ppo(rewards)
        assert found.advantages == tuple(rewards)
        assert found.spread is Spread.SPREAD


# Tenths, so that a spread is at least a tenth and never the rounding of a sum.
groups = st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), min_size=2, max_size=9)


@given(groups, st.data())
def test_credit_goes_with_the_rollout_and_not_with_its_place(rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    straight = exact(rewards).advantages
    assert exact([rewards[i] for i in order]).advantages == pytest.approx([straight[i] for i in order], abs=1e-12)


@given(groups)
def test_the_advantages_of_a_group_are_centred_with_deviation_one(rewards):
    found = exact(rewards)
    assert sum(found.advantages) == pytest.approx(0.0, abs=1e-9)
    squares = sum(a * a for a in found.advantages)
    assert squares == pytest.approx(len(rewards) if len(set(rewards)) > 1 else 0.0)


@given(groups, st.floats(-100, 100))
def test_what_is_added_to_every_reward_changes_nothing(rewards, constant):
    moved = exact([reward + constant for reward in rewards])
    straight = exact(rewards)
    if straight.spread is Spread.SPREAD:
        assert moved.advantages == pytest.approx(straight.advantages, abs=1e-9)
    else:
        assert moved == straight
