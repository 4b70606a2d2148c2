"""The task's prompt as a file in HOME, for programs that would change it, or read an option, as an argument."""

from __future__ import annotations

from clawpipe.actors.harness.launching import prompt_argument
from clawpipe.actors.sandbox.bubblewrap import HOME
from clawpipe.actors.tasks.task import Task

NAME = ".clawpipe/prompt.txt"  # below HOME
INSIDE = f"{HOME}/{NAME}"


def prompt_file(task: Task, kind: str) -> dict[str, bytes]:
    """The file for `Launch.home_files`. TaskError, with the bounds that hold for all harnesses alike."""
    return {NAME: prompt_argument(task, kind).encode("utf-8", "replace")}


def from_standard_input(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command, reading the prompt: the sandbox gives programs an empty standard input."""
    return ("/bin/sh", "-c", f'exec "$@" <{INSIDE}', "sh", *argv)
