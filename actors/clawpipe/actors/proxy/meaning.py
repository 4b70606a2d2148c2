"""What a turn says, freed of what harnesses change when they replay it. Pure.

JSON is re-written, ids lose their punctuation, text made of white space vanishes, blocks are split and joined,
reasoning is trimmed, left out or repeated as text, calls that a harness cannot make sense of are wrapped. None of
that changes what the model said, so none of it may break the chain of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from clawpipe.actors.proxy.messages import Message, ToolCall, Turn, canonical_arguments, parse_object

ID_CHARS = 24  # of our call ids are unique; what stands in front names the protocol, and changes with it
UNPARSED = "__unparsedToolInput"  # what Claude Code puts in the place of arguments that it cannot parse
INVALID = "invalid"  # the tool that OpenCode says was called when it knows no such tool

CallMeaning = tuple[str, str]  # (name, canonical arguments)


class Meaning(Struct, frozen=True):
    """A turn without its white space, its ids and its way of writing JSON."""

    text: str
    thinking: str
    calls: tuple[CallMeaning, ...]

    @property
    def empty(self) -> bool:
        """Nothing was said."""
        return not (self.text or self.thinking or self.calls)

    def begins(self, whole: Meaning) -> bool:
        """Whether this may be what is left of `whole` when its end is lost: a part of the calls, or of the text, or
        the thinking alone. The thinking itself may be left out."""
        if self.thinking not in ("", whole.thinking) or self.empty:
            return False
        if self.calls:
            return self.text == whole.text and self.calls == whole.calls[: len(self.calls)]
        return whole.text.startswith(self.text)


def meaning(said: Turn | Message, calls: Iterable[CallMeaning] | None = None) -> Meaning:
    """What is said. `calls`: what its calls are known to mean."""
    own = (call_meaning(call) for call in said.calls) if calls is None else calls
    return Meaning(words(said.text), words(said.thinking), tuple(own))


def words(text: str) -> str:
    """The text without white space: harnesses trim it, and join what they had split with spaces of their own."""
    return "".join(text.split())


def call_meaning(call: ToolCall) -> CallMeaning:
    """What a call asks for."""
    return call.name, canonical_arguments(call.arguments)


def bare_id(call_id: str) -> str:
    """A call's id without its punctuation, which some harnesses remove, and without its protocol's prefix."""
    return "".join(letter for letter in call_id if letter.isalnum())[-ID_CHARS:]


def rewritten(call: ToolCall, means: CallMeaning, sampled: ToolCall, sampled_means: CallMeaning) -> bool:
    """Whether a harness made `call` of `sampled`; both have the same id, which no other call has.

    It may name the tool otherwise, put the call in the name of another tool when it knows none of this name, or
    wrap arguments that it did not get whole.
    """
    if means[1] == sampled_means[1]:
        return True
    given = parse_object(call.arguments) or {}
    if call.name == INVALID and given.get("tool") == sampled.name:
        return True
    return call.name == sampled.name and _wraps(given, sampled.arguments)


def _wraps(given: dict[str, Any], arguments: str) -> bool:
    if list(given) != [UNPARSED]:
        return False
    inside = given[UNPARSED]
    raw = inside.get("raw") if isinstance(inside, dict) else inside
    return isinstance(raw, str) and words(arguments).startswith(words(raw))
