"""Pieces of text to token ids, each on its own and each once.

What a conversation grows by is all that a later call encodes; what rollouts share (a system prompt, tools) is
encoded for the first of them.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import anyio.to_thread
import numpy as np

from clawpipe.pipeline.records import IntArray

CACHED_TOKENS = 32_000_000  # over all rollouts. With less than they hold, each would push out what the next one needs
INLINE_BYTES = 4_000  # longer pieces are encoded in a thread: about a millisecond and more
PROBES = ("a b\n", "\n c", " é", "<x>")


class Encoder:
    """A bounded, least-recently-used cache over all rollouts.

    `end_of_turn`: a token at which long texts are cut, so that what stands before an end that is new is found again.
    It is left alone where the tokenizer lets it change the tokens beside it.
    """

    def __init__(self, tokenizer: Any, cached_tokens: int = CACHED_TOKENS, end_of_turn: str = "") -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._cache: OrderedDict[bytes, IntArray] = OrderedDict()
        self._room = cached_tokens
        self._in_the_making: dict[bytes, anyio.Event] = {}  # pieces that a thread encodes now; others wait for it
        self._end = end_of_turn if end_of_turn and self._stands_alone(end_of_turn) else ""

    async def encode(self, text: str) -> IntArray:
        """int32 [n], read-only: the ids of this piece alone, without the special tokens that some models add."""
        data = text.encode("utf-8", "replace")  # a model may have written half a surrogate pair into JSON
        if not self._end or len(data) <= INLINE_BYTES:
            return await self._encoded(data)
        *turns, rest = data.split(self._end.encode())
        pieces = [*(turn + self._end.encode() for turn in turns), *([rest] if rest else [])]
        return np.concatenate([await self._encoded(piece) for piece in pieces])

    async def _encoded(self, data: bytes) -> IntArray:
        key = blake2b(data, digest_size=16).digest()
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return known
        if len(data) <= INLINE_BYTES:
            return self._remember(key, self._ids(data))
        if (made := self._in_the_making.get(key)) is not None:
            await made.wait()
            return await self._encoded(data)  # known now, but for one that was given up or has been dropped again
        self._in_the_making[key] = anyio.Event()
        try:
            return self._remember(key, await anyio.to_thread.run_sync(self._ids, data))
        finally:
            self._in_the_making.pop(key).set()

    def _ids(self, data: bytes) -> IntArray:
        ids = np.array(self._encode(data.decode(), add_special_tokens=False).ids, np.int32)
        ids.flags.writeable = False
        return ids

    def _remember(self, key: bytes, ids: IntArray) -> IntArray:
        self._cache[key] = ids
        self._room -= len(ids)
        while self._room < 0:
            _, dropped = self._cache.popitem(last=False)
            self._room += len(dropped)
        return ids

    def _stands_alone(self, token: str) -> bool:
        """Whether texts on both sides of the token have the tokens that they have by themselves."""

        def ids(text: str) -> bytes:
            return self._ids(text.encode()).tobytes()

        return all(ids(a + token + b) == ids(a + token) + ids(b) for a in PROBES for b in PROBES)
