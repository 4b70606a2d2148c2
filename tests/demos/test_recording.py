"""Runs of a real harness, recorded. The harness is agentloop: it needs no npm, and its conversations are known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors import demos
from clawpipe.actors.harness.agentloop_program import TOOLS
from clawpipe.actors.recording.rolls import Roll, fillings
from clawpipe.actors.recording.studio import Recording
from clawpipe.actors.recording.takes import Flaw, Shape, shape_of
from clawpipe.actors.recording.tries import problem_of, summary
from clawpipe.actors.tasks import filing
from clawpipe.learner.tokenizer import pieces_of
from clawpipe.pipeline.config import FilingTasksConfig
from clawpipe.pipeline.records import Scored


def recorded(studio: Any, flaw: Flaw | None) -> list[Recording]:
    return [each for each in studio.recordings if each.take.shape.flaw is flaw]


def test_a_filled_recording_is_what_the_harness_would_have_said(studio: Any, loop: Any, tmp_path: Path) -> None:
    """agentloop's own functions say what its conversation about any errand is: the recording must come to the same."""
    rolls = {each.take.shape: Roll.of(each, studio.renderer) for each in studio.recordings}
    for number, errand in enumerate(filing.errands(FilingTasksConfig(), random.Random(11), 30)):
        for flaw in (None, *Flaw):
            messages = demos.demonstrate(errand, flaw, loop, tmp_path / f"{number}-{flaw}")
            expected = [(piece.text, piece.sampled) for piece in pieces_of(studio.renderer.tokenizer, messages, TOOLS)]
            roll = rolls[shape_of(errand, flaw)]
            line = roll.line()
            words = dict(zip(line["blanks"], roll.fill(errand, random.Random(1)), strict=True))
            assert [(put_in(piece["text"], words), piece["sampled"]) for piece in line["pieces"]] == expected


def put_in(text: str, words: dict[str, str]) -> str:
    for blank, word in words.items():
        text = text.replace(blank, word)
    return text


def test_clean_takes_solve_their_tasks_and_flawed_ones_do_not(studio: Any) -> None:
    assert [each.outcome for each in recorded(studio, None)] == [
        Scored(reward=1.0, checks={"exists": 1.0, "name": 1.0, "content": 1.0, "clean": 1.0})
    ] * 2
    assert [each.rollout.reward for each in recorded(studio, Flaw.FOLDER)] == [0.25, 0.25]
    assert [each.rollout.reward for each in recorded(studio, Flaw.BRACE)] == [0.0, 0.0]
    assert [problem_of(each) for each in studio.recordings] == [None] * 6


def test_a_broken_call_is_said_once_also_when_the_run_samples_such_calls_again(studio: Any) -> None:
    assert studio.config.proxy.on_malformed_tool_call == "resample"
    assert [len(each.calls) for each in recorded(studio, Flaw.BRACE)] == [2, 3]


def test_the_summary_counts_rollouts_calls_and_rewards(studio: Any) -> None:
    [row] = summary(studio.recordings)
    assert row == {
        "harness": "agentloop",
        "rollouts": 6,
        "tried_again": 0,
        "calls": {"main": 15},
        "mean_reward": 1.0,
        "mean_reward_flawed": 0.125,
        "failed": 0,
    }


def test_a_script_that_fails_is_a_problem_that_says_how_it_ended(studio: Any) -> None:
    [clean, *_] = recorded(studio, None)
    [flawed, *_] = recorded(studio, Flaw.FOLDER)
    failed = Recording(take=clean.take, rollout=flawed.rollout, calls=flawed.calls)
    assert problem_of(failed) == (
        f"{clean.take.name}: reward 0.25 ({{'exists': 1.0, 'name': 0.0, 'content': 0.0, 'clean': 0.0}}), "
        "with the flaw None"
    )


def test_fillings_take_each_errand_to_the_recording_of_its_shape(studio: Any) -> None:
    rolls = {(each.take.harness.name, each.take.shape): Roll.of(each, studio.renderer) for each in studio.recordings}
    errands = list(filing.errands(FilingTasksConfig(), random.Random(4), 40))
    wanted = [(errand, number < 10, Flaw.FOLDER if number > 30 else None) for number, errand in enumerate(errands)]
    rows = list(fillings(rolls, wanted, random.Random(1)))
    names = {shape: roll.name for (_, shape), roll in rolls.items()}
    assert [row["of"] for row in rows] == [names[shape_of(errand, flaw)] for errand, _, flaw in wanted]
    assert [row["held_out"] for row in rows] == [True] * 10 + [False] * 30
    assert [row["flawed"] for row in rows] == [False] * 31 + [True] * 9
    assert all(errand.path.startswith(row["words"][0]) for row, errand in zip(rows, errands, strict=True))


@pytest.mark.parametrize("shape", [Shape(0), Shape(3), Shape(3, Flaw.BRACE)])
def test_a_recording_alternates_between_the_harness_and_the_script(studio: Any, shape: Shape) -> None:
    [recording] = [each for each in studio.recordings if each.take.shape == shape]
    roll = Roll.of(recording, studio.renderer)
    assert [sampled for _, sampled in roll.pieces] == [False, True] * len(recording.take.script)
    said = [text for text, sampled in roll.pieces if sampled]
    assert said == [f"{turn}<|im_end|>" for turn in recording.take.script]
