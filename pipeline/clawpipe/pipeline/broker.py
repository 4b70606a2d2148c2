"""What clawpipe says to NATS and hears from it: records, requests, weights, dead letters, control, the learner.

Streams (prefix P; limits in `streams`): P-REQUESTS, a work queue of RolloutRequest; P-RECORDS, one ordered stream
of CallRecord and RolloutManifest, the truth about a run, whose large bodies are blobs in P-BLOBS (`claims`);
P-WEIGHTS, weight versions and the engines' reports of them; P-DEADLETTERS, what cannot be used. The bucket
P-CONTROL holds one EngineState per engine and the drain mark. The learner asks by request and reply.

Everything here is asyncio (nats-py is). A lost connection, a full stream and a full disk are waited for
(`patience`); readers go on at the sequence they had reached (`stream_reader`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import TypeVar

import anyio
import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import PubAck, StreamInfo

from clawpipe.pipeline import entries, learner_line
from clawpipe.pipeline.claims import Claims, MissingBlobError, claim_for
from clawpipe.pipeline.config import NatsConfig
from clawpipe.pipeline.control import Control
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.patience import Patience
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
from clawpipe.pipeline.stream_reader import LOST, read_stream
from clawpipe.pipeline.streams import CLAIM_BYTES, Names, all_streams, ensure, runners
from clawpipe.pipeline.work_queue import PULL_WAIT_S, Delivery, WorkQueue

__all__ = ["Broker", "Delivery"]

T = TypeVar("T")

STORE_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 60.0  # until the server answers a question about its streams: it may be starting again
REQUEST_TIMEOUT_S = 5.0  # of one try; one that went down with the connection is made again
CHUNK_TIMEOUT_S = 2.0
POLL_S = 0.2
NEWEST_LETTERS = 1000
MAX_KEPT = 1 / 4  # of the record stream, by records that are done with: the rest is for those that are not
ID_HEADER = "Nats-Msg-Id"

_decode_weights = msgspec.msgpack.Decoder(WeightVersion).decode
_decode_push = msgspec.msgpack.Decoder(PushReport).decode
_decode_letter = msgspec.msgpack.Decoder(DeadLetter).decode


class Broker:
    """One connection to NATS. Make it with `Broker.connect`; call `setup` once per run before anything else."""

    def __init__(self, client: Client, prefix: str, log: EventLog) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._prefix = prefix
        self._names = Names(prefix)
        self._storing = Patience(client, log, "store records")
        self._asking = Patience(client, log, "answer")
        self._claims = Claims(client.jetstream(timeout=CHUNK_TIMEOUT_S), self._names)
        self._queue = WorkQueue(self._js, self._names, self.set_aside)
        self._control = Control(client, self._js, self._names, self._storing)

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
    ) -> AsyncIterator[Broker]:
        """Connects, and closes at the end. BrokerError when no server answers within `timeout_s`.

        `log` hears when NATS is waited for.
        """

        async def quiet(_: Exception) -> None:
            """Errors reach the caller of the operation; nats-py's own printing would only repeat them."""

        client = Client()
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
        try:
            yield cls(client, prefix, log or EventLog("broker"))
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
        await self._publish(self._names.request_subject, encode(request), request.rollout_id)

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
        subject = f"{self._prefix}.records.call.{record.rollout_id}"
        await self._publish_record(subject, encode(record), record.call_id, timeout_s)

    async def publish_manifest(self, manifest: RolloutManifest, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Stores a manifest, as `publish_call` does a call."""
        subject = f"{self._prefix}.records.manifest.{manifest.rollout_id}"
        message_id = f"{manifest.rollout_id}.a{manifest.attempt}.manifest"
        await self._publish_record(subject, encode(manifest), message_id, timeout_s)

    async def records(self, start_sequence: int = 1) -> AsyncGenerator[entries.Entry, None]:
        """The record stream from `start_sequence` on, in its order, bad messages included; never ends.

        Back-pressure is the iterator itself: nothing more is fetched than the caller takes.
        """
        subjects = f"{self._prefix}.records.>"
        async with aclosing(
            read_stream(self._client, self._js, self._names.records, subjects, start_sequence)
        ) as messages:
            async for sequence, msg in messages:
                if msg.subject.endswith(".claim"):
                    yield await self._claimed(sequence, msg)
                else:
                    yield entries.read(sequence, msg.subject, _message_id(msg), msg.data)

    async def _claimed(self, sequence: int, msg: Msg) -> entries.Entry:
        try:
            body = await self._claims.body(msg.data)
        except MissingBlobError as err:
            return entries.bad(sequence, msg.subject, _message_id(msg), msg.data, Flaw.MISSING_BLOB, str(err))
        return entries.read(sequence, msg.subject, _message_id(msg), body)

    async def last_records_sequence(self) -> int:
        """Sequence of the newest record; 0 when there is none yet."""
        return int((await self._info(self._names.records)).state.last_seq)

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
        place = letter.sequence if letter.subject != self._names.request_subject else f"request-{letter.sequence}"
        subject = f"{self._prefix}.dead.{letter.flaw}.{place}"
        await self._publish(subject, encode(entries.cut(letter)), subject)

    async def dead_letters(self) -> dict[str, int]:
        """How many messages are set aside, by flaw; at most the newest 10,000 are kept."""
        counts: dict[str, int] = {}
        info = await self._info(self._names.dead_letters, f"{self._prefix}.dead.>")
        for subject, count in (info.state.subjects or {}).items():
            flaw = subject.split(".")[2]
            counts[flaw] = counts.get(flaw, 0) + count
        return counts

    async def read_dead_letters(self) -> tuple[DeadLetter, ...]:
        """The newest 1000 letters, oldest first."""
        return await self._ask(self._read_letters, "give the dead letters")

    async def _read_letters(self) -> tuple[DeadLetter, ...]:
        state = (await self._js.stream_info(self._names.dead_letters)).state
        found: list[DeadLetter] = []
        start = max(state.first_seq, state.last_seq - NEWEST_LETTERS + 1)
        while state.messages and start <= state.last_seq:
            try:
                raw = await self._js.get_msg(self._names.dead_letters, start, f"{self._prefix}.dead.>", next=True)
            except nats.js.errors.NotFoundError:
                break
            with suppress(msgspec.MsgspecError):
                found.append(_decode_letter(raw.data or b""))
            start = (raw.seq or start) + 1
        return tuple(found)

    # Weights ---------------------------------------------------------------------------------------------

    async def publish_weights(self, weights: WeightVersion) -> None:
        """Announces a staged weight version."""
        await self._publish(f"{self._prefix}.weights.staged", encode(weights), f"v{weights.version}")

    async def last_weights(self) -> WeightVersion | None:
        """The newest version ever announced in this run, or None."""
        try:
            raw = await self._js.get_last_msg(self._names.weights, f"{self._prefix}.weights.staged")
        except nats.js.errors.NotFoundError:
            return None
        return _decode_weights(raw.data or b"")

    async def weights(self) -> AsyncIterator[WeightVersion]:
        """The newest version, then every newer one as it comes; a slow reader skips to the newest."""
        seen: int | None = None
        while True:
            newest = None
            with suppress(*LOST):
                newest = await self.last_weights()
            if newest is not None and (seen is None or newest.version > seen):
                seen = newest.version
                yield newest
            await anyio.sleep(POLL_S)

    async def report_push(self, report: PushReport) -> None:
        """An engine says that it has taken a version."""
        message_id = f"{report.engine}.v{report.version}.{report.applied_s}"
        await self._publish(f"{self._prefix}.weights.applied", encode(report), message_id)

    async def pushes(self) -> AsyncIterator[PushReport]:
        """All push reports of the run from its start, then new ones; never ends."""
        subject = f"{self._prefix}.weights.applied"
        async with aclosing(read_stream(self._client, self._js, self._names.weights, subject)) as messages:
            async for _, msg in messages:
                yield _decode_push(msg.data)

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
        return await learner_line.ask(self._client, f"{self._prefix}.learner", message, timeout_s)

    async def serve_learner(self, handler: Callable[[LearnerMessage], Awaitable[LearnerReply]]) -> None:
        """The service's side: answers one message after the other; never ends."""
        await learner_line.serve(self._client, f"{self._prefix}.learner", handler)

    # Shared ----------------------------------------------------------------------------------------------

    async def _publish_record(self, subject: str, body: bytes, message_id: str, timeout_s: float) -> None:
        """The record itself, or its blob and then a claim to it."""
        if len(body) <= CLAIM_BYTES:
            await self._publish(subject, body, message_id, timeout_s)
            return
        claim = claim_for(message_id, body)

        async def attempt(limit_s: float) -> None:
            await self._claims.put(claim, body, limit_s)

        await self._storing.until_done(attempt, f"store the body of {message_id}", timeout_s)
        await self._publish(f"{subject}.claim", encode(claim), message_id, timeout_s)

    async def _publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = STORE_TIMEOUT_S) -> None:
        headers = {ID_HEADER: message_id}

        async def attempt(limit_s: float) -> PubAck:
            return await self._js.publish(subject, data, timeout=limit_s, headers=headers)

        try:
            await self._storing.until_done(attempt, f"store {message_id} on {subject}", timeout_s)
        except (nats.js.errors.BadRequestError, nats.errors.MaxPayloadError) as err:
            raise BrokerError(
                f"NATS refuses {message_id} with {len(data)} bytes on {subject} ({err}); the server must take "
                f"messages of {CLAIM_BYTES} bytes: raise its max_payload (now {self._client.max_payload})"
            ) from err

    async def _ask(self, read: Callable[[], Awaitable[T]], what: str) -> T:
        """What `read` gives. It may be repeated, and has a time limit of its own."""

        async def attempt(limit_s: float) -> T:
            return await read()

        try:
            return await self._asking.until_done(attempt, what, ASK_TIMEOUT_S)
        except nats.js.errors.NotFoundError as err:
            raise BrokerError(
                f"NATS cannot {what} ({err.description}); check that [nats] prefix {self._prefix!r} is the one of the "
                "run, and that the run was started"
            ) from err

    async def _info(self, stream: str, subjects: str | None = None) -> StreamInfo:
        return await self._ask(lambda: self._js.stream_info(stream, subjects), f"tell the state of {stream}")


def _message_id(msg: Msg) -> str:
    return (msg.headers or {}).get(ID_HEADER, "")
