"""The HTTP client to the engines."""

from __future__ import annotations

import json
import socket

import anyio
import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy.engine_http import FIRST_NUMBERS, EngineClient, Numbers

pytestmark = pytest.mark.anyio

NUMBERS = Numbers()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2 * FIRST_NUMBERS), max_size=30))
def test_a_list_of_ids_is_written_as_the_json_that_it_is(ids):
    assert json.loads(NUMBERS.listed(np.array(ids, np.int32))) == ids


async def answer(listener: socket.socket, *parts: bytes) -> bytes:
    """Takes one connection and its first packet, sends the parts and closes."""
    listener.setblocking(False)
    await anyio.wait_readable(listener)
    sock, _ = listener.accept()
    with sock:
        sock.setblocking(False)
        await anyio.wait_readable(sock)
        asked = sock.recv(2**20)
        for part in parts:
            sock.send(part)
    return asked


async def test_a_call_leaves_in_one_packet_and_its_answer_comes_back_whatever_its_status():
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        async with EngineClient() as client, anyio.create_task_group() as group:

            async def serve() -> None:
                asked.append(await answer(listener, b"HTTP/1.1 503 No\r\ncontent-length: 3\r\n\r\n", b"why"))

            group.start_soon(serve)
            reply = await client.post(url, b"[1, 2]")
    assert (reply.status, reply.body) == (503, b"why")
    assert asked[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert asked[0].endswith(b"\r\n\r\n[1, 2]")


@pytest.mark.parametrize(
    "parts",
    [(), (b"HTTP/1.1 200 OK\r\n",), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"half"), (b"no HTTP\r\n\r\n",)],
    ids=["none", "half a head", "half a body", "nonsense"],
)
async def test_an_answer_that_does_not_come_whole_is_a_lost_connection(parts):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        async with EngineClient() as client, anyio.create_task_group() as group:
            group.start_soon(answer, listener, *parts)
            with pytest.raises(httpx.TransportError, match="127"):
                await client.post(url, b"{}")


async def test_an_engine_that_is_not_there_is_a_lost_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with EngineClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.post(f"http://127.0.0.1:{port}/x", b"{}")
