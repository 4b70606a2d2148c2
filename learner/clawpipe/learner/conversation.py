"""Rank 0's side of the conversation with the pipeline service, as plain blocking calls.

Torch keeps the main thread; NATS lives in an event loop on a thread of its own, so that the connection stays
alive while an update computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import NatsConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.records import (
    AskCursor,
    BatchReady,
    Chunk,
    Committed,
    Cursor,
    Data,
    Finished,
    Hello,
    LearnerMessage,
    LearnerReply,
    Lease,
    NotYet,
    Ok,
    Stepped,
    StreamCursor,
    WeightVersion,
)
from clawpipe.pipeline.runtime import Runtime

ASK_TIMEOUT_S = 600.0
POLL_S = 0.05
TURN_S = 0.2  # how soon a waiting call notices that it is to stop

Reply = TypeVar("Reply", bound=LearnerReply)


class Conversation:
    """One message, one reply. BrokerError when NATS or the service is gone for longer than the timeout."""

    def __init__(self, portal: BlockingPortal, broker: Broker) -> None:
        self._portal = portal
        self._broker = broker

    def last_weights(self) -> WeightVersion | None:
        """The newest version that this run has announced."""
        return self._portal.call(self._broker.last_weights)

    def publish(self, weights: WeightVersion) -> None:
        """Announces a staged version to the engines."""
        self._portal.call(self._broker.publish_weights, weights)

    def hello(self, *, version: int, updates: int, cursor: StreamCursor) -> None:
        """The learner is up and serves these weights."""
        self._ask(Hello(version=version, updates=updates, cursor=cursor), Ok)

    def lease(self, version: int, *, stop: Callable[[], bool], patience_s: float) -> BatchReady | Finished | None:
        """The next batch. None when there is none within `patience_s`, or `stop` says so."""
        deadline = time.monotonic() + patience_s
        while not stop() and time.monotonic() < deadline:
            future = self._portal.start_task_soon(self._broker.ask, Lease(version=version), ASK_TIMEOUT_S)
            while not future.done() and not stop():
                _wait(future.exception, TURN_S)
            if not future.done():
                future.cancel()
                return None
            reply = future.result()
            if isinstance(reply, BatchReady | Finished):
                return reply
            _expect(reply, NotYet)
            time.sleep(POLL_S)
        return None

    def fetch(self, batch: BatchReady) -> bytes:
        """The body of a leased batch."""
        return b"".join(
            self._ask(Chunk(batch_id=batch.batch_id, index=index), Data).body for index in range(batch.num_chunks)
        )

    def stepped(self, message: Stepped) -> None:
        """The batch is done with: trained, or refused."""
        self._ask(message, Ok)

    def cursor(self, timeout_s: float = ASK_TIMEOUT_S) -> StreamCursor:
        """The cursor that a checkpoint taken now must hold."""
        return self._ask(AskCursor(), Cursor, timeout_s).cursor

    def committed(self, message: Committed, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """The checkpoint is on disk."""
        self._ask(message, Ok, timeout_s)

    def _ask(self, message: LearnerMessage, kind: type[Reply], timeout_s: float = ASK_TIMEOUT_S) -> Reply:
        return _expect(self._portal.call(self._broker.ask, message, timeout_s), kind)


@contextmanager
def connect(nats: NatsConfig, runtime: Runtime) -> Iterator[Conversation]:
    """A conversation over a connection of its own. BrokerError when NATS does not answer."""
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(Broker.of_run(runtime, nats)) as broker,
    ):
        yield Conversation(portal, broker)


def _expect(reply: LearnerReply, kind: type[Reply]) -> Reply:
    if not isinstance(reply, kind):
        raise LearnerError(
            f"the pipeline service answered {type(reply).__name__} where {kind.__name__} was due; "
            "run pipeline and learner of one version"
        )
    return reply


def _wait(result: Callable[[float], object], timeout_s: float) -> None:
    try:
        result(timeout_s)
    except TimeoutError:
        return
