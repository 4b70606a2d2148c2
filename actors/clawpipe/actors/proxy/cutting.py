"""Cuts sampled ids where a harness, or the chat template, leaves a part of a turn out.

Positions are found in the decoded text and cut between tokens: ids are taken or left, and nothing is encoded.
Where a part ends inside a token there is no cut, and the caller counts the turn as broken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from clawpipe.actors.proxy.graft import Graft, Said
from clawpipe.actors.proxy.meaning import meaning, words
from clawpipe.actors.proxy.messages import Message
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.pipeline.records import IntArray

NEARBY = 8  # tokens: the pieces of one character may decode to more characters than it is


class Cutter:
    """Cuts turns of one model. Decodes as little as it can: a cut takes a dozen decodings and one parse."""

    def __init__(self, renderer: Renderer, parser: TurnParser) -> None:
        self._renderer = renderer
        self._parser = parser

    def part(self, said: Said, message: Message) -> Graft | None:
        """The sampled ids up to where the replayed message ends, or None when no token ends there."""
        text = self._renderer.decode(said.graft.ids)
        for end in self._ends(said, message, text):
            num_tokens = self._tokens(said.graft.ids, text[:end])
            if num_tokens is not None and self._says(said, text[:end], message):
                return Graft(said.graft.ids[:num_tokens], complete=False)
        return None

    def without_thinking(self, said: Said, graft: Graft) -> Graft | None:
        """The graft without its thinking, and without the white space behind it, which templates leave out too.

        None when the thinking does not stand at its start, or does not end where a token ends.
        """
        text = self._renderer.decode(graft.ids)
        start = self._parser.layout(text, said.turn).thinking_end
        if said.means.thinking not in words(text[:start]):
            return None
        for end in (start + _leading_space(text[start:]), start):
            num_tokens = self._tokens(graft.ids, text[:end])
            if num_tokens is not None:
                return Graft(graft.ids[num_tokens:], graft.complete)
        return None

    def _ends(self, said: Said, message: Message, text: str) -> Iterable[int]:
        """Where in `text` the message may end, the best place first."""
        layout = self._parser.layout(text, said.turn)
        if message.calls:
            return layout.call_ends[len(message.calls) - 1 : len(message.calls)]
        if not words(message.text):
            return (layout.thinking_end,)
        start = layout.text_start
        return () if start is None else (start + end for end in _prefix_ends(said.turn.text, message.text))

    def _says(self, said: Said, part: str, message: Message) -> bool:
        """Whether the part, read on its own, is what the harness has."""
        alone = meaning(self._parser.read(part, said.tools, "part", truncated=False))
        kept = said.means.calls[: len(message.calls)]
        return (alone.text, alone.thinking, alone.calls) == (words(message.text), said.means.thinking, kept)

    def _tokens(self, ids: IntArray, part: str) -> int | None:
        """How many ids decode to exactly this part of their text."""
        near = bisect_left(range(len(ids) + 1), len(part), key=lambda n: len(self._renderer.decode(ids[:n])))
        for num_tokens in range(max(near - NEARBY, 0), min(near + NEARBY, len(ids)) + 1):
            if self._renderer.decode(ids[:num_tokens]) == part:
                return num_tokens
        return None


def _prefix_ends(text: str, kept: str) -> Iterable[int]:
    """Where `kept` may end in a text that begins like it: as it stands, or else before or in the space behind it."""
    end = _skip(text, len(words(kept)))
    space = range(end, end + _leading_space(text[end:]) + 1)
    return sorted(space, key=lambda at: text[:at] != kept)


def _skip(text: str, num_letters: int) -> int:
    """Where the first `num_letters` characters that are no white space end."""
    at = 0
    while num_letters:
        num_letters -= not text[at].isspace()
        at += 1
    return at


def _leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())
