"""What adapters of installed programs share: the prompt as an argument, the environment, how errors are told."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import ModelConfig
from clawpipe.pipeline.errors import ConfigError, TaskError

MAX_PROMPT_BYTES = 128 * 1024 - 1  # what Linux takes as one argument (MAX_ARG_STRLEN)
MAX_MESSAGE_CHARS = 500


def prompt_argument(task: Task, kind: str) -> str:
    """The task's prompt. TaskError when it cannot be one argument of a program."""
    size = len(task.prompt.encode("utf-8", "surrogatepass"))
    if size > MAX_PROMPT_BYTES or "\0" in task.prompt or not task.prompt.strip():
        raise TaskError(
            f"task {task.task_id}: {kind} takes a prompt of 1 to {MAX_PROMPT_BYTES} bytes, not blank and without NUL, "
            f"this one has {size}; put long text into a file of the task"
        )
    return task.prompt


def environment(
    ours: Mapping[str, str], given: Mapping[str, str], reserved: Collection[str], name: str
) -> dict[str, str]:
    """The configuration's variables on top of the adapter's. ConfigError for one that leads past the proxy."""
    for variable in reserved:
        if variable in given:
            raise ConfigError(
                f"[[harness]] {name}: env may not set {variable}: it tells the program where its model is, and every "
                "call must go through the proxy; take it out"
            )
    return {**ours, **given}


def require_room(name: str, model: ModelConfig, reserved_tokens: int) -> None:
    """ConfigError when the program would keep more free than the context has, and so compact without end."""
    if model.context_tokens <= reserved_tokens:
        raise ConfigError(
            f"[[harness]] {name}: it keeps {reserved_tokens} tokens free for its next turn, and [model] context_tokens "
            f"is {model.context_tokens}; raise that, or lower max_output_tokens"
        )


def events(output: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a program's output. The first may be cut, and any may be the agent's own."""
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def error_text(*said: Any) -> str:
    """The first text among what an event says of its error, for a message on one line."""
    text = next((each for each in said if isinstance(each, str) and each.strip()), "it does not say which")
    whole = text.encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair, and no message of ours can
    return " ".join(whole.split())[:MAX_MESSAGE_CHARS]


def last_words(output: bytes) -> str:
    """The end of what a program said, for a message on one line."""
    return " ".join(output.decode("utf-8", "replace").split())[-MAX_MESSAGE_CHARS:] or "it said nothing"
