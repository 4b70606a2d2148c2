"""Faults between a harness and the proxy, as an ASGI application around the proxy's own: tests alone have it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import anyio

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

NOTICE_S = 0.05


@dataclass(frozen=True)
class Cut:
    """The connection ends behind the `times`-th event that holds `after`; before the first one when `times` is 0.

    `noticed`: the proxy learns of it before it has sent the rest, as it does when the rest is long or late.
    """

    after: bytes = b""
    times: int = 1
    noticed: bool = True


@dataclass(frozen=True)
class Refuse:
    """The harness gets this status. `late`: only after the proxy has answered, to nobody."""

    status: int
    message: str = "scripted"
    late: bool = False


Fault = Cut | Refuse


@dataclass
class Seen:
    """A request as it came over the wire, and the status of its answer; 0: none was given."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int = 0


@dataclass
class Faulty:
    """Around `app`: the n-th POST to a model's path gets the fault `faults[n]`."""

    app: App
    faults: dict[int, Fault] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        fault = self.faults.get(len(self.seen))
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        seen = Seen(scope["path"], headers, json.loads(body))
        self.seen.append(seen)
        again = _Again(body, receive)
        send = _noting(seen, send)
        match fault:
            case None:
                await self.app(scope, again, send)
            case Cut():
                await self.app(scope, again, _Cutting(fault, send, again).send)
            case Refuse(late=False):
                await _refuse(send, fault)
            case Refuse():
                again.gone.set()
                await self.app(scope, again, _nowhere)
                await _refuse(send, fault)


class _Again:
    """`receive` of a body that was read before; the client is there until it goes, or `gone` is set."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.gone = anyio.Event()
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        async with anyio.create_task_group() as group:
            group.start_soon(self._real_end)
            await self.gone.wait()
            group.cancel_scope.cancel()
        return {"type": "http.disconnect"}

    async def _real_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


class _Cutting:
    """Lets events through one by one until the fault's place; what follows goes nowhere, and the client is gone.

    A response that is left incomplete is closed by the server, which is what a cut connection looks like.
    """

    def __init__(self, fault: Cut, send: Send, again: _Again) -> None:
        self._left = fault.times
        self._after = fault.after
        self._noticed = fault.noticed
        self._send = send
        self._again = again

    async def send(self, message: Message) -> None:
        if self._again.gone.is_set():
            return
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._cut_at_zero()
            return
        for event in message.get("body", b"").split(b"\n\n"):
            if not event or self._again.gone.is_set():
                continue
            await self._send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})
            self._left -= self._after in event
            await self._cut_at_zero()

    async def _cut_at_zero(self) -> None:
        if self._left <= 0:
            self._again.gone.set()
            if self._noticed:
                await anyio.sleep(NOTICE_S)


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _noting(seen: Seen, send: Send) -> Send:
    async def noting(message: Message) -> None:
        seen.status = message.get("status", seen.status)
        await send(message)

    return noting


async def _nowhere(message: Message) -> None:
    """The client is gone."""


async def _refuse(send: Send, fault: Refuse) -> None:
    kinds = {429: "rate_limit_error", 529: "overloaded_error"}
    error = {"type": kinds.get(fault.status, "api_error"), "message": fault.message, "code": None, "param": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": fault.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
