"""Serves HTTP on a listening socket that was handed over: one uvicorn protocol per connection, no server around it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

IDLE_CONNECTION_S = 600  # harnesses keep connections between turns; a closed one costs them a retry


def serving(app: Callable[..., Any]) -> uvicorn.Config:
    """What all listeners share."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what clients do wrong is no event of ours
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
    )
    config.load()
    return config


class _Connection(H11Protocol):
    """A connection that is closed at once when it is one too many."""

    def __init__(self, config: uvicorn.Config, served: ServerState, state: dict[str, Any], most: int) -> None:
        super().__init__(config, served, state)
        self._most = most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self._most:
            super().connection_made(transport)
        else:
            self.transport = transport  # which the base class closes when it is told that the connection is lost
            transport.abort()


class Listener:
    """One rollout's listening socket. Make it with `open`; `state` is what the application finds in its scope."""

    def __init__(self, sock: socket.socket, server: asyncio.Server, connections: ServerState) -> None:
        self._sock = sock
        self._server = server
        self._connections = connections

    @classmethod
    async def open(
        cls, sock: socket.socket, config: uvicorn.Config, state: dict[str, Any], max_connections: int
    ) -> Listener:
        """Starts to accept connections, `max_connections` at a time. OSError when `sock` does not listen."""
        sock.setblocking(False)
        served = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(config, served, state, max_connections), sock=sock
        )
        return cls(sock, server, served)

    def fence(self) -> None:
        """No new connection from now on, though others hold the socket too; those there are stay."""
        if self._server.is_serving():
            self._sock.shutdown(socket.SHUT_RDWR)
            self._server.close()

    def close(self) -> None:
        """Fences, and cuts every connection."""
        self.fence()
        for connection in list(self._connections.connections):
            connection.transport.abort()
