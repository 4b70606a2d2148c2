"""A take that fails for a reason of the moment is run again, and what is wrong every time is said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import anyio
import numpy as np
import pytest
from msgspec import structs

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.recording.studio import Recording
from clawpipe.actors.recording.takes import Shape, Take, takes
from clawpipe.actors.recording.tries import MAX_TRIES, problem_of, record_fit, summary
from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.config import OpenClawConfig
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import Infra, Outcome, Role, RolloutManifest, Scored, TimedOut
from clawpipe.pipeline.segments import Part

TAKES = list(takes(OpenClawConfig(name="claw"), [Shape(0), Shape(2), Shape(3)], random.Random(1)))
SAID = Branch(tokens=np.ones(2, np.int32), entries=np.ones(1, np.int32), logprobs=np.zeros(1), versions=np.zeros(1))


def recording(take: Take, outcome: Outcome) -> Recording:
    manifest = RolloutManifest(
        rollout_id=take.name, attempt=1, group_id="", task_id="", harness="claw", calls=(), outcome=outcome
    )
    return Recording(take=take, rollout=Rollout(manifest, parts=(Part(Role.MAIN, (SAID,)),), fates=()), calls=())


class Studio:
    """Where the n-th run of a take ends with the n-th of its outcomes, the last one again and again."""

    def __init__(self, renderer: Renderer, **outcomes: list[Outcome]) -> None:
        self.renderer = renderer
        self.runs: list[list[str]] = []
        self._outcomes = outcomes

    async def record(self, wanted: Sequence[Take]) -> tuple[Renderer, list[Recording]]:
        self.runs.append([take.name for take in wanted])
        return self.renderer, [recording(take, self._outcome(take.name)) for take in wanted]

    def _outcome(self, name: str) -> Outcome:
        ends = self._outcomes.get(name.replace("-", "_"), [FIT])
        return ends[min(sum(name in run for run in self.runs), len(ends)) - 1]


FIT = Scored(reward=1.0)
SLOW = Infra(boundary="sandbox", message="slow")
WRONG = Scored(reward=0.25)


def run(studio: Studio) -> list[Recording]:
    renderer, found = anyio.run(record_fit, studio.record, TAKES, EventLog("demos"))
    assert renderer is studio.renderer
    return found


def test_a_failed_take_alone_is_tried_again_and_its_fit_run_counts(renderer: Renderer) -> None:
    studio = Studio(renderer, claw_01=[SLOW, FIT])
    found = run(studio)
    assert studio.runs == [["claw-00", "claw-01", "claw-02"], ["claw-01"]]
    assert [(each.take.name, each.outcome, each.tries) for each in found] == [
        ("claw-00", FIT, 1),
        ("claw-01", FIT, 2),
        ("claw-02", FIT, 1),
    ]
    [row] = summary(found)
    assert (row["tried_again"], row["failed"]) == (1, 0)


def test_a_take_that_always_fails_ends_with_its_last_run(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    studio = Studio(renderer, claw_00=[SLOW, SLOW, WRONG], claw_02=[SLOW, FIT])
    found = run(studio)
    assert [len(names) for names in studio.runs] == [3, 2, 1]
    assert len(studio.runs) == MAX_TRIES
    assert (found[0].outcome, found[0].tries) == (WRONG, 3)
    [row] = summary(found)
    assert (row["tried_again"], row["failed"]) == (2, 1)
    assert [record.fields["take"] for record in caplog.records] == ["claw-00", "claw-02", "claw-00", "claw-00"]


def test_when_everything_fails_nothing_is_tried_again(renderer: Renderer) -> None:
    studio = Studio(renderer, claw_00=[SLOW, FIT], claw_01=[SLOW, FIT], claw_02=[WRONG, FIT])
    found = run(studio)
    assert len(studio.runs) == 1
    assert [each.outcome for each in found] == [SLOW, SLOW, WRONG]


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (FIT, None),
        (SLOW, "claw-00: Infra (slow)"),
        (TimedOut(reward=1.0), "claw-00: TimedOut"),
        (WRONG, "claw-00: reward 0.25 ({}), with the flaw None"),
    ],
)
def test_a_recording_is_fit_when_it_ended_by_itself_with_the_reward_of_its_script(
    outcome: Outcome, problem: str | None
) -> None:
    assert problem_of(recording(TAKES[0], outcome)) == problem


def test_a_conversation_that_forked_is_not_fit() -> None:
    one = recording(TAKES[0], FIT)
    forked = replace(one.rollout, parts=(Part(Role.MAIN, (SAID, SAID)),))
    assert problem_of(structs.replace(one, rollout=forked)) == (
        "claw-00: its main conversation is not one sequence, it has 2 branches"
    )
