"""The rate of each step, computed by hand at the edges."""

from __future__ import annotations

import pytest

from clawpipe.learner.learning_rate import learning_rate
from clawpipe.pipeline.config import ConstantRate, CosineRate, LearnerConfig, LinearRate


def rates(schedule, steps, minibatches: int = 1) -> list[float]:
    config = LearnerConfig(lr=0.8, lr_schedule=schedule, minibatches=minibatches)
    return [learning_rate(config, step) for step in steps]


def test_without_a_schedule_the_rate_is_constant():
    config = LearnerConfig(lr=0.8)
    assert [learning_rate(config, step) for step in (0, 1, 10**6)] == [0.8, 0.8, 0.8]


def test_a_warm_up_begins_above_nothing_and_ends_at_the_full_rate():
    found = rates(ConstantRate(warmup_updates=4), range(6))
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_line_falls_from_the_full_rate_to_the_least_and_stays():
    schedule = LinearRate(warmup_updates=2, decay_updates=4, min_lr=0.2)
    assert rates(schedule, range(8)) == pytest.approx([0.4, 0.8, 0.8, 0.65, 0.5, 0.35, 0.2, 0.2])
    assert rates(schedule, [10**6]) == [0.2]


def test_a_cosine_falls_slowly_at_both_ends():
    schedule = CosineRate(decay_updates=4, min_lr=0.2)
    # 0.2 + 0.6 * (1 + cos(pi * n / 4)) / 2
    assert rates(schedule, range(6)) == pytest.approx([0.8, 0.7121320, 0.5, 0.2878680, 0.2, 0.2])


def test_the_least_rate_is_zero_by_default():
    assert rates(LinearRate(decay_updates=2), range(4)) == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_an_update_of_several_minibatches_takes_as_many_steps_of_the_schedule():
    schedule = LinearRate(warmup_updates=1, decay_updates=2)
    assert rates(schedule, range(7), minibatches=2) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0])
