"""The task's prompt as a file in HOME: as an argument it would be bounded by Linux, and could be read as an option."""

from __future__ import annotations

from clawpipe.actors.sandbox.bubblewrap import HOME
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.errors import TaskError

NAME = ".clawpipe/prompt.txt"  # below HOME
INSIDE = f"{HOME}/{NAME}"
MAX_BYTES = 1024**2  # as much as every program was seen to pass on whole


def prompt_file(task: Task, kind: str) -> dict[str, bytes]:
    """The file for `Launch.home_files`. TaskError, with bounds that hold for all programs alike."""
    content = task.prompt.encode("utf-8", "replace")
    if len(content) > MAX_BYTES or b"\0" in content or not task.prompt.strip():
        raise TaskError(
            f"task {task.task_id}: {kind} takes a prompt of 1 to {MAX_BYTES} bytes, not blank and without NUL, "
            f"this one has {len(content)}; put long text into a file of the task"
        )
    return {NAME: content}


def from_standard_input(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command, reading the prompt: the sandbox gives programs an empty standard input."""
    return ("/bin/sh", "-c", f'exec "$@" <{INSIDE}', "sh", *argv)
