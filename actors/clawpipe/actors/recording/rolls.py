"""Recordings -> the lines of a demonstrations file: each recording once, then what to put into its blanks.

Beside the errand's words, a harness says things that change from run to run: session ids, the date, the time. They
are blanks too, so that a model sees many of them and learns to read none. What is left is the harness's own text.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.recording.studio import Recording, record
from clawpipe.actors.recording.takes import Flaw, Shape, Take, filled, shape_of, words_of
from clawpipe.actors.recording.tries import problem_of, record_fit, summary
from clawpipe.actors.tasks.filing import Errand
from clawpipe.pipeline import packing
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.models import SUMMARY_SUFFIX
from clawpipe.pipeline.observe import EventLog, Progress, write_json
from clawpipe.pipeline.runtime import Runtime

UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
MOMENT = re.compile(r"(?:(?P<day>Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?(?P<date>20\d\d-\d\d-\d\d)(?P<time>[ T]\d\d:\d\d)?")
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
NUM_DAYS = 1500
PART = 6  # letters of a blank that cannot be anything else


@dataclass(frozen=True, slots=True)
class Roll:
    """A recording as text, ready to be filled."""

    name: str
    harness: str
    errand: Errand  # of blanks
    pieces: tuple[tuple[str, bool], ...]  # (text, whether the model sampled it)
    recorded: datetime

    @classmethod
    def of(cls, recording: Recording, renderer: Renderer) -> Roll:
        """What the recording holds, in words."""
        return cls(
            name=recording.take.name,
            harness=recording.take.harness.name,
            errand=recording.take.errand,
            pieces=tuple(pieces_of(recording.rollout.branches[0], renderer)),
            recorded=datetime.fromtimestamp(recording.rollout.manifest.started_s, UTC),
        )

    def trace(self) -> str | None:
        """A part of a blank that filling would leave behind, where a harness shows words cut short; None is well."""
        text = "".join(text for text, _ in self.pieces)
        words = words_of(self.errand)
        for word in words:
            text = text.replace(word, "")
        parts = [part for word in words for part in (word[:PART], word[-PART:])]
        return next((part for part in parts if part in text), None)

    def line(self) -> dict[str, Any]:
        """The recording itself, as a line."""
        pieces = [{"text": text, "sampled": sampled} for text, sampled in self.pieces]
        blanks = list(self._words(self.errand, random.Random(0)))
        return {
            "kind": "recording",
            "name": self.name,
            "harness": self.harness,
            "pieces": pieces,
            "blanks": blanks,
        }

    def fill(self, errand: Errand, dice: random.Random) -> list[str]:
        """What takes the places of the line's `blanks`, in their order."""
        return list(self._words(errand, dice).values())

    def _words(self, errand: Errand, dice: random.Random) -> Mapping[str, str]:
        words = dict(filled(self.errand, errand))
        text = "".join(text for text, _ in self.pieces)
        # How harnesses report what was written. Such a number in the prompt would be their own.
        size = f" {len(self.errand.content)} bytes"
        if size not in self.pieces[0][0]:
            words[size] = f" {len(errand.content)} bytes"
        for each in sorted(set(UUID.findall(text))):
            words[each] = str(uuid.UUID(int=dice.getrandbits(128), version=4))
        when = FIRST_DAY + timedelta(days=dice.randrange(NUM_DAYS), minutes=dice.randrange(24 * 60))
        return words | {each: _said_like(each, when) for each in sorted(_moments(text, self.recorded))}


async def make_rolls(config: Config, runtime: Runtime, takes: Sequence[Take]) -> dict[tuple[str, Shape], Roll]:
    """Records the takes. ClawpipeError when one of them never becomes what its script wants."""
    progress = Progress(runtime.path(), "demos", "recording harnesses", total=len(takes))
    studio = partial(record, config, runtime, progress=progress)
    renderer, recordings = await record_fit(studio, takes, EventLog("demos"))
    write_json(Path(runtime.demos_path).with_suffix(SUMMARY_SUFFIX), summary(recordings))
    problems = [problem for recording in recordings if (problem := problem_of(recording)) is not None]
    if problems:
        raise ClawpipeError(
            f"{len(problems)} of {len(recordings)} recorded demonstrations failed, {problems[0]} for one. End "
            "other programs or raise wall_clock_s of [sandbox], and start again; if they always fail, see "
            f"{runtime.path('logs')} and actors/harness/steps.py, which says what the model is made to say"
        )
    rolls = {(each.take.harness.name, each.take.shape): Roll.of(each, renderer) for each in recordings}
    for roll in rolls.values():
        if (part := roll.trace()) is not None:
            raise ClawpipeError(f"{roll.name}: the harness shows {part!r} of a longer word, which cannot be replaced")
    progress.finish(f"{len(recordings)} runs")
    return rolls


def fillings(
    rolls: Mapping[tuple[str, Shape], Roll],
    wanted: Iterable[tuple[Errand, bool, Flaw | None]],
    dice: random.Random,
) -> Iterator[dict[str, Any]]:
    """One line per errand (with whether it is held out, and its flaw), the harnesses in turn."""
    harnesses = sorted({harness for harness, _ in rolls})
    for number, (errand, held_out, flaw) in enumerate(wanted):
        roll = rolls[harnesses[number % len(harnesses)], shape_of(errand, flaw)]
        yield {
            "kind": "filled",
            "of": roll.name,
            "words": roll.fill(errand, dice),
            "flawed": flaw is not None,
            "held_out": held_out,
        }


def pieces_of(branch: packing.Branch, renderer: Renderer) -> Iterator[tuple[str, bool]]:
    """(text, sampled): the parts of the sequence that the proxy encoded, or the model sampled, apart."""
    is_sampled = np.zeros(len(branch.tokens), bool)
    is_sampled[branch.entries] = True
    cuts = [0, *(np.flatnonzero(np.diff(is_sampled)) + 1).tolist(), len(branch.tokens)]
    decode = renderer.tokenizer.backend_tokenizer.decode
    for start, end in pairwise(cuts):
        yield decode(branch.tokens[start:end].tolist(), skip_special_tokens=False), bool(is_sampled[start])


def _moments(text: str, today: datetime) -> set[str]:
    """What in the text says when the recording was made; other dates are the harness's own text."""
    days = {(today + timedelta(days=shift)).strftime("%Y-%m-%d") for shift in (-1, 0, 1)}
    return {match[0] for match in MOMENT.finditer(text) if match["date"] in days}


def _said_like(moment: str, when: datetime) -> str:
    """`when` in the form of `moment`."""
    match = MOMENT.fullmatch(moment)
    assert match is not None
    said = moment.replace(match["date"], when.strftime("%Y-%m-%d"))
    if match["day"]:
        said = said.replace(match["day"], when.strftime("%a"), 1)
    if match["time"]:
        said = said.replace(match["time"], match["time"][0] + when.strftime("%H:%M"))
    return said
