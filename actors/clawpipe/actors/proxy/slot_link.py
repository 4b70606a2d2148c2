"""The proxy's end of a connection to one of the supervisor's slots: packets, and the listening sockets in them."""

from __future__ import annotations

import socket
from typing import TypeVar

import anyio
import msgspec

from clawpipe.actors import link

FD_FLAGS = socket.MSG_CMSG_CLOEXEC

M = TypeVar("M", bound=link.ToProxy)


class LinkBroken(Exception):
    """The slot is gone, or does not keep to the protocol."""


class SlotLink:
    """One connection to a slot: packets in and out, and the sockets that come with them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def receive(self) -> tuple[link.ToProxy, socket.socket | None]:
        """The next message and the listening socket that came with it. LinkBroken at the end."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, link.MAX_PACKET_BYTES, 1, FD_FLAGS)
                break
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
            except OSError as err:
                raise LinkBroken(str(err)) from err
        if not data:
            raise LinkBroken("closed")
        listener = socket.socket(fileno=fds[0]) if fds else None
        try:
            return link.decode_to_proxy(data), listener
        except msgspec.MsgspecError as err:
            _close(listener)
            raise LinkBroken(f"a packet that is none: {err}") from err

    async def expect(self, *kinds: type[M]) -> tuple[M, socket.socket | None]:
        """The next message, which must be one of `kinds`; a socket comes with Open alone."""
        message, listener = await self.receive()
        if not isinstance(message, kinds) or (listener is None) is isinstance(message, link.Open):
            _close(listener)
            raise LinkBroken(f"{type(message).__name__} out of order")
        return message, listener

    async def send(self, message: link.ToSlot) -> None:
        """Sends one message. LinkBroken when nobody is there."""
        data = link.encode(message)
        while True:
            try:
                self._sock.send(data)
                return
            except BlockingIOError:
                await anyio.wait_writable(self._sock)
            except OSError as err:
                raise LinkBroken(str(err)) from err

    def broken(self) -> bool:
        """Whether the slot has closed its end."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
