"""The HTTP surface of a rollout's listener: paths to dialects, errors in the dialect's own form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import anyio

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.calls import Calls
from clawpipe.actors.proxy.dialects.anthropic import Messages, counted
from clawpipe.actors.proxy.dialects.anthropic_request import read_count
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.dialects.dialect import Dialect, read_body
from clawpipe.actors.proxy.dialects.models import Models, is_anthropic
from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.intake import Intake
from clawpipe.actors.proxy.messages import Ask, CallError, Fault
from clawpipe.actors.proxy.stream import Receive, Reply, Send, deliver

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RETRY_AFTER_S = 1


class Endpoint:
    """The ASGI application of all listeners; the connection's listener says which rollout is calling.

    An exception that is no answer to a client is a fault of the proxy: `crash` is told, and ends the process.
    """

    def __init__(self, calls: Calls, model: str, keepalive_s: float, crash: Callable[[Exception], None]) -> None:
        self._calls = calls
        self._model = model
        self._models = Models(model)
        self._intake = Intake()
        self._keepalive_s = keepalive_s
        self._crash = crash
        self._dialects: dict[str, Dialect] = {
            "/v1/chat/completions": Chat(),
            "/v1/responses": Responses(),
            MESSAGES: Messages(),
            COUNT_TOKENS: Messages(),
        }

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
        reply, headers = Reply(send, client_gone), _headers(scope)
        dialect = self._dialect(scope["path"], headers)
        try:
            if scope["method"] == "GET" and (found := self._models.get(scope["path"], headers)):
                await reply.whole(200, found)
                return
            if scope["method"] != "POST" or scope["path"] not in self._dialects:
                raise CallError(Fault.NOT_FOUND, f"Unknown request URL: {scope['method']} {scope['path']}.")
            data = await self._intake.take(headers, receive, client_gone)
        except CallError as err:
            await _refuse(reply, dialect, err)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, client_gone)
            await self._answer(session, dialect, scope["path"], headers, data, reply)
            group.cancel_scope.cancel()

    def _dialect(self, path: str, headers: dict[str, str]) -> Dialect:
        """The path's; for an unknown path the one that the client seems to speak, which then words the error."""
        anthropic = path.startswith(f"{MESSAGES}/") or is_anthropic(headers)
        return self._dialects.get(path) or (Messages() if anthropic else Chat())

    async def _answer(
        self, session: Session, dialect: Dialect, path: str, headers: dict[str, str], data: bytes, reply: Reply
    ) -> None:
        try:
            read = read_count if path == COUNT_TOKENS else dialect.read
            body, ask = await self._intake.read(data, lambda packed: self._ask(read, packed))
            if path == COUNT_TOKENS:
                await reply.whole(200, counted(await self._calls.count(session, ask)))
                return
            call = await self._calls.start(session, ask, ModelCall(path=path, headers=headers, body=body))
        except CallError as err:
            await _refuse(reply, dialect, err)
            return
        except RecursionError:  # read as JSON, it was just not too deep; whatever walks it then needs more frames
            await _refuse(reply, dialect, CallError(Fault.INVALID, "The body is nested too deeply."))
            return
        await deliver(reply, dialect, ask, call, self._keepalive_s)

    def _ask(self, read: Callable[[Mapping[str, Any]], Ask], data: bytes) -> tuple[dict[str, Any], Ask]:
        """The body and what it asks for. CallError when it is no request, or one for a model that is not here."""
        body = read_body(data)
        ask = read(body)
        if ask.model not in ("", self._model):
            raise CallError(Fault.NO_MODEL, f"The model {ask.model[:100]!r} does not exist.", "model")
        return body, ask


async def _refuse(reply: Reply, dialect: Dialect, error: CallError) -> None:
    """An error as the whole answer. A client that was too slow is not waited for any more."""
    more = {
        Fault.BUSY: [(b"retry-after", str(RETRY_AFTER_S).encode())],
        Fault.SLOW: [(b"connection", b"close")],
        Fault.TOO_LARGE: [(b"connection", b"close")],
    }
    await reply.whole(*dialect.error(error), more.get(error.fault, []))


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Names in lower case; of a header that comes twice the last."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def _watch(receive: Receive, client_gone: anyio.Event) -> None:
    """Notices that the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client_gone.set()
