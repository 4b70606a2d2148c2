"""Demonstrations as the role `demos` wrote them, and their form as training sequences.

`tiny` trains the tokenizer on them, `sft` the model. A conversation is rendered here, by the chat template; a
recording is text already, cut where the proxy cut it, with blanks that each demonstration fills in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from transformers import PreTrainedTokenizerFast

from clawpipe.learner.tokenizer import Piece, encode_pieces, pieces_of
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.packing import Branch


class Conversation(Struct, frozen=True, kw_only=True, tag_field="kind", tag="conversation"):
    """One demonstration. An assistant message's `content` is the raw text that the model should sample."""

    tools: tuple[dict[str, Any], ...]  # OpenAI tool objects
    messages: tuple[dict[str, Any], ...]
    flawed: bool
    held_out: bool  # not to be trained on

    @property
    def harness(self) -> str:
        """Conversations are agentloop's."""
        return ""

    def pieces(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[Piece]:
        """What is encoded apart."""
        return pieces_of(tokenizer, self.messages, self.tools)


class Recording(Struct, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """What a harness and a script said to each other, once."""

    name: str
    harness: str
    pieces: tuple[Piece, ...]
    blanks: tuple[str, ...]  # strings of the pieces that every demonstration replaces


class _Filled(Struct, frozen=True, kw_only=True, tag_field="kind", tag="filled"):
    of: str
    words: tuple[str, ...]
    flawed: bool
    held_out: bool


@dataclass(frozen=True, slots=True)
class Filled:
    """One demonstration: a recording with other words in its blanks."""

    recording: Recording
    words: Mapping[str, str]  # blank -> what takes its place
    flawed: bool
    held_out: bool

    @property
    def harness(self) -> str:
        """Whose recording it is."""
        return self.recording.harness

    def pieces(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[Piece]:
        """What is encoded apart."""
        return (Piece(self.fill(piece.text), piece.sampled) for piece in self.recording.pieces)

    def fill(self, text: str) -> str:
        """The text with this demonstration's words, all of them put in at the same time."""
        return _any_of(tuple(self.words)).sub(lambda match: self.words[match[0]], text)


Demonstration = Conversation | Filled


def read(path: Path) -> list[Demonstration]:
    """The file's demonstrations. LearnerError, with the line, when it cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as err:
        raise LearnerError(f"{path}: cannot be read ({err.strerror}); run the role `demos` first") from err
    decoder = msgspec.json.Decoder(Conversation | Recording | _Filled)
    recordings: dict[str, Recording] = {}
    demonstrations: list[Demonstration] = []
    for number, line in enumerate(lines, start=1):
        try:
            found = decoder.decode(line)
            if isinstance(found, Recording):
                recordings[found.name] = found
            else:
                demonstrations.append(found if isinstance(found, Conversation) else _fill(found, recordings))
        except (msgspec.MsgspecError, ValueError, LookupError) as err:
            raise LearnerError(f"{path}, line {number}: not a demonstration ({err}); write the file anew") from err
    return demonstrations


def recordings_of(demonstrations: Sequence[Demonstration]) -> list[Recording]:
    """The recordings that they fill, each once."""
    return list({each.recording.name: each.recording for each in demonstrations if isinstance(each, Filled)}.values())


def sequence(tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration) -> Branch:
    """Its tokens, with a loss entry for each one of an assistant turn, the end mark included."""
    ids, sampled = encode_pieces(tokenizer, demonstration.pieces(tokenizer))
    entries = np.flatnonzero(sampled).astype(np.int32)
    return Branch(
        tokens=np.array(ids, np.int32),
        entries=entries,
        logprobs=np.zeros(len(entries), np.float32),
        versions=np.zeros(len(entries), np.int32),
    )


def _fill(filled: _Filled, recordings: Mapping[str, Recording]) -> Filled:
    """ValueError when there are not as many words as blanks, LookupError for an unknown recording."""
    recording = recordings[filled.of]
    words = dict(zip(recording.blanks, filled.words, strict=True))
    return Filled(recording, words, filled.flawed, filled.held_out)


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of the texts, the longest that fits."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))
