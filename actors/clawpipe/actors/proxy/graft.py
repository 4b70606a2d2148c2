"""Finds in a replayed history the turns that this rollout sampled, and gives their token ids back.

Turns are matched on what they mean (`meaning`). Text that was decoded is never encoded again: the sampled ids
themselves take its place. A turn of which the harness kept a part is given back in part (`cutting`). One that was
not sampled here, or that the harness changed, is the harness's own text; the reason is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from clawpipe.actors.proxy.meaning import CallMeaning, Meaning, bare_id, call_meaning, meaning, rewritten
from clawpipe.actors.proxy.messages import Message, ToolCall, Turn
from clawpipe.actors.proxy.parse import ToolSet
from clawpipe.pipeline.records import IntArray

MAX_CANDIDATES = 8  # turns that are tried for a part of one
MAX_PARTS = 256  # messages that are remembered with what was found for them
MAX_PART_CHARS = 100_000  # of a message that is remembered


class Broken(StrEnum):
    """Why an assistant turn of the history is not grafted whole and as it was sampled."""

    FOREIGN = "foreign"  # nothing like it was sampled in this rollout
    TEXT = "text_changed"
    THINKING = "thinking_changed"
    CALLS = "calls_changed"
    PARTIAL = "partial"  # a part of a turn that does not end where a token ends
    STRIPPED = "thinking_stripped"  # grafted, without the thinking that the chat template leaves out


class Graft(Struct, frozen=True):
    """Sampled token ids that stand for one assistant turn. `complete`: they end with the end-of-turn token."""

    ids: IntArray
    complete: bool


class Said(Struct, frozen=True, eq=False):
    """A turn that was sampled, with what it takes to find it again and to cut it."""

    turn: Turn
    graft: Graft
    tools: ToolSet  # that it could call
    means: Meaning


class _SampledCall(Struct, frozen=True, eq=False):
    """A call of a sampled turn."""

    call: ToolCall
    means: CallMeaning
    said: Said


class _Found(Struct, frozen=True, eq=False):
    """What was found for a message that may be a part of turns."""

    means: Meaning
    parts: list[tuple[Said, Graft]]


class SampledTurns:
    """The turns of one rollout, findable by what they mean.

    What a message means (`meaning`) is asked once per request and handed to the questions about it: to read the
    arguments of its calls may take long. Threads may ask while turns are added.
    """

    def __init__(self) -> None:
        self._all: list[Said] = []
        self._by_said: dict[tuple[str, tuple[CallMeaning, ...]], list[Said]] = {}  # (text, calls)
        self._by_told: dict[tuple[str, tuple[CallMeaning, ...]], list[Said]] = {}  # (thinking and text, calls)
        self._calls: dict[str, _SampledCall] = {}  # by id
        self._parts: dict[Message, _Found] = {}

    def add(self, turn: Turn, graft: Graft, tools: ToolSet) -> Said:
        """A turn was sampled as these ids and goes out to the harness."""
        said = Said(turn, graft, tools, meaning(turn))
        self._all.append(said)
        self._by_said.setdefault((said.means.text, said.means.calls), []).append(said)
        if said.means.thinking:
            self._by_told.setdefault((said.means.thinking + said.means.text, said.means.calls), []).append(said)
        for call, means in zip(turn.calls, said.means.calls, strict=True):
            self._calls[bare_id(call.id)] = _SampledCall(call, means, said)
        for message, known in list(self._parts.items()):
            if known.means.begins(said.means):
                self._parts.pop(message, None)
        return said

    def whole(self, message: Message, means: Meaning | None = None) -> list[Said]:
        """The turns that a replayed message says whole.

        More than one when the rollout said the same thing more than once, in other tokens or other places: all
        of them are right, and the caller takes the one that continues the context best. A harness that drops the
        thinking of old turns, or repeats it as text, still gets them as they were sampled.
        """
        means = means or self.meaning(message)
        found = self._by_said.get((means.text, means.calls), [])
        if means.thinking:
            found = [said for said in found if said.means.thinking == means.thinking]
        found = found or self._by_told.get((means.thinking + means.text, means.calls), [])
        return self._closest(found, message)

    def longer(self, message: Message, means: Meaning | None = None) -> list[Said]:
        """The latest turns of which a replayed message may be a part."""
        means = means or self.meaning(message)
        found = [said for said in reversed(self._all) if means.begins(said.means)]
        return self._closest(found, message)[:MAX_CANDIDATES]

    def parts(
        self, message: Message, cut: Callable[[Said, Message], Graft | None], means: Meaning | None = None
    ) -> list[tuple[Said, Graft]]:
        """What `cut` makes of the longer turns for this message; cut once, though replayed with every call."""
        if (known := self._parts.get(message)) is not None:
            return known.parts
        means = means or self.meaning(message)
        made = [(said, cut(said, message)) for said in self.longer(message, means)]
        found = [(said, graft) for said, graft in made if graft is not None]
        if message.num_chars <= MAX_PART_CHARS:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            self._parts[message] = _Found(means, found)
        return found

    def reason(self, message: Message, means: Meaning | None = None) -> Broken:
        """Why no turn says this."""
        means = means or self.meaning(message)
        if (means.text, means.calls) in self._by_said:
            return Broken.THINKING
        same_calls = any(means.calls == said.means.calls for said in self._all)
        if any(bare_id(call.id) in self._calls for call in message.calls):
            return Broken.TEXT if same_calls else Broken.CALLS
        if means.calls:
            return Broken.TEXT if same_calls else Broken.FOREIGN
        same_text = bool(means.text) and any(means.text == said.means.text for said in self._all)
        return Broken.CALLS if same_text else Broken.FOREIGN

    def meaning(self, message: Message) -> Meaning:
        """What a replayed message says."""
        return meaning(message, [self._call(call) for call in message.calls])

    def _call(self, call: ToolCall) -> CallMeaning:
        """What a replayed call means: what the sampled one with its id meant, where the harness only re-wrote it."""
        sampled = self._calls.get(bare_id(call.id))
        if sampled is None:
            return call_meaning(call)
        if (call.name, call.arguments) == (sampled.call.name, sampled.call.arguments):
            return sampled.means
        own = call_meaning(call)
        return sampled.means if rewritten(call, own, sampled.call, sampled.means) else own

    def _closest(self, found: list[Said], message: Message) -> list[Said]:
        """Equal turns told apart: by the ids of their calls, unique in a rollout, and then by their white space."""
        if len(found) < 2:
            return found
        for call in message.calls:
            sampled = self._calls.get(bare_id(call.id))
            found = [said for said in found if sampled is not None and said is sampled.said] or found
        text, thinking = message.text.strip(), message.thinking.strip()
        found = [said for said in found if said.turn.text.strip() == text] or found
        return [said for said in found if thinking and said.turn.thinking.strip() == thinking] or found
