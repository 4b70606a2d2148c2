"""The learning rate of a step. Pure: the configuration and the number of steps made before it say it all.

That number is the optimizer's own count, which every checkpoint holds: a resumed run goes on with the rate at
which it stopped, and an update that made no step does not move the schedule.
"""

from __future__ import annotations

import math

from clawpipe.pipeline.config import ConstantRate, CosineRate, LearnerConfig, LinearRate


def learning_rate(config: LearnerConfig, num_steps: int) -> float:
    """The rate of the step after `num_steps`. An update is `minibatches` steps.

    During the warm-up it grows in equal parts, and its last step has the full rate; then it falls, and stays at
    `min_lr` when `decay_updates` are over.
    """
    schedule = config.lr_schedule
    warmup_steps = schedule.warmup_updates * config.minibatches
    if num_steps < warmup_steps:
        return config.lr * (num_steps + 1) / warmup_steps
    if isinstance(schedule, ConstantRate):
        return config.lr
    done = min(1.0, (num_steps - warmup_steps) / (schedule.decay_updates * config.minibatches))
    return schedule.min_lr + (config.lr - schedule.min_lr) * _left(schedule, done)


def _left(schedule: LinearRate | CosineRate, done: float) -> float:
    """What is left of the way from `lr` to `min_lr` when `done` of the decay is over: from 1 to 0."""
    return 1.0 - done if isinstance(schedule, LinearRate) else 0.5 * (1.0 + math.cos(math.pi * done))
