"""The service's side of the talk with the learner: one message, one reply, and when everything has been said."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread

from clawpipe.pipeline.flow import Flow, Order
from clawpipe.pipeline.pacing import Signal
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
)

LEASE_WAIT_S = 1.0  # how long a lease waits for a batch before NotYet
FINAL_COMMIT_S = 600.0  # from Finished to the learner's last checkpoint
FAREWELL_S = 3.0  # a learner whose last checkpoint is written asks again at most, after learner_line.ASK_AGAIN_S


class Answers:
    """See the module. What the learner may rely on is in the ledger file before it is answered."""

    def __init__(
        self,
        flow: Flow,
        changed: Signal,
        *,
        flush: Callable[[], Awaitable[None]],
        purge: Callable[[int], Awaitable[None]],
    ) -> None:
        """`flush` writes the ledger; `purge` gives up the records below a sequence."""
        self._flow = flow
        self._changed = changed
        self._flush = flush
        self._purge = purge
        self._no_more_s: float | None = None  # since when a lease is answered with Finished
        self._told_s: float | None = None  # when one was
        self._heard_s = 0.0  # when the learner last spoke

    @property
    def told(self) -> bool:
        """Whether the learner knows that it is over."""
        return self._told_s is not None

    def suppose_told(self) -> None:
        """It knows from an earlier process, or from what comes next."""
        self._told_s = self._heard_s = time.monotonic()

    def heard(self) -> None:
        """The learner has spoken."""
        self._heard_s = time.monotonic()

    def no_more(self) -> None:
        """There will be no more batches: every lease is answered with Finished."""
        self._no_more_s = time.monotonic()

    async def reply(self, message: LearnerMessage) -> LearnerReply:
        """To one message."""
        reply = await self._reply(message)
        if not isinstance(reply, NotYet | Data):
            await self._flush()
        self.heard()
        self._changed.fire()
        return reply

    def is_over(self, drain_timeout_s: float) -> bool:
        """Whether nothing more is to be waited for from the learner."""
        now = time.monotonic()
        if self._told_s is None:
            # A learner that never asks again after a drain is dead, or in a step that is too long to wait for.
            return self._no_more_s is not None and now - self._no_more_s > drain_timeout_s
        if self._flow.catching_up:
            return False
        committed = self._flow.committed_updates == self._flow.updates
        quiet = now - self._heard_s
        return now - self._told_s > FINAL_COMMIT_S or (committed and quiet > FAREWELL_S)

    async def _reply(self, message: LearnerMessage) -> LearnerReply:
        match message:
            case Hello():
                self._told_s = None  # one that starts anew has not heard it
                self._flow.hello(message)
            case Lease():
                return await self._lease(message)
            case Chunk():
                return Data(body=self._flow.batches.chunk(message.batch_id, message.index))
            case Stepped():
                self._flow.stepped(message, time.time())
            case AskCursor():
                return Cursor(cursor=self._flow.cursor())
            case Committed():
                await self._commit(message)
        return Ok()

    async def _lease(self, message: Lease) -> BatchReady | NotYet | Finished:
        """Waits a moment for a batch: the learner is idle while it asks."""
        deadline = time.monotonic() + LEASE_WAIT_S
        while True:
            reply = Finished() if self._no_more_s is not None else self._flow.lease(message.version)
            if isinstance(reply, Order):
                build = partial(self._flow.recipe.build, reply.batch_id, reply.version, reply.groups)
                return self._flow.leased(await anyio.to_thread.run_sync(build))
            if isinstance(reply, Finished):
                self._told_s = time.monotonic()
            if not isinstance(reply, NotYet) or time.monotonic() >= deadline:
                return reply
            await self._changed.wait(deadline - time.monotonic())

    async def _commit(self, message: Committed) -> None:
        """The ledger first: after a crash in between, the purge is only late."""
        below = self._flow.committed(message)
        if self._flow.finished and self._told_s is None:
            self._told_s = time.monotonic()  # by the service before this one, or by the lease that comes next
        await self._flush()
        await self._purge(below)
