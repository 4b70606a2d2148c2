"""Finds in a replayed history the turns that this rollout sampled, and gives their token ids back.

Harnesses replay what they were told, but not byte for byte: JSON is re-written, ids lose their punctuation, text
made of white space vanishes, text and calls change places. So turns are matched on what they mean. Text that
was decoded is never encoded again: the sampled ids themselves take its place. A turn that was not sampled
here, or that the harness changed, is the harness's own text; the reason is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from clawpipe.actors.proxy.messages import Message, ToolCall, Turn, canonical_arguments
from clawpipe.pipeline.records import IntArray


class Broken(StrEnum):
    """Why an assistant turn of the history is not grafted."""

    FOREIGN = "foreign"  # nothing like it was sampled in this rollout
    TEXT = "text_changed"
    THINKING = "thinking_changed"
    CALLS = "calls_changed"


class Graft(Struct, frozen=True):
    """Sampled token ids that stand for one assistant turn. `complete`: they end with the end-of-turn token."""

    ids: IntArray
    complete: bool


class _Meaning(Struct, frozen=True):
    """What a turn says, freed of what harnesses change."""

    text: str
    thinking: str
    calls: tuple[tuple[str, str], ...]  # (name, canonical arguments)


class SampledTurns:
    """The turns of one rollout, findable by what they mean."""

    def __init__(self) -> None:
        self._by_meaning: dict[_Meaning, list[Graft]] = {}
        self._by_said: dict[tuple[str, tuple[tuple[str, str], ...]], list[Graft]] = {}  # without the thinking
        self._by_call_id: dict[str, list[Graft]] = {}
        self._texts: set[str] = set()
        self._calls: set[tuple[tuple[str, str], ...]] = set()

    def add(self, turn: Turn, graft: Graft) -> None:
        """A turn was sampled as these ids and goes out to the harness."""
        meaning = _Meaning(turn.text.strip(), turn.thinking.strip(), _calls(turn.calls))
        for found in (
            self._by_meaning.setdefault(meaning, []),
            self._by_said.setdefault((meaning.text, meaning.calls), []),
            *(self._by_call_id.setdefault(_bare(call.id), []) for call in turn.calls),
        ):
            found.append(graft)
        self._texts.add(meaning.text)
        self._calls.add(meaning.calls)

    def find(self, message: Message) -> list[Graft] | Broken:
        """The ids that may stand for a replayed turn, or why none can.

        More than one when the rollout said the same thing more than once, in other tokens or other places: all
        of them are right, and the caller takes the one that continues the context best. A harness that drops
        the thinking of old turns still gets them as they were sampled.
        """
        meaning = _Meaning(message.text.strip(), message.thinking.strip(), _calls(message.calls))
        said = self._by_said.get((meaning.text, meaning.calls), [])
        found = self._by_meaning.get(meaning, []) if meaning.thinking else said
        if not found:
            return self._reason(meaning, message.calls, bool(said))
        return self._with_ids(found, message.calls)

    def _with_ids(self, found: list[Graft], calls: Iterable[ToolCall]) -> list[Graft]:
        """Call ids are unique in a rollout: where the harness kept them, they tell equal turns apart."""
        for call in calls:
            same = {id(graft) for graft in self._by_call_id.get(_bare(call.id), ())}
            found = [graft for graft in found if id(graft) in same] or found
        return found

    def _reason(self, meaning: _Meaning, calls: Iterable[ToolCall], said: bool) -> Broken:
        if said:
            return Broken.THINKING
        if any(_bare(call.id) in self._by_call_id for call in calls):
            return Broken.TEXT if meaning.calls in self._calls else Broken.CALLS
        if meaning.calls:
            return Broken.TEXT if meaning.calls in self._calls else Broken.FOREIGN
        return Broken.CALLS if meaning.text and meaning.text in self._texts else Broken.FOREIGN


def _calls(calls: Iterable[ToolCall]) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, canonical_arguments(call.arguments)) for call in calls)


def _bare(call_id: str) -> str:
    """A call's id without its punctuation, which some harnesses remove."""
    return "".join(letter for letter in call_id if letter.isalnum())
