"""SIGKILL of broker, pipeline, proxy, actor and learner at random moments: nothing settled is lost or trained twice.

The seed is the test's parameter; what was killed, and when, stands in the failure's message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from chaos.kills import MOMENTS, PARTS, plan
from chaos.learner_program import checkpoints
from chaos.leftovers import left_behind
from chaos.run_folder import UPDATES
from chaos.scene import Scene
from chaos.verdict import (
    against_books,
    against_broker,
    against_learning,
    against_records,
    read_books,
    read_stream,
    rollouts,
)
from clawpipe.pipeline.audit import audit
from clawpipe.pipeline.replay_command import replay

SEEDS = range(50)
SEEDS_IN_CI = (0, 3, 24, 28, 35, 44)  # their plans kill every part at every kind of moment that there is


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SEEDS_IN_CI else [pytest.mark.slow]) for seed in SEEDS]
)
def test_whatever_is_killed_nothing_settled_is_lost_and_nothing_is_trained_twice(
    make_scene: Callable[[int], Scene], seed: int
) -> None:
    scene = make_scene(seed)
    scene.play(plan(seed))
    scene.stop()
    faults = list(faults_of(scene))
    assert not faults, "\n".join([*faults, scene.story()])


def test_the_runs_in_ci_kill_every_part_at_every_kind_of_moment() -> None:
    hit = {(victim, kill.moment) for seed in SEEDS_IN_CI for kill in plan(seed) for victim in kill.victims}
    assert {(part, moment) for part in PARTS for moment in ("", *MOMENTS[part])} <= hit
    assert any(len(kill.victims) == 2 for seed in SEEDS_IN_CI for kill in plan(seed))


def faults_of(scene: Scene) -> Iterator[str]:
    """Everything that is wrong with a run that has ended. The broker runs still."""
    runtime = scene.runtime
    messages = anyio.run(read_stream, runtime.nats_url, runtime.nats_token, scene.config.nats.prefix)
    scene.clear()
    found, books = rollouts(messages), read_books(runtime.path("ledger.sqlite"))
    written = checkpoints(runtime.checkpoint_dir)
    if written[-1].updates != UPDATES:
        yield f"the last checkpoint has {written[-1].updates} updates of {UPDATES}"
    yield from against_learning(found, written, books)
    yield from against_books(found, written[-1], books)
    yield from against_broker(found, runtime.path("logs", "proxy.log"))
    yield from against_records(found, runtime.path("answers.jsonl"))
    yield from own_proofs(runtime.path())
    yield from scene.own_deaths()
    yield from left_behind(scene)


def own_proofs(run_dir: Path) -> Iterator[str]:
    """What `clawpipe ledger` and `clawpipe replay` say."""
    if (wrong := audit(run_dir, goes_on=False).wrong) is not None:
        yield f"clawpipe ledger: {wrong}"
    replayed = replay(run_dir, goes_on=False)
    if replayed.first is not None:
        yield f"clawpipe replay: {replayed.first}"
    if replayed.batches.equal != UPDATES:
        yield f"clawpipe replay: of {UPDATES} batches, it made {replayed.batches.equal} again"
