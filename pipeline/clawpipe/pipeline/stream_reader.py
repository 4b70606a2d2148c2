"""Reads a JetStream stream for ever: the part of `broker` that outlives lost connections and restarted servers.

The server numbers what it delivers to a consumer, and nothing is acknowledged. So a message that was sent and did
not arrive (a broken connection, a client that was too slow to take it) shows as a gap in these numbers; the reader
then starts a new consumer behind the last message that it gave. A gap in the stream's own sequences is none: other
subjects and purged messages leave them too.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import anyio
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from clawpipe.pipeline.errors import BrokerError

FETCH_WAIT_S = 2.0  # how long the server keeps a request for messages that are not there yet
GRACE_S = 1.0  # for its word that the time is up
EXPIRED = "408"
NO_STREAM = 10059  # the server's number of this error; that of a consumer that is gone is another
CONSUMER_IDLE_S = 60.0  # the server forgets the consumer of a reader that is gone, or stalls for longer
RETRY_S = 0.2
MESSAGES_PER_REQUEST = 256
TOKENS_WITHOUT_DOMAIN = 9

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


async def read_stream(
    client: Client,
    js: JetStreamContext,
    stream: str,
    subject: str,
    position: int = 1,
    *,
    idle_s: float = CONSUMER_IDLE_S,
    wait_s: float = FETCH_WAIT_S,
) -> AsyncGenerator[tuple[int, Msg], None]:
    """The messages of a stream from sequence `position` on, each with its sequence, each once, in order; never ends.

    What is purged before it was read is not given. A caller may take as long as it likes between two messages.
    BrokerError when there is no such stream.
    """
    position = max(1, position)
    while True:
        pull = _Pull(client, js, stream, wait_s)
        try:
            await pull.begin(subject, position, idle_s)
            async with aclosing(pull.messages()) as messages:
                async for sequence, msg in messages:
                    position = sequence + 1
                    yield sequence, msg
        except (*LOST, nats.js.errors.Error) as err:
            if isinstance(err, nats.js.errors.NotFoundError) and err.err_code == NO_STREAM:
                raise BrokerError(f"NATS: stream {stream} is gone; nobody may delete a run's streams") from err
            await anyio.sleep(RETRY_S)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await pull.end()


class _Pull:
    """A consumer of our own, asked for some messages at a time.

    What has come and was not taken waits here: at most MESSAGES_PER_REQUEST, as nothing more is asked for. It wakes
    the reader. (nats-py's own `fetch` makes a task per message, which costs three times all the rest of reading.)
    """

    def __init__(self, client: Client, js: JetStreamContext, stream: str, wait_s: float) -> None:
        self._client = client
        self._js = js
        self._stream = stream
        self._name = uuid.uuid4().hex
        self._wait_s = wait_s
        self._request = b'{"batch": %d, "expires": %d}' % (MESSAGES_PER_REQUEST, wait_s * 1e9)  # in nanoseconds
        self._inbox = client.new_inbox()
        self._sub: Subscription | None = None
        self._waiting: deque[Msg] = deque()
        self._arrived = anyio.Event()

    async def begin(self, subject: str, position: int, idle_s: float) -> None:
        """Makes the consumer."""
        config = ConsumerConfig(
            name=self._name,
            filter_subject=subject,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=position,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=idle_s,
            mem_storage=True,
        )
        await self._js.add_consumer(self._stream, config)
        self._sub = await self._client.subscribe(self._inbox, cb=self._arrive)

    async def messages(self) -> AsyncGenerator[tuple[int, Msg], None]:
        """The consumer's messages, each with its sequence in the stream, until one of them is lost."""
        num_delivered = 0
        while True:
            await self._request_more()
            for _ in range(MESSAGES_PER_REQUEST):
                msg = await self._next()
                if msg is None:
                    if await self._has_lost(num_delivered):
                        return
                    break
                sequence, delivery = _place(msg)
                if delivery != num_delivered + 1:
                    return
                num_delivered = delivery
                yield sequence, msg

    async def end(self) -> None:
        """Stops listening; the server forgets the consumer by itself."""
        if self._sub is not None:
            await unsubscribe(self._sub)

    async def _request_more(self) -> None:
        """Asks for the next messages; those that are not there in time are asked for by the next request."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        await self._client.publish(subject, self._request, self._inbox)

    async def _next(self) -> Msg | None:
        """The next message; None at the end of the request, or when nothing comes at all."""
        if not self._waiting:
            self._arrived = anyio.Event()
            with anyio.move_on_after(self._wait_s + GRACE_S):
                await self._arrived.wait()
        msg = self._waiting.popleft() if self._waiting else None
        if msg is None or msg.reply:
            return msg
        if (msg.headers or {}).get("Status") != EXPIRED:  # as of a consumer that is gone, or a server that ends
            await anyio.sleep(RETRY_S)
        return None

    async def _has_lost(self, num_delivered: int) -> bool:
        """Whether the server has sent more than came. A consumer that is gone is an error."""
        delivered = (await self._js.consumer_info(self._stream, self._name)).delivered
        return delivered is not None and int(delivered.consumer_seq) > num_delivered

    async def _arrive(self, msg: Msg) -> None:
        self._waiting.append(msg)
        self._arrived.set()


def _place(msg: Msg) -> tuple[int, int]:
    """(sequence in the stream, number of this delivery to the consumer).

    They are in the reply subject, $JS.ACK.[domain.account.]stream.consumer.tries.sequence.delivery.time.pending
    and, with a domain, a token more. Reading them here costs a fifth of `Msg.metadata`, which makes dates too.
    """
    tokens = msg.reply.split(".")
    first = 5 if len(tokens) == TOKENS_WITHOUT_DOMAIN else 7
    return int(tokens[first]), int(tokens[first + 1])


async def unsubscribe(sub: Subscription) -> None:
    """Ends a subscription whose server may be gone."""
    with suppress(nats.errors.Error, OSError):
        await sub.unsubscribe()
