"""Reads a JetStream stream for ever: the part of `broker` that outlives lost connections and restarted servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import anyio
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

FETCH_WAIT_S = 2.0
MORE_WAIT_S = 0.02
CONSUMER_IDLE_S = 60.0
RETRY_S = 0.2
RECORDS_PER_FETCH = 256

# What is raised while the server cannot be reached, and passes.
LOST = (
    nats.errors.ConnectionClosedError,
    nats.errors.NoServersError,
    nats.errors.StaleConnectionError,
    nats.errors.NoRespondersError,
    nats.errors.TimeoutError,
    nats.errors.OutboundBufferLimitError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.NoStreamResponseError,
    OSError,
)


async def read_stream(js: JetStreamContext, stream: str, subject: str, position: int = 1) -> AsyncGenerator[Msg, None]:
    """The messages of a stream from sequence `position` on, for ever, whatever happens to the server."""
    while True:
        sub = await _subscribe(js, stream, subject, max(1, position))
        try:
            while True:
                for msg in await _fetch(sub):
                    position = int(msg.metadata.sequence.stream) + 1
                    yield msg
        except (*LOST, nats.js.errors.Error):
            await anyio.sleep(RETRY_S)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await unsubscribe(sub)


async def _subscribe(js: JetStreamContext, stream: str, subject: str, position: int) -> Any:
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=position,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=CONSUMER_IDLE_S,
        mem_storage=True,
    )
    while True:
        try:
            return await js.pull_subscribe(subject, stream=stream, config=config)
        except (*LOST, nats.js.errors.ServerError):
            await anyio.sleep(RETRY_S)


async def _fetch(sub: Any) -> list[Msg]:
    """At least one message, or none after FETCH_WAIT_S; more only if they are there already.

    A consumer that is gone (server restarted) shows as an error of `consumer_info`, which the caller handles.
    """
    try:
        first: list[Msg] = await sub.fetch(1, timeout=FETCH_WAIT_S)
    except TimeoutError:
        await sub.consumer_info()
        return []
    try:
        more: list[Msg] = await sub.fetch(RECORDS_PER_FETCH, timeout=MORE_WAIT_S)
        return first + more
    except TimeoutError:
        return first


async def unsubscribe(sub: Any) -> None:
    """Ends a subscription whose server may be gone."""
    with suppress(nats.errors.Error, OSError):
        await sub.unsubscribe()
