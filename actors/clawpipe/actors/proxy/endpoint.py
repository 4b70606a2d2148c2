"""The HTTP surface of a rollout's listener: paths to dialects, errors in the dialect's own form."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import anyio

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.calls import Calls
from clawpipe.actors.proxy.dialects.chat import Chat, models
from clawpipe.actors.proxy.dialects.dialect import Dialect, read_body
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.messages import CallError, Fault
from clawpipe.actors.proxy.stream import Receive, Reply, Send, deliver

MAX_BODY_BYTES = 16 * 1024**2  # a full window of 64K tokens is well under one MiB


class Endpoint:
    """The ASGI application of all listeners; the connection's listener says which rollout is calling.

    An exception that is no answer to a client is a fault of the proxy: `crash` is told, and ends the process.
    """

    def __init__(self, calls: Calls, model: str, keepalive_s: float, crash: Callable[[Exception], None]) -> None:
        self._calls = calls
        self._models = models(model)
        self._keepalive_s = keepalive_s
        self._crash = crash
        self._dialects: dict[str, Dialect] = {"/v1/chat/completions": Chat()}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves one request."""
        session: Session = scope["state"]["session"]
        session.reply_begins()
        try:
            await self._serve(session, scope, receive, send)
        except Exception as err:
            self._crash(err)
            raise
        finally:
            session.reply_ends()

    async def _serve(self, session: Session, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        client_gone = anyio.Event()
        reply = Reply(send, client_gone)
        dialect = self._dialects.get(scope["path"], Chat())
        try:
            if (scope["method"], scope["path"]) == ("GET", "/v1/models"):
                await reply.whole(200, self._models)
                return
            if scope["method"] != "POST" or scope["path"] not in self._dialects:
                raise CallError(Fault.NOT_FOUND, f"Unknown request URL: {scope['method']} {scope['path']}.")
            data = await _read(receive, client_gone)
        except CallError as err:
            await reply.whole(*dialect.error(err))
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, client_gone)
            await self._answer(session, dialect, scope, data, reply)
            group.cancel_scope.cancel()

    async def _answer(
        self, session: Session, dialect: Dialect, scope: MutableMapping[str, Any], data: bytes, reply: Reply
    ) -> None:
        try:
            body = read_body(data)
            ask = dialect.read(body)
            wire = ModelCall(path=scope["path"], headers=_headers(scope), body=body)
            call = await self._calls.start(session, ask, wire)
        except CallError as err:
            await reply.whole(*dialect.error(err))
            return
        except RecursionError:  # read as JSON, it was just not too deep; whatever walks it then needs more frames
            await reply.whole(*dialect.error(CallError(Fault.INVALID, "The body is nested too deeply.")))
            return
        await deliver(reply, dialect, ask, call, self._keepalive_s)


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Names in lower case; of a header that comes twice the last."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def _read(receive: Receive, client_gone: anyio.Event) -> bytes:
    """The request's body. CallError when it is too large, or the client left while sending it."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            client_gone.set()
            raise CallError(Fault.INVALID, "The body ended early.")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise CallError(Fault.TOO_LARGE, f"The body has more than {MAX_BODY_BYTES} bytes.")
    return b"".join(parts)


async def _watch(receive: Receive, client_gone: anyio.Event) -> None:
    """Notices that the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client_gone.set()
