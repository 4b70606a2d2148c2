"""The constant text of harnesses as tokens of its own, so that a long system prompt costs a tiny model few tokens.

An atom is a line that every recording of a harness holds, or a run of such lines. It holds nothing that changes from
run to run, so it hides no task from the model. Where a harness says something else one day, the lines that are still
the same remain atoms, and the rest is spelled like any other text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from clawpipe.learner.demonstrations import Recording
from clawpipe.learner.tokenizer import between_marks

MIN_CHARS = 16  # of a line: a shorter one is cheap, and may stand in any text
LINE = re.compile(r"[^\n]+\n*|\n+")


def atoms_of(recordings: Sequence[Recording]) -> list[str]:
    """The atoms, the long ones first. Same recordings, same atoms."""
    found: set[str] = set()
    for harness in {recording.harness for recording in recordings}:
        found |= _of_harness([recording for recording in recordings if recording.harness == harness])
    return sorted(found, key=lambda atom: (-len(atom), atom))


def without_atoms(text: str, atoms: Sequence[str]) -> list[str]:
    """What is left of a text: the parts between its atoms. `atoms` come long ones first."""
    parts = [text]
    for atom in atoms:
        parts = [part for whole in parts for part in (whole.split(atom) if atom in whole else [whole]) if part]
    return parts


def _of_harness(recordings: Sequence[Recording]) -> set[str]:
    spoken = [_spoken(recording) for recording in recordings]
    constant = set.intersection(*({line for part in parts for line in LINE.findall(part)} for parts in spoken))
    blanks = {blank for recording in recordings for blank in recording.blanks}
    constant = {line for line in constant if not any(blank in line for blank in blanks)}
    texts = ["\0".join(parts) for parts in spoken]
    runs = {run for part in spoken[0] for run in _runs(LINE.findall(part), constant)}
    everywhere = {run for run in runs if all(run in text for text in texts)}
    # Decoding gives back a token that could be the spelling of other bytes as these bytes: a space tells it apart.
    return {atom for atom in constant | everywhere if len(atom) >= MIN_CHARS and (" " in atom or "\n" in atom)}


def _spoken(recording: Recording) -> list[str]:
    """What the harness said, cut at the marks."""
    return [part for piece in recording.pieces if not piece.sampled for part in between_marks(piece.text)]


def _runs(lines: Iterable[str], constant: set[str]) -> Iterator[str]:
    """The longest runs of constant lines."""
    run = ""
    for line in lines:
        if line in constant:
            run += line
            continue
        if run:
            yield run
        run = ""
    if run:
        yield run
