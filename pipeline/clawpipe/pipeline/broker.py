"""What clawpipe says to NATS and hears from it: records, requests, weights, dead letters, control, the learner.

Streams (prefix P; limits in `streams`): P-REQUESTS (`work_queue`); P-RECORDS, one ordered stream of CallRecord and
RolloutManifest, the truth about a run, whose large bodies are blobs in P-BLOBS (`claims`); P-WEIGHTS (`weights`);
P-DEADLETTERS (`dead_letters`). The bucket P-CONTROL holds one EngineState per engine and the drain mark
(`control`). The learner asks by request and reply (`learner_line`).

Everything here is asyncio (nats-py is). A lost connection, a full stream and a full disk are waited for
(`patience`); readers go on at the sequence they had reached (`stream_reader`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import anyio
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamInfo

from clawpipe.pipeline import entries, learner_line
from clawpipe.pipeline.claims import Claims, MissingBlobError
from clawpipe.pipeline.config import NatsConfig
from clawpipe.pipeline.control import Control
from clawpipe.pipeline.dead_letters import DeadLetters
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.nats_client import LenientClient
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.patience import Pace, Patience
from clawpipe.pipeline.publishing import STORE_TIMEOUT_S, Publisher, message_id
from clawpipe.pipeline.records import (
    CallRecord,
    DeadLetter,
    EngineState,
    Flaw,
    LearnerMessage,
    LearnerReply,
    PushReport,
    RolloutManifest,
    RolloutRequest,
    WeightVersion,
    encode,
)
from clawpipe.pipeline.runtime import Runtime
from clawpipe.pipeline.stream_reader import read_stream
from clawpipe.pipeline.streams import Names, all_streams, ensure, runners
from clawpipe.pipeline.weights import Weights
from clawpipe.pipeline.work_queue import PULL_WAIT_S, Delivery, WorkQueue

__all__ = ["Broker", "Delivery"]

T = TypeVar("T")

ASK_TIMEOUT_S = 60.0  # until the server answers a question about its streams: it may be starting again
MAX_KEPT = 1 / 4  # of the record stream, by records that are done with: the rest is for those that are not


class Broker:
    """One connection to NATS. Make it with `Broker.connect`; call `setup` once per run before anything else."""

    def __init__(self, client: Client, prefix: str, log: EventLog, pace: Pace) -> None:
        js = client.jetstream(timeout=pace.request_s)
        names = Names(prefix)
        storing = Patience(client, log, "store records", pace)
        self._client = client
        self._log = log
        self._pace = pace
        self._js: JetStreamContext = js
        self._names = names
        self._asking = Patience(client, log, "answer", pace)
        self._claims = Claims(client.jetstream(timeout=pace.first_try_s), names)
        self._publisher = Publisher(client, js, self._claims, storing)
        self._dead_letters = DeadLetters(js, names, self._publisher)
        self._weights = Weights(client, js, names, self._publisher, log)
        self._queue = WorkQueue(js, names, self.set_aside)
        self._control = Control(client, js, names, storing, log)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        token: str = "",
        *,
        prefix: str = "clawpipe",
        timeout_s: float = 10.0,
        log: EventLog | None = None,
        pace: Pace | None = None,
    ) -> AsyncIterator[Broker]:
        """Connects, and closes at the end. BrokerError when no server answers within `timeout_s`.

        `log` hears when NATS is waited for.
        """
        client = await _connected(url, token, timeout_s)
        try:
            yield cls(client, prefix, log or EventLog("broker"), pace or Pace())
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5), suppress(nats.errors.Error, OSError):
                await client.close()

    @classmethod
    def of_run(
        cls, runtime: Runtime, config: NatsConfig, log: EventLog | None = None
    ) -> AbstractAsyncContextManager[Broker]:
        """The connection of one of a run's processes."""
        return cls.connect(
            runtime.nats_url, runtime.nats_token, prefix=config.prefix, timeout_s=config.connect_timeout_s, log=log
        )

    async def setup(self, max_store_bytes: int) -> None:
        """Creates the streams and buckets, or finds them as an earlier start left them; clears orphaned blobs."""

        async def create() -> None:
            for config in all_streams(self._names, max_store_bytes):
                await ensure(self._js, config)
            await self._js.add_consumer(self._names.requests, runners(self._names))
            await self._claims.delete_orphans()

        await self._ask(create, "create the streams")

    # Work queue ------------------------------------------------------------------------------------------

    async def publish_request(self, request: RolloutRequest) -> None:
        """Puts a rollout onto the work queue; the same rollout twice within two minutes is stored once."""
        await self._publisher.publish(self._names.request_subject, encode(request), request.rollout_id)

    async def pull_request(self, timeout_s: float = PULL_WAIT_S) -> Delivery | None:
        """Takes the next request, or None when there is none within `timeout_s`; unreadable ones are set aside."""
        return await self._queue.pull(timeout_s)

    async def pending_requests(self) -> tuple[RolloutRequest, ...]:
        """The requests that are not acknowledged yet, taken or not, oldest first."""
        return await self._ask(self._queue.pending, "list the requests")

    async def withdraw_requests(self) -> tuple[RolloutRequest, ...]:
        """Takes the requests back that no runner has pulled yet, and gives them; those pulled stay.

        Nothing is delivered meanwhile, so no request is both taken back and run.
        """
        found: list[RolloutRequest] = []
        await self._ask(lambda: self._queue.withdraw(found), "give requests back")
        return tuple(found)

    # Records ---------------------------------------------------------------------------------------------

    async def publish_call(self, record: CallRecord, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Stores a call. Returns when JetStream has it; BrokerError after `timeout_s` of trying."""
        subject = f"{self._names.prefix}.records.call.{record.rollout_id}"
        await self._publisher.publish_record(subject, encode(record), record.call_id, timeout_s)

    async def publish_manifest(self, manifest: RolloutManifest, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Stores a manifest, as `publish_call` does a call."""
        subject = f"{self._names.prefix}.records.manifest.{manifest.rollout_id}"
        message_id = f"{manifest.rollout_id}.a{manifest.attempt}.manifest"
        await self._publisher.publish_record(subject, encode(manifest), message_id, timeout_s)

    async def records(self, start_sequence: int = 1) -> AsyncGenerator[entries.Entry, None]:
        """The record stream from `start_sequence` on, in its order, bad messages included; never ends.

        Back-pressure is the iterator itself: nothing more is fetched than the caller takes.
        """
        stream, subjects, wait_s = self._names.records, self._names.record_subjects, self._pace.fetch_s
        async with aclosing(
            read_stream(self._client, self._js, stream, subjects, start_sequence, wait_s=wait_s)
        ) as messages:
            async for sequence, msg in messages:
                if msg.subject.endswith(".claim"):
                    yield await self._claimed(sequence, msg)
                else:
                    yield entries.read(sequence, msg.subject, message_id(msg), msg.data)

    async def _claimed(self, sequence: int, msg: Msg) -> entries.Entry:
        try:
            body = await self._claims.body(msg.data)
        except MissingBlobError as err:
            return entries.bad(sequence, msg.subject, message_id(msg), msg.data, Flaw.MISSING_BLOB, str(err))
        return entries.read(sequence, msg.subject, message_id(msg), body)

    async def last_records_sequence(self) -> int:
        """Sequence of the newest record, which a reader will come to; 0 when there was none yet.

        One that is damaged on the disk, or deleted by hand, is given to no reader, and is not meant.
        """
        state = (await self._info(self._names.records)).state
        last = int(state.last_seq)
        while state.messages and last >= state.first_seq and not await self._has_record(last):
            last -= 1
        return last

    async def _has_record(self, sequence: int) -> bool:
        return await self._ask(partial(self._is_there, sequence), f"read record {sequence}")

    async def _is_there(self, sequence: int) -> bool:
        try:
            await self._js.get_msg(self._names.records, sequence)
        except nats.js.errors.NotFoundError:
            return False
        return True

    async def has_records(self, from_sequence: int) -> bool:
        """Whether the stream holds a record with this sequence or a later one."""
        state = (await self._info(self._names.records)).state
        return bool(state.messages) and int(state.last_seq) >= from_sequence

    async def purge_records(self, below: int, keep_bytes: int = 0) -> None:
        """Removes the records with a sequence lower than `below`, but for the newest `keep_bytes` of them.

        How many those are is reckoned from the mean size of all records, their blobs included; they never take more
        than a quarter of the stream. Blobs go before their claims: a crash in between leaves claims without a blob
        only where nothing is read for training any more, and the next purge takes them.
        """
        below -= await self._num_kept(keep_bytes) if keep_bytes else 0
        if below <= 1:
            return

        async def purge() -> None:
            await self._claims.delete_below(below)
            await self._js.purge_stream(self._names.records, seq=below)

        await self._ask(purge, f"purge the records below {below}")

    async def _num_kept(self, keep_bytes: int) -> int:
        records, blobs = await self._info(self._names.records), await self._info(f"OBJ_{self._names.blobs}")
        num_bytes = min(keep_bytes, int((records.config.max_bytes or 0) * MAX_KEPT))
        return int(num_bytes * records.state.messages / max(1, records.state.bytes + blobs.state.bytes))

    # Dead letters ----------------------------------------------------------------------------------------

    async def set_aside(self, letter: DeadLetter) -> None:
        """Stores a message that cannot be used; the same one again takes its own place. Long bodies are cut."""
        await self._dead_letters.set_aside(letter)

    async def dead_letters(self) -> dict[str, int]:
        """How many messages are set aside, by flaw; at most the newest 10,000 are kept."""
        return await self._ask(self._dead_letters.counts, "count the dead letters")

    async def read_dead_letters(self) -> tuple[DeadLetter, ...]:
        """The newest 1000 letters, oldest first."""
        return await self._ask(self._dead_letters.newest, "give the dead letters")

    # Weights ---------------------------------------------------------------------------------------------

    async def publish_weights(self, weights: WeightVersion) -> None:
        """Announces a staged weight version."""
        await self._weights.announce(weights)

    async def last_weights(self) -> WeightVersion | None:
        """The newest version ever announced in this run, or None."""
        return await self._ask(self._weights.last, "give the newest weight version")

    def weights(self) -> AsyncIterator[WeightVersion]:
        """The newest version, then every newer one as it comes; a slow reader skips to the newest. Never ends."""
        return self._weights.follow()

    async def report_push(self, report: PushReport) -> None:
        """An engine says that it has taken a version."""
        await self._weights.report(report)

    def pushes(self) -> AsyncIterator[PushReport]:
        """All push reports of the run from its start, then new ones; never ends."""
        return self._weights.reports()

    # Control ---------------------------------------------------------------------------------------------

    async def set_engine(self, state: EngineState) -> None:
        """Writes the engine's entry."""
        await self._control.set_engine(state)

    def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        """All engines' entries now, which may be none, and again whenever one changes; never ends."""
        return self._control.engines()

    async def request_drain(self) -> None:
        """Asks the run to stop admitting rollouts and to end when those in flight have ended."""
        await self._control.request_drain()

    async def clear_drain(self) -> None:
        """Forgets an earlier drain: a resumed run starts admitting again."""
        await self._ask(self._control.clear_drain, "forget the drain")

    async def drained(self) -> None:
        """Waits until somebody asks for a drain."""
        await self._control.drained()

    # The learner -----------------------------------------------------------------------------------------

    async def ask(self, message: LearnerMessage, timeout_s: float = 600.0) -> LearnerReply:
        """The learner's side: one message, one reply. Waits for a pipeline service that restarts.

        BrokerError after `timeout_s` without a reply. A message may arrive twice; the service answers alike.
        """
        return await learner_line.ask(self._client, f"{self._names.prefix}.learner", message, timeout_s)

    async def serve_learner(self, handler: Callable[[LearnerMessage], Awaitable[LearnerReply]]) -> None:
        """The service's side: answers one message after the other; never ends."""
        await learner_line.serve(self._client, f"{self._names.prefix}.learner", handler, self._log)

    # Shared ----------------------------------------------------------------------------------------------

    async def _ask(self, read: Callable[[], Awaitable[T]], what: str) -> T:
        """What `read` gives. It may be repeated, and has a time limit of its own."""

        async def attempt(limit_s: float) -> T:
            return await read()

        try:
            return await self._asking.until_done(attempt, what, ASK_TIMEOUT_S)
        except nats.js.errors.NotFoundError as err:
            raise BrokerError(
                f"NATS cannot {what} ({err.description}); check that [nats] prefix {self._names.prefix!r} is the one "
                "of the run, and that the run was started"
            ) from err

    async def _info(self, stream: str) -> StreamInfo:
        return await self._ask(lambda: self._js.stream_info(stream), f"tell the state of {stream}")


async def _connected(url: str, token: str, timeout_s: float) -> Client:
    """Errors reach the caller of the operation that fails: nats-py's own printing would only repeat them."""

    async def quiet(_: Exception) -> None: ...

    client = LenientClient()
    try:
        with anyio.fail_after(timeout_s):
            await client.connect(
                url,
                token=token or None,
                error_cb=quiet,
                connect_timeout=int(max(1, timeout_s)),
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                allow_reconnect=True,
                max_outstanding_pings=20,
                pending_size=64 * 1024 * 1024,
            )
    except (TimeoutError, OSError, nats.errors.Error) as err:
        raise BrokerError(
            f"NATS at {url}: no connection ({err or 'timed out'}); check [nats] url and that the server runs"
        ) from err
    return client
