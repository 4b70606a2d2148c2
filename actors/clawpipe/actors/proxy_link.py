"""A slot's end of the link to the proxy (`link`), under trio: it asks, the proxy answers."""

from __future__ import annotations

import array
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from clawpipe.actors import link

T = TypeVar("T")
Reply = TypeVar("Reply", bound=link.ToSlot)


class LinkLost(Exception):
    """The proxy is gone, or answered out of order: whatever this slot was doing is given up."""


class ProxyLink:
    """One connection. Made by `connect`."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock

    async def ask(self, message: link.ToProxy, *kinds: type[Reply], listener: socket.socket | None = None) -> Reply:
        """Sends one message, with a socket if one is given, and returns the answer, one of `kinds`. LinkLost."""
        try:
            await self._send(link.encode(message), listener)
            data = await self._sock.recv(link.MAX_PACKET_BYTES)
            reply = link.decode_to_slot(data) if data else None
        except (OSError, msgspec.MsgspecError) as err:
            raise LinkLost(f"the proxy did not answer {type(message).__name__}: {err}") from err
        if reply is None:
            raise LinkLost(f"the proxy closed the link at {type(message).__name__}")
        if not isinstance(reply, kinds):
            raise LinkLost(f"the proxy answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    async def guard(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does work that does not use the link; LinkLost, and the work is cancelled, when the proxy leaves."""
        results: list[T] = []
        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_readable, nursery.cancel_scope)
            try:
                results.append(await work())
            except Exception as err:  # raised again below, outside the nursery, which would wrap it
                failures.append(err)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if not results:
            raise LinkLost("the proxy left during a rollout")
        return results[0]

    async def _cancel_when_readable(self, scope: trio.CancelScope) -> None:
        """Nothing is asked, so there is nothing to read but the end."""
        await trio.lowlevel.wait_readable(self._sock)
        scope.cancel()

    async def _send(self, data: bytes, listener: socket.socket | None) -> None:
        if listener is None:
            await self._sock.send(data)
            return
        rights = array.array("i", [listener.fileno()])
        await self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@asynccontextmanager
async def connect(path: Path) -> AsyncIterator[ProxyLink]:
    """The connection, for as long as the block lasts. OSError when no proxy listens at `path`."""
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        await sock.connect(str(path))
        yield ProxyLink(sock)
