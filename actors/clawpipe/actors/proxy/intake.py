"""A request's body: taken in with bounds on its size, its time and its cost, unpacked and read as JSON.

One rollout's bad body must not cost the others anything: large ones are read in a thread, one at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio
import anyio.to_thread

from clawpipe.actors.proxy.dialects.dialect import may_hold_halves
from clawpipe.actors.proxy.messages import CallError, Fault
from clawpipe.actors.proxy.stream import Receive

MAX_BODY_BYTES = 8 * 1024**2  # a full window of 64K tokens is well under one MiB
MAX_DRAINED_BYTES = 8 * MAX_BODY_BYTES  # of a body that is too large: a client reads its answer when it is done
MAX_OPENINGS = 300_000  # of lists and objects, which cost more than their bytes
BODY_TIMEOUT_S = 60.0
MAX_ESCAPED_OPENINGS = 30_000  # where surrogates are escaped: that is read the slow way, which keeps others waiting
INLINE_BYTES = 256 * 1024  # larger bodies take milliseconds
INLINE_ESCAPED_BYTES = 32 * 1024

T = TypeVar("T")


class Intake:
    """Takes in the bodies of all rollouts."""

    def __init__(self, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._large = anyio.CapacityLimiter(1)

    async def take(self, headers: Mapping[str, str], receive: Receive, client_gone: anyio.Event) -> bytes:
        """The body's bytes, unpacked. CallError when they are not to be had, or are declared to be no JSON."""
        try:
            with anyio.fail_after(self._timeout_s):
                data = await _all(receive, client_gone)
        except TimeoutError as err:
            raise CallError(Fault.SLOW, f"The body did not come within {self._timeout_s:g} s.") from err
        _require_json(headers.get("content-type", ""))
        return await self._unpacked(data, headers.get("content-encoding", "identity").strip().lower())

    async def read(self, data: bytes, reader: Callable[[bytes], T]) -> T:
        """What `reader` makes of the body. In a thread when that takes long."""
        escaped = may_hold_halves(data)
        most = MAX_ESCAPED_OPENINGS if escaped else MAX_OPENINGS
        if data.count(b"[") + data.count(b"{") > most:
            raise CallError(Fault.TOO_LARGE, f"The body has more than {most} lists and objects.")
        if len(data) <= (INLINE_ESCAPED_BYTES if escaped else INLINE_BYTES):
            return reader(data)
        return await anyio.to_thread.run_sync(reader, data, limiter=self._large)

    async def _unpacked(self, data: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return data
        if encoding != "gzip":
            raise CallError(Fault.NOT_JSON, f"The content encoding {encoding!r} is not supported; send gzip or none.")
        return await anyio.to_thread.run_sync(_gunzip, data, limiter=self._large)


async def _all(receive: Receive, client_gone: anyio.Event) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= MAX_DRAINED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            client_gone.set()
            raise CallError(Fault.INVALID, "The body ended early.")
        part = message.get("body", b"")
        size, more = size + len(part), message.get("more_body", False)
        if size <= MAX_BODY_BYTES:
            parts.append(part)
    if size > MAX_BODY_BYTES:
        raise _too_large()
    return b"".join(parts)


def _require_json(content_type: str) -> None:
    """A body that is declared to be nothing in particular is taken for JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise CallError(Fault.NOT_JSON, f"The content type must be application/json, not {kind[:100]!r}.")


def _gunzip(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        unpacked = unpacker.decompress(data, MAX_BODY_BYTES + 1)
    except zlib.error as err:
        raise CallError(Fault.INVALID, f"The body is not valid gzip: {err}") from err
    if len(unpacked) > MAX_BODY_BYTES:
        raise _too_large()
    if not unpacker.eof:
        raise CallError(Fault.INVALID, "The body is not valid gzip: it ends early.")
    return unpacked


def _too_large() -> CallError:
    return CallError(Fault.TOO_LARGE, f"The body has more than {MAX_BODY_BYTES} bytes.")
