"""What is recorded: errands whose words are blanks, and the script of the model that works on them.

A harness's run costs seconds, a cold start wants thousands of conversations. So a few runs are recorded of errands
made of words that occur nowhere else, and these words are replaced afterwards (`rolls`). One take for each shape that
a conversation can have: the content is in the prompt, or in a file, with or without a flaw. The line that a blank
errand copies is none of its file's: so every place of a word has a blank of its own, whichever line is copied later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from enum import Enum

from msgspec import Struct, structs

from clawpipe.actors.harness.steps import Finish, Read, Write, say, without_last_brace
from clawpipe.actors.tasks.filing import Errand, copy_errand, write_errand
from clawpipe.pipeline.config import FilingTasksConfig, HarnessConfig

BLANK_LETTERS = 12  # of these letters, no word of any prompt
LETTERS = "bcdfghjklmnpqrstvwxz"


class Flaw(Enum):
    """What a demonstration gets wrong."""

    FOLDER = "the path lacks its folder"
    BRACE = "the call lacks its last brace"


class Shape(Struct, frozen=True):
    """What two conversations share that differ in their words alone."""

    rows: int  # lines of the file; 0: the prompt says the content
    flaw: Flaw | None = None


class Take(Struct, frozen=True, kw_only=True):
    """One run to be recorded."""

    name: str  # unique
    harness: HarnessConfig
    shape: Shape
    errand: Errand  # of blanks

    @property
    def script(self) -> tuple[str, ...]:
        """What the model says in it."""
        return script(self.errand, self.shape.flaw, self.harness)


def shapes(sources: list[FilingTasksConfig]) -> list[Shape]:
    """Every shape that the sources' errands have, clean and flawed."""
    rows = [0, *sorted({source.rows for source in sources})]
    return [Shape(lines, flaw) for flaw in (None, *Flaw) for lines in rows]


def takes(harness: HarnessConfig, wanted: list[Shape], dice: random.Random) -> Iterator[Take]:
    """One take per shape, each with blanks of its own."""
    for number, shape in enumerate(wanted):
        yield Take(name=f"{harness.name}-{number:02d}", harness=harness, shape=shape, errand=blank_errand(shape, dice))


def blank_errand(shape: Shape, dice: random.Random) -> Errand:
    """An errand of this shape whose words are blanks."""
    path = f"{_blank(dice)}/{_blank(dice)}.txt"
    if not shape.rows:
        return write_errand(path, _blank(dice))
    copied = copy_errand(path, [(_blank(dice), _blank(dice))], 0)
    file = copy_errand(path, [(_blank(dice), _blank(dice)) for _ in range(shape.rows)], 0)
    return structs.replace(copied, files=file.files)


def words_of(errand: Errand) -> tuple[str, ...]:
    """The errand's own words, in an order that its shape fixes."""
    folder, _, name = errand.path.partition("/")
    texts = [errand.content, *(errand.files[errand.reads].split("\n") if errand.reads else ())]
    return (folder, name.removesuffix(".txt"), *(word for text in texts for word in text.split("=")))


def shape_of(errand: Errand, flaw: Flaw | None) -> Shape:
    """The shape of a conversation about the errand."""
    return Shape(len(errand.files[errand.reads].split("\n")) if errand.reads else 0, flaw)


def filled(blanks: Errand, errand: Errand) -> Mapping[str, str]:
    """blank -> the word of `errand` that takes its place. ValueError when their shapes differ."""
    return dict(zip(words_of(blanks), words_of(errand), strict=True))


def script(errand: Errand, flaw: Flaw | None, harness: HarnessConfig) -> tuple[str, ...]:
    """The raw text of the model's turns: look if it has to, write, finish. The flaw is in the turn that writes.

    A harness that takes a broken call for an answer ends there, and the last turn is not said.
    """
    path = errand.path.rpartition("/")[2] if flaw is Flaw.FOLDER else errand.path
    look = [say(Read(path=errand.reads), harness)] if errand.reads else []
    write = say(Write(path=path, content=errand.content), harness)
    return (*look, without_last_brace(write) if flaw is Flaw.BRACE else write, say(Finish(), harness))


def _blank(dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=BLANK_LETTERS))
