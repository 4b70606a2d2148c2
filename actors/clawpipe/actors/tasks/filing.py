"""The quickstart's own task family: put a word, or a line of a given file, into a named file.

Small enough for a model of 0.2 million parameters, and yet nothing is simulated: each task is a ClawGym row
with files, a prompt and a hidden Python grader (`filing_check`). Quoted strings in the prompt are the ones
that the agent must copy, so that they have the same tokens in the prompt and in a tool call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from clawpipe.actors.tasks.clawgym import InputFile, Row, task_of_row
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import FilingTasksConfig
from clawpipe.pipeline.errors import TaskError

SOURCE_FILE = "settings.txt"
NOTE_FILE = "readme.txt"
NOTE = "This folder is yours."
CHECK = Path(__file__).with_name("filing_check.py")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FOLDERS = _words("docs data out work team office archive public")
STEMS = _words(
    "plan notes report letter budget agenda invoice memo outline roster summary survey ticket review "
    "brief contract diary index journal label manual permit quote recipe schedule script table form"
)
KEYS = _words("color size shape host port mode level owner region theme speed format city team user zone")
WORDS = _words(
    "acorn almond anchor apron badge banjo barrel basket beacon bell bench blanket bottle bread brick brush "
    "bucket butter button cabin camel candle canoe carpet castle cello chalk cheese cherry circle clock coffee "
    "comet copper cotton cradle cricket crystal curtain daisy desert donkey dragon drum eagle engine feather "
    "ferry fiddle flute forest fossil fountain garlic ginger glove hammer harvest hazel helmet honey island "
    "ivory jacket jungle kettle kitten ladder lantern lemon lizard magnet maple marble meadow mirror mitten "
    "monkey needle nutmeg orange otter oyster paddle parrot pebble pepper pillow planet puzzle rabbit ribbon "
    "rocket saddle salmon silver spider sponge stone teapot thunder tiger trumpet tulip turtle velvet violin "
    "walnut willow window winter"
)


class Errand(Struct, frozen=True, kw_only=True):
    """One task of the family together with its solution: write `content` to `path`."""

    prompt: str
    files: dict[str, str]
    path: str
    content: str
    reads: str | None  # the file that holds the content; None when the prompt says it


def read_tasks(config: FilingTasksConfig) -> Iterator[Task]:
    """`count` tasks; the same configuration gives the same tasks."""
    check = CHECK.read_text(encoding="utf-8")
    for number, errand in enumerate(errands(config, random.Random(f"tasks-{config.seed}"), config.count)):
        yield task_of_row(as_row(errand, check), f"{config.name}/task_{number:05d}")


def errands(config: FilingTasksConfig, dice: random.Random, count: int) -> Iterator[Errand]:
    """`count` errands, half of each kind on average. TaskError when the word lists are too short."""
    for key, wanted, words in (
        ("folders", config.folders, FOLDERS),
        ("stems", config.stems, STEMS),
        ("rows", config.rows, KEYS),
    ):
        if wanted > len(words):
            raise TaskError(f"[[tasks]] {config.name}: {key} = {wanted} is over {len(words)}; lower it")
    for _ in range(count):
        path = f"{dice.choice(FOLDERS[: config.folders])}/{dice.choice(STEMS[: config.stems])}.txt"
        yield _draw_copy(path, config.rows, dice) if dice.random() < 0.5 else write_errand(path, dice.choice(WORDS))


def write_errand(path: str, word: str) -> Errand:
    """The kind whose prompt says the content."""
    prompt = f'Write the text "{word}" to the file "{path}".'
    return Errand(prompt=prompt, files={NOTE_FILE: NOTE}, path=path, content=word, reads=None)


def copy_errand(path: str, settings: Sequence[tuple[str, str]], picked: int) -> Errand:
    """The kind whose content is a line of a file: `settings` are its keys and values."""
    lines = [f"{key}={value}" for key, value in settings]
    prompt = f'Copy the line "{settings[picked][0]}" of "{SOURCE_FILE}" to the file "{path}".'
    files = {SOURCE_FILE: "\n".join(lines)}
    return Errand(prompt=prompt, files=files, path=path, content=lines[picked], reads=SOURCE_FILE)


def as_row(errand: Errand, check: str) -> Row:
    """The errand in ClawGym's row form; `check` is the grader's program text."""
    expected = {"path": errand.path, "content": errand.content, "files": errand.files}
    files = errand.files | {"reward/check.py": check, "reward/expected.json": json.dumps(expected)}
    return Row(
        prompt=errand.prompt,
        hook_code="python3 reward/check.py /work",
        input_files=tuple(InputFile(file_path=path, content=text) for path, text in files.items()),
    )


def _draw_copy(path: str, rows: int, dice: random.Random) -> Errand:
    keys, values = dice.sample(KEYS, rows), dice.sample(WORDS, rows)
    return copy_errand(path, list(zip(keys, values, strict=True)), dice.randrange(rows))
