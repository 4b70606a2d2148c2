"""Sends a call's answer, whole or as a stream of events, and keeps the connection alive until there is one.

Streaming is buffered: the turn is sampled, parsed and recorded first, then goes out in the protocol's events.
Meanwhile the client of a stream gets the headers almost at once; later every client gets a sign of life every
`keepalive_s`: for a stream the dialect's own, for a whole answer white space, which JSON allows in front of a value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

import anyio

from clawpipe.actors.proxy.dialects.dialect import Dialect
from clawpipe.actors.proxy.identity import Call
from clawpipe.actors.proxy.messages import Answer, Ask, CallError

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
AT_ONCE_S = 0.005  # the head waits as long: the engine has the call by then, and samples while the head is sent
SHORT_BYTES = 48 * 1024  # the transport takes as much at once, whether the client reads or not


class Reply:
    """One HTTP response. `delivered`: its last byte went to a client that was still there."""

    def __init__(self, send: Send, client_gone: anyio.Event) -> None:
        self._send = send
        self._client_gone = client_gone
        self.begun = False

    async def begin(
        self, status: int, kind: bytes, length: int | None = None, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Status and headers, with `more` of them."""
        self.begun = True
        headers = [(b"content-type", kind), (b"cache-control", b"no-store"), *more]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """A part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> bool:
        """The last part of the body; whether the client was there to take it.

        A client that does not read makes this wait, until it reads or its connection is cut.
        """
        present = not self._client_gone.is_set()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        return present and not self._client_gone.is_set()

    async def whole(self, status: int, data: bytes, more: Sequence[tuple[bytes, bytes]] = ()) -> bool:
        """A JSON response in one, with `more` headers."""
        await self.begin(status, JSON, len(data), more)
        return await self.end(data)


async def deliver(reply: Reply, dialect: Dialect, ask: Ask, call: Call, keepalive_s: float) -> None:
    """Waits for the call's outcome and sends it.

    An error that comes when the headers of a whole answer are out cannot be said any more: the response is left
    incomplete, and the server closes the connection, which clients take for a fault and try again.
    """
    with anyio.move_on_after(AT_ONCE_S if ask.stream else keepalive_s):
        await call.done.wait()
    if ask.stream:
        assert call.head is not None
        opening = dialect.opening(ask, call.head)
        await reply.begin(200, EVENTS)
        if not call.done.is_set():
            if opening:
                await reply.write(opening)
            opening = b""
            await _wait(reply, call, dialect.keepalive, keepalive_s)
        await _send_events(reply, dialect, ask, call, opening)
    else:
        if not call.done.is_set():
            await reply.begin(200, JSON)
            await _wait(reply, call, b" ", keepalive_s)
        await _send_whole(reply, dialect, ask, call)


async def _wait(reply: Reply, call: Call, sign_of_life: bytes, keepalive_s: float) -> None:
    while not call.done.is_set():
        await reply.write(sign_of_life)
        with anyio.move_on_after(keepalive_s):
            await call.done.wait()


async def _send_events(reply: Reply, dialect: Dialect, ask: Ask, call: Call, opening: bytes) -> None:
    """The last event of a long answer goes out when the client has read most of it, so that it is known to be there."""
    if isinstance(call.outcome, CallError):
        await reply.end(opening + dialect.error_event(call.outcome))
        return
    *events, last = _events(dialect, ask, call)
    data = opening + b"".join(events)
    if len(data) > SHORT_BYTES:
        await reply.write(data)
        data = b""
    if await reply.end(data + last):
        call.deliver()


async def _send_whole(reply: Reply, dialect: Dialect, ask: Ask, call: Call) -> None:
    if isinstance(call.outcome, CallError):
        if not reply.begun:
            await reply.whole(*dialect.error(call.outcome))
        return
    body = dialect.whole(ask, _answer(call))
    if await (reply.end(body) if reply.begun else reply.whole(200, body)):
        call.deliver()


def _events(dialect: Dialect, ask: Ask, call: Call) -> Iterator[bytes]:
    return dialect.events(ask, _answer(call))


def _answer(call: Call) -> Answer:
    assert isinstance(call.outcome, Answer)
    return call.outcome
