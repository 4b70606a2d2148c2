"""The work queue of rollout requests: put on by the scheduler, taken by whichever runner is free."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import msgspec
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from clawpipe.pipeline.decoding import UNREADABLE
from clawpipe.pipeline.publishing import message_id
from clawpipe.pipeline.records import DeadLetter, Flaw, RolloutRequest
from clawpipe.pipeline.stream_reader import LOST, RETRY_S
from clawpipe.pipeline.streams import ACK_WAIT_S, RUNNERS, Names

PULL_WAIT_S = 2.0
WITHDRAW_S = 60.0

_decode_request = msgspec.msgpack.Decoder(RolloutRequest).decode


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request taken from the work queue. It comes again unless it is acknowledged or kept in progress."""

    request: RolloutRequest
    attempt: int  # no two deliveries of a request have the same; a later one has a higher
    _msg: Msg

    async def ack(self) -> None:
        """The rollout is over and its manifest stored: never deliver it again.

        When it cannot be said, it comes again, and its second manifest is a duplicate like any other.
        """
        with suppress(*LOST):
            await self._msg.ack_sync(timeout=ACK_WAIT_S)

    async def nak(self) -> None:
        """Hand it back: somebody else runs it, at the latest when its redelivery clock has run out."""
        with suppress(*LOST):
            await self._msg.nak()

    async def in_progress(self) -> None:
        """Still at it: restart the redelivery clock (ACK_WAIT_S)."""
        with suppress(*LOST):
            await self._msg.in_progress()


class WorkQueue:
    """Takes requests and takes them back. One that cannot be read is set aside and never delivered again."""

    def __init__(self, js: JetStreamContext, names: Names, set_aside: Callable[[DeadLetter], Awaitable[None]]) -> None:
        self._js = js
        self._names = names
        self._set_aside = set_aside

    async def pull(self, timeout_s: float) -> Delivery | None:
        """The next request, or None when there is none within `timeout_s` that can be read."""
        try:
            sub = await self._js.pull_subscribe_bind(RUNNERS, stream=self._names.requests)
            try:
                [msg] = await sub.fetch(1, timeout=timeout_s)
            finally:
                await sub.unsubscribe()
        except LOST:
            await anyio.sleep(RETRY_S)
            return None
        try:
            return Delivery(_decode_request(msg.data), _attempt(), msg)
        except UNREADABLE as err:
            await self._bury(msg, err)
            return None

    async def _bury(self, msg: Msg, err: Exception) -> None:
        """The letter first: a crash in between sets it aside once more, which changes nothing."""
        rollout_id = message_id(msg)
        letter = DeadLetter(
            flaw=Flaw.UNREADABLE,
            detail=f"a rollout request: {err}",
            sequence=int(msg.metadata.sequence.stream),
            subject=msg.subject,
            message_id=rollout_id,
            rollout_id=rollout_id,
            body=msg.data,
            set_aside_s=time.time(),
        )
        await self._set_aside(letter)
        with suppress(*LOST):
            await msg.term()

    async def pending(self) -> tuple[RolloutRequest, ...]:
        """The requests that are not acknowledged yet, taken or not, oldest first; unreadable ones left out."""
        state = (await self._js.stream_info(self._names.requests)).state
        found: list[RolloutRequest] = []
        sequence = state.first_seq
        while state.messages and sequence <= state.last_seq:
            if (message := await self._next(sequence)) is None:
                break
            sequence, request = message
            sequence += 1
            found += [request] if request is not None else []
        return tuple(found)

    async def withdraw(self, found: list[RolloutRequest]) -> None:
        """Takes the requests back that no runner has pulled yet, into `found`; those pulled stay. May be repeated.

        Nothing is delivered meanwhile, so no request is both taken back and run.
        """
        until = datetime.now(UTC) + timedelta(seconds=WITHDRAW_S)
        await self._js.pause_consumer(self._names.requests, RUNNERS, until.isoformat())
        try:
            await self._withdraw(found)
        finally:
            await self._js.resume_consumer(self._names.requests, RUNNERS)

    async def _withdraw(self, found: list[RolloutRequest]) -> None:
        consumer = await self._js.consumer_info(self._names.requests, RUNNERS)
        taken = consumer.delivered.stream_seq if consumer.delivered else 0
        while (message := await self._next(taken + 1)) is not None:
            taken, request = message
            await self._js.delete_msg(self._names.requests, taken)
            found += [request] if request is not None else []

    async def _next(self, sequence: int) -> tuple[int, RolloutRequest | None] | None:
        """The first message from `sequence` on: (its sequence, its request if it can be read)."""
        subject = self._names.request_subject
        try:
            raw = await self._js.get_msg(self._names.requests, sequence, next=True, subject=subject)
        except nats.js.errors.NotFoundError:
            return None
        try:
            return raw.seq or sequence, _decode_request(raw.data or b"")
        except UNREADABLE:
            return raw.seq or sequence, None


def _attempt() -> int:
    """Microseconds since 1970.

    Not the server's count of deliveries: a server that is killed forgets it, and two runs of a rollout under one
    number would be mixed.
    """
    return time.time_ns() // 1000
