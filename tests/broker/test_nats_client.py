"""What other programs may do to a connection."""

from __future__ import annotations

import socket

import anyio
import pytest
from broker_scripts import call, set_up, take

from clawpipe.pipeline.records import Flaw

pytestmark = pytest.mark.anyio

CONNECT = b'CONNECT {"auth_token": "%s", "verbose": false, "pedantic": false}\r\n'


def publish_raw(server, subject: bytes, body: bytes) -> None:
    """A message as no client library would send it."""
    host, port = server.url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.recv(4096)
        message = b"PUB %s %d\r\n%s\r\n" % (subject, len(body), body)
        connection.sendall(CONNECT % server.token.encode() + message + b"PING\r\n")
        assert connection.recv(4096) == b"PONG\r\n"


async def test_a_subject_that_is_no_utf_8_does_not_stop_the_reading(nats_server):
    async with set_up(nats_server) as broker:
        publish_raw(nats_server, b"clawpipe.records.call.r-\xff\xfe-0", b"x")
        await broker.publish_call(call("r-1", 0))
        with anyio.fail_after(10):
            bad, good = await take(broker.records(), 2)
        assert (bad.flaw, bad.subject) == (Flaw.UNREADABLE, "clawpipe.records.call.r-\ufffd\ufffd-0")
        assert good.record == call("r-1", 0)
        await broker.set_aside(bad.dead(bad.flaw, bad.detail))
        assert await broker.dead_letters() == {"unreadable": 1}
