"""Canonical conversations: what every dialect is translated into and from.

The next stations (`render`, `graft`, `parse`) know these structs alone and no provider's protocol.
"""

from __future__ import annotations

import hashlib
import json
import math
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

MAX_COMPARED_CHARS = 64 * 1024  # of arguments that are read to be compared; a model's turn is shorter


class Speaker(StrEnum):
    """Who a message is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Text(Struct, frozen=True, tag="text"):
    """Plain text."""

    text: str


class Thinking(Struct, frozen=True, tag="thinking"):
    """An assistant's reasoning."""

    text: str


class ToolCall(Struct, frozen=True, tag="tool_call"):
    """A call that an assistant makes. `arguments` is the JSON text as it stands on the wire."""

    id: str
    name: str
    arguments: str


class ToolResult(Struct, frozen=True, tag="tool_result"):
    """What a tool gave back."""

    call_id: str
    text: str


Block = Text | Thinking | ToolCall | ToolResult


class Message(Struct, frozen=True):
    """One message; a string of a protocol is a list of one block."""

    speaker: Speaker
    blocks: tuple[Block, ...]

    @property
    def text(self) -> str:
        """Its text blocks, or its tool results, one per line."""
        return "\n".join(b.text for b in self.blocks if isinstance(b, Text | ToolResult))

    @property
    def thinking(self) -> str:
        """Its reasoning blocks, one per line."""
        return "\n".join(b.text for b in self.blocks if isinstance(b, Thinking))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that it makes, in order."""
        return tuple(b for b in self.blocks if isinstance(b, ToolCall))

    @property
    def num_chars(self) -> int:
        """Size of all that is said in it."""
        return sum(len(b.arguments if isinstance(b, ToolCall) else b.text) for b in self.blocks)


class Ask(Struct, frozen=True, kw_only=True):
    """One request for a turn, freed of its protocol."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # as OpenAI writes them, which chat templates expect
    tools_allowed: bool = True  # False: whatever the turn says is text
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end the turn; they are no part of it
    stream: bool = False
    include_usage: bool = False
    requested: dict[str, Any] = {}  # sampling parameters that the harness asked for; recorded, not obeyed

    @property
    def num_chars(self) -> int:
        """Size of all that is said in it."""
        return sum(message.num_chars for message in self.messages)

    def digest(self) -> str:
        """blake2b of what determines the answer; whether it is streamed does not."""
        body = (self.messages, self.tools, self.tools_allowed, self.max_tokens, self.stop)
        return hashlib.blake2b(msgspec.json.encode(body), digest_size=16).hexdigest()


class Turn(Struct, frozen=True, kw_only=True):
    """What the model said, parsed once."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False  # the token limit ended it
    malformed: bool = False  # it tried to call a tool and failed; the attempt stands in `text`
    stop_text: str | None = None  # which of the request's stop texts ended it


class Head(Struct, frozen=True, kw_only=True):
    """What is known of an answer before it is sampled."""

    id: str  # letters and digits, unique in the run
    prompt_tokens: int
    created_s: float


class Answer(Struct, frozen=True, kw_only=True):
    """A turn with what a dialect must say about it."""

    head: Head
    turn: Turn
    completion_tokens: int


class Fault(StrEnum):
    """Why a call has no answer."""

    INVALID = "invalid"  # the request is no request
    OVERFLOW = "overflow"  # it does not fit into the context
    NOT_FOUND = "not_found"
    NO_MODEL = "no_model"  # we serve one model, and this is another
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"  # the body is declared to be something else, or packed in a way that is not read
    SLOW = "slow"  # the body did not come in time
    BUSY = "busy"  # the rollout has too many calls in flight; the harness may try again
    SETTLED = "settled"  # the rollout takes no more calls
    UNAVAILABLE = "unavailable"  # our side failed; the harness may try again


class CallError(Exception):
    """A call that ends in an error which the dialect puts into its protocol's own form.

    OVERFLOW says how many `tokens` were wanted and what the `limit` is, for dialects with wordings of their own.
    """

    def __init__(
        self,
        fault: Fault,
        message: str,
        param: str | None = None,
        *,
        tokens: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.param = param
        self.tokens = tokens
        self.limit = limit


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None: no NaN, no list, no bare value."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def canonical_arguments(text: str) -> str:
    """One text for all JSON texts of the same arguments; text that is no JSON object, or very long, stands for itself.

    Keys are sorted. Numbers are compared as JavaScript holds and writes them: 1.0 is 1, 1e2 is 100, -0 is 0,
    integers beyond 2**53 are doubles, and what is too large for a double is null. No text is no arguments.
    """
    if len(text) > MAX_COMPARED_CHARS:
        return text
    value = parse_object(text) if text.strip() else {}
    try:
        return text if value is None else json.dumps(_as_doubles(value), sort_keys=True)
    except RecursionError:  # nested deeper than we walk, though not deeper than the JSON reader does
        return text


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_doubles(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        double = float(value)
    except OverflowError:
        return None
    if not math.isfinite(double):
        return None
    return int(double) if double.is_integer() else double
