"""What adapters of installed programs share: the environment, the room in the context, how errors are told."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from clawpipe.pipeline.config import ModelConfig
from clawpipe.pipeline.errors import ConfigError

MAX_MESSAGE_CHARS = 500
RESERVED = frozenset({"HOME"})  # where every program's settings lie


def environment(
    ours: Mapping[str, str], given: Mapping[str, str], reserved: Collection[str], name: str
) -> dict[str, str]:
    """The configuration's variables on top of the adapter's. ConfigError for one that leads past the proxy."""
    for variable in sorted(RESERVED.union(reserved) & given.keys()):
        raise ConfigError(
            f"[[harness]] {name}: env may not set {variable}: it tells the program where its model is, or where it "
            "finds that written, and every call must go through the proxy; take it out"
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
