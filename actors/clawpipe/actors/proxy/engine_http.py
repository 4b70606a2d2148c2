"""The HTTP client to the engines: head and body of a call leave in one piece, which wakes an engine once.

A lost connection is httpx's `TransportError`, as everywhere in `actors`: `EnginePool` sends the next calls elsewhere.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import aiohttp
import httpx
import numpy as np
from msgspec import Struct

from clawpipe.pipeline.records import IntArray

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0  # vLLM closes idle connections after 5 s
FIRST_NUMBERS = 2**18  # more than most vocabularies have


class EngineReply(Struct, frozen=True):
    """What an engine answered."""

    url: str
    status: int
    body: bytes


class EngineClient:
    """Keeps its connections between calls: `async with EngineClient() as client`.

    It has no limit on the time of a call: a turn may take as long as it takes, and a dead engine resets the connection.
    """

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"content-type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, url: str, body: bytes) -> EngineReply:
        """The whole answer, whatever its status. httpx.TransportError when there is none."""
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                return EngineReply(url, response.status, await response.read())
        except (aiohttp.ClientError, OSError) as err:
            raise httpx.TransportError(f"{url}: {err!r}") from err


class Numbers:
    """Writes token ids as JSON by looking each up: a prompt of 10000 takes some 30 us, a tenth of what a list takes.

    Every number has eight bytes, white space in front and a comma behind.
    """

    def __init__(self) -> None:
        self._written = _written(FIRST_NUMBERS)

    def listed(self, ids: IntArray) -> bytes:
        """A JSON list."""
        if not len(ids):
            return b"[]"
        if (largest := int(ids.max())) >= len(self._written):
            self._written = _written(2 * largest)
        return b"[" + self._written[ids].tobytes()[:-1] + b"]"


def _written(size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64 [size]: the eight bytes of each number, taken for one of their own."""
    assert size <= 10**7, "a token id of eight digits"
    return np.frombuffer(b"".join(b"%7d," % number for number in range(size)), np.int64)
