"""Pieces of text to token ids, each on its own and each once.

What a conversation grows by is all that a later call encodes; what rollouts share (a system prompt, tools) is
encoded for the first of them. What takes longer than a moment is done in a thread: one rollout's texts must not
keep the others waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import numpy as np

from clawpipe.pipeline.records import IntArray

CACHED_TOKENS = 32_000_000  # over all rollouts. With less than they hold, each would push out what the next one needs
INLINE_BYTES = 4_000  # of all that a call has to encode; more takes milliseconds, and a thread
INLINE_TEXTS = 500  # and so do many texts, or long ones, that are only cut and looked up
INLINE_CHARS = 256_000
MAX_CUTS = 64  # of one text. A text may hold as many ends as it has room for; behind the last cut it is one piece
PROBES = ("a b\n", "\n c", " é", "<x>")
CONVERTED_IDS = 10_000  # at a time: a thread that makes an array keeps all others waiting meanwhile

Pieces = dict[bytes, bytes]  # their UTF-8 by digest, in order


class Encoder:
    """A bounded, least-recently-used cache over all rollouts.

    `end_of_turn`: a token at which long texts are cut, so that what stands before an end that is new is found again.
    It is left alone where the tokenizer lets it change the tokens beside it.
    """

    def __init__(self, tokenizer: Any, cached_tokens: int = CACHED_TOKENS, end_of_turn: str = "") -> None:
        self._encode_batch = tokenizer.backend_tokenizer.encode_batch_fast  # unlike `encode` it lets other threads run
        self._cache: OrderedDict[bytes, IntArray] = OrderedDict()
        self._room = cached_tokens
        self._in_the_making: dict[bytes, anyio.Event] = {}  # pieces that are encoded now; others wait for them
        self._end = end_of_turn.encode() if end_of_turn and self._stands_alone(end_of_turn) else b""

    async def encode(self, text: str) -> IntArray:
        """int32 [n], read-only: the ids of this piece alone, without the special tokens that some models add."""
        [ids] = await self.encode_all([text])
        return ids

    async def encode_all(self, texts: Sequence[str]) -> list[IntArray]:
        """`encode` for each of them; what is not known yet is encoded at once."""
        if len(texts) <= INLINE_TEXTS and sum(map(len, texts)) <= INLINE_CHARS:
            cut = self._cut_all(texts)
        else:
            cut = await anyio.to_thread.run_sync(self._cut_all, texts)
        ids = await self._encoded({key: data for pieces in cut for key, data in pieces})
        return [_joined([ids[key] for key, _ in pieces]) for pieces in cut]

    def _cut_all(self, texts: Sequence[str]) -> list[list[tuple[bytes, bytes]]]:
        """Per text its pieces, with their digests."""
        return [[(blake2b(each, digest_size=16).digest(), each) for each in self._cut(text)] for text in texts]

    def _cut(self, text: str) -> list[bytes]:
        data = text.encode("utf-8", "replace")  # a model may have written half a surrogate pair into JSON
        if not self._end or len(data) <= INLINE_BYTES:
            return [data]
        *turns, rest = data.split(self._end, MAX_CUTS)
        return [*(turn + self._end for turn in turns), *([rest] if rest else [])]

    async def _encoded(self, pieces: Pieces) -> dict[bytes, IntArray]:
        found = self._known(pieces)
        while missing := {key: data for key, data in pieces.items() if key not in found}:
            if own := {key: data for key, data in missing.items() if key not in self._in_the_making}:
                found |= await self._make(own)
            else:
                await self._in_the_making[next(iter(missing))].wait()
                found |= self._known(missing)  # all but those that were given up or have been dropped again
        return found

    def _known(self, pieces: Iterable[bytes]) -> dict[bytes, IntArray]:
        found = {key: ids for key in pieces if (ids := self._cache.get(key)) is not None}
        for key in found:
            self._cache.move_to_end(key)
        return found

    async def _make(self, pieces: Pieces) -> dict[bytes, IntArray]:
        done = anyio.Event()
        self._in_the_making |= dict.fromkeys(pieces, done)
        try:
            if sum(map(len, pieces.values())) <= INLINE_BYTES:
                made = self._ids(pieces)
            else:
                made = await anyio.to_thread.run_sync(self._ids, pieces)
            self._remember(made)
            await anyio.lowlevel.checkpoint()  # a conversation may consist of many that are made without a wait
            return made
        finally:
            for key in pieces:
                del self._in_the_making[key]
            done.set()

    def _ids(self, pieces: Mapping[bytes, bytes]) -> dict[bytes, IntArray]:
        texts = [data.decode() for data in pieces.values()]
        encodings = self._encode_batch(texts, add_special_tokens=False)
        return {key: _array(encoding.ids) for key, encoding in zip(pieces, encodings, strict=True)}

    def _remember(self, made: Mapping[bytes, IntArray]) -> None:
        self._cache |= made
        self._room -= sum(map(len, made.values()))
        while self._room < 0:
            _, dropped = self._cache.popitem(last=False)
            self._room += len(dropped)

    def _stands_alone(self, token: str) -> bool:
        """Whether texts on both sides of the token have the tokens that they have by themselves."""

        def ids(text: str) -> bytes:
            return self._ids({b"": text.encode()})[b""].tobytes()

        return all(ids(a + token + b) == ids(a + token) + ids(b) for a in PROBES for b in PROBES)


def _array(ids: list[int]) -> IntArray:
    chunks = [np.array(ids[at : at + CONVERTED_IDS], np.int32) for at in range(0, len(ids), CONVERTED_IDS)]
    return _read_only(_joined(chunks) if chunks else np.zeros(0, np.int32))


def _joined(parts: list[IntArray]) -> IntArray:
    """A text that is one piece is that piece itself."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read_only(ids: IntArray) -> IntArray:
    ids.flags.writeable = False
    return ids
