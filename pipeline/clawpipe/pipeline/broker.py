"""Speaks NATS, alone with `stream_reader`: streams, work queue, control bucket, the learner's conversation.

Streams (prefix P): P-REQUESTS, a work queue of RolloutRequest; P-RECORDS, one ordered stream of CallRecord
and RolloutManifest, the truth about a run; P-WEIGHTS, weight versions and the engines' reports of them. The
bucket P-CONTROL holds one EngineState per engine and the drain mark. The learner asks by request and reply.

Everything here is asyncio (nats-py is). A lost connection is waited for: publishing retries within its
timeout, readers go on at the sequence they had reached.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import anyio
import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from clawpipe.pipeline import entries
from clawpipe.pipeline.config import NatsConfig
from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.records import (
    CallRecord,
    EngineState,
    LearnerMessage,
    LearnerReply,
    PushReport,
    RolloutManifest,
    RolloutRequest,
    WeightVersion,
    encode,
)
from clawpipe.pipeline.runtime import Runtime
from clawpipe.pipeline.stream_reader import LOST, RETRY_S, read_stream, unsubscribe

T = TypeVar("T")

ACK_WAIT_S = 30.0
POLL_S = 0.2
PULL_WAIT_S = 2.0
WITHDRAW_S = 60.0
ASK_AGAIN_S = 10.0  # a request to a service that died is lost with it

_decode_request = msgspec.msgpack.Decoder(RolloutRequest).decode
_decode_weights = msgspec.msgpack.Decoder(WeightVersion).decode
_decode_push = msgspec.msgpack.Decoder(PushReport).decode
_decode_engine = msgspec.msgpack.Decoder(EngineState).decode
_decode_message = msgspec.msgpack.Decoder(LearnerMessage).decode
_decode_reply = msgspec.msgpack.Decoder(LearnerReply).decode


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request taken from the work queue. It comes again unless it is acknowledged or kept in progress."""

    request: RolloutRequest
    attempt: int  # deliveries of this request so far, this one included
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


class Broker:
    """One connection to NATS. Make it with `Broker.connect`; call `setup` once per run before anything else."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=10.0)
        self._prefix = prefix
        self._requests = f"{prefix}-REQUESTS"
        self._records = f"{prefix}-RECORDS"
        self._weights = f"{prefix}-WEIGHTS"
        self._control = f"{prefix}-CONTROL"

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, token: str = "", *, prefix: str = "clawpipe", timeout_s: float = 10.0
    ) -> AsyncIterator[Broker]:
        """Connects, and closes at the end. BrokerError when no server answers within `timeout_s`."""

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
            yield cls(client, prefix)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5), suppress(nats.errors.Error, OSError):
                await client.close()

    @classmethod
    def of_run(cls, runtime: Runtime, config: NatsConfig) -> AbstractAsyncContextManager[Broker]:
        """The connection of one of a run's processes."""
        return cls.connect(
            runtime.nats_url, runtime.nats_token, prefix=config.prefix, timeout_s=config.connect_timeout_s
        )

    async def setup(self, max_store_bytes: int) -> None:
        """Creates the streams and the bucket, or finds them as an earlier start left them."""
        p = self._prefix
        limits: dict[str, Any] = {"storage": StorageType.FILE, "discard": DiscardPolicy.NEW, "num_replicas": 1}
        for config in (
            StreamConfig(
                name=self._requests,
                subjects=[f"{p}.requests"],
                retention=RetentionPolicy.WORK_QUEUE,
                max_bytes=max_store_bytes // 8,
                duplicate_window=120,
                **limits,
            ),
            StreamConfig(
                name=self._records,
                subjects=[f"{p}.records.>"],
                max_bytes=max_store_bytes,
                duplicate_window=120,
                **limits,
            ),
            StreamConfig(
                name=self._weights,
                subjects=[f"{p}.weights.>"],
                max_bytes=max_store_bytes // 8,
                **limits,
            ),
        ):
            await self._create(config)
        await self._js.create_key_value(KeyValueConfig(bucket=self._control, history=1))
        await self._js.add_consumer(
            self._requests,
            ConsumerConfig(
                durable_name="runners", ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_ack_pending=-1
            ),
        )

    async def _create(self, config: StreamConfig) -> None:
        """A new stream, or the existing one with these limits."""
        try:
            await self._js.stream_info(config.name or "")
        except nats.js.errors.NotFoundError:
            change = self._js.add_stream
        else:
            change = self._js.update_stream
        try:
            await change(config)
        except nats.js.errors.BadRequestError as err:
            raise BrokerError(
                f"NATS: stream {config.name} exists with other settings ({err.description}); "
                "use another [nats] prefix, or delete the stream"
            ) from err
        except nats.js.errors.ServerError as err:
            raise BrokerError(
                f"NATS: stream {config.name} of {config.max_bytes} bytes was refused ({err.description}); "
                "lower [nats] max_store_bytes, or give the server more room"
            ) from err

    # Work queue ------------------------------------------------------------------------------------------

    async def publish_request(self, request: RolloutRequest) -> None:
        """Puts a rollout onto the work queue; the same rollout twice within two minutes is stored once."""
        await self._publish(f"{self._prefix}.requests", encode(request), request.rollout_id)

    async def pull_request(self, timeout_s: float = PULL_WAIT_S) -> Delivery | None:
        """Takes the next request, or None when there is none within `timeout_s`."""
        try:
            sub = await self._js.pull_subscribe_bind("runners", stream=self._requests)
            try:
                [msg] = await sub.fetch(1, timeout=timeout_s)
            finally:
                await sub.unsubscribe()
        except LOST:
            await anyio.sleep(RETRY_S)
            return None
        return Delivery(_decode_request(msg.data), int(msg.metadata.num_delivered or 1), msg)

    async def pending_requests(self) -> tuple[RolloutRequest, ...]:
        """The requests that are not acknowledged yet, taken or not, oldest first."""
        state = (await self._js.stream_info(self._requests)).state
        found: list[RolloutRequest] = []
        sequence = state.first_seq
        while state.messages and sequence <= state.last_seq:
            try:
                raw = await self._js.get_msg(self._requests, sequence, next=True, subject=f"{self._prefix}.requests")
            except nats.js.errors.NotFoundError:
                break
            found.append(_decode_request(raw.data or b""))
            sequence = (raw.seq or sequence) + 1
        return tuple(found)

    async def withdraw_requests(self) -> tuple[RolloutRequest, ...]:
        """Takes the requests back that no runner has pulled yet, and gives them; those pulled stay.

        Nothing is delivered meanwhile, so no request is both taken back and run.
        """
        until = datetime.now(UTC) + timedelta(seconds=WITHDRAW_S)
        await self._js.pause_consumer(self._requests, "runners", until.isoformat())
        try:
            return await self._withdraw()
        finally:
            await self._js.resume_consumer(self._requests, "runners")

    async def _withdraw(self) -> tuple[RolloutRequest, ...]:
        consumer = await self._js.consumer_info(self._requests, "runners")
        taken = consumer.delivered.stream_seq if consumer.delivered else 0
        found: list[RolloutRequest] = []
        while True:
            try:
                raw = await self._js.get_msg(self._requests, taken + 1, next=True, subject=f"{self._prefix}.requests")
            except nats.js.errors.NotFoundError:
                return tuple(found)
            taken = raw.seq or taken + 1
            await self._js.delete_msg(self._requests, taken)
            found.append(_decode_request(raw.data or b""))

    # Records ---------------------------------------------------------------------------------------------

    async def publish_call(self, record: CallRecord, timeout_s: float = 30.0) -> None:
        """Stores a call. Returns when JetStream has it; BrokerError after `timeout_s` of trying."""
        subject = f"{self._prefix}.records.call.{record.rollout_id}"
        await self._publish(subject, encode(record), record.call_id, timeout_s)

    async def publish_manifest(self, manifest: RolloutManifest, timeout_s: float = 30.0) -> None:
        """Stores a manifest, as `publish_call` does a call."""
        subject = f"{self._prefix}.records.manifest.{manifest.rollout_id}"
        message_id = f"{manifest.rollout_id}.a{manifest.attempt}.manifest"
        await self._publish(subject, encode(manifest), message_id, timeout_s)

    async def records(self, start_sequence: int = 1) -> AsyncIterator[entries.Entry]:
        """The record stream from `start_sequence` on, in its order, bad messages included; never ends.

        Back-pressure is the iterator itself: nothing more is fetched than the caller takes.
        """
        async with aclosing(
            read_stream(self._js, self._records, f"{self._prefix}.records.>", start_sequence)
        ) as messages:
            async for msg in messages:
                message_id = (msg.headers or {}).get("Nats-Msg-Id", "")
                yield entries.read(int(msg.metadata.sequence.stream), msg.subject, message_id, msg.data)

    async def last_records_sequence(self) -> int:
        """Sequence of the newest record; 0 when there is none yet."""
        return int((await self._js.stream_info(self._records)).state.last_seq)

    async def has_records(self, from_sequence: int) -> bool:
        """Whether the stream holds a record with this sequence or a later one."""
        state = (await self._js.stream_info(self._records)).state
        return bool(state.messages) and int(state.last_seq) >= from_sequence

    async def purge_records(self, below: int) -> None:
        """Removes all records with a sequence lower than `below`."""
        if below > 1:
            await self._js.purge_stream(self._records, seq=below)

    # Weights ---------------------------------------------------------------------------------------------

    async def publish_weights(self, weights: WeightVersion) -> None:
        """Announces a staged weight version."""
        await self._publish(f"{self._prefix}.weights.staged", encode(weights), f"v{weights.version}")

    async def last_weights(self) -> WeightVersion | None:
        """The newest version ever announced in this run, or None."""
        try:
            raw = await self._js.get_last_msg(self._weights, f"{self._prefix}.weights.staged")
        except nats.js.errors.NotFoundError:
            return None
        return _decode_weights(raw.data or b"")

    async def weights(self) -> AsyncIterator[WeightVersion]:
        """The newest version, then every newer one as it comes; a slow reader skips to the newest."""
        seen: int | None = None
        while True:
            newest = await self._tolerant(self.last_weights)
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
        async with aclosing(read_stream(self._js, self._weights, f"{self._prefix}.weights.applied")) as messages:
            async for msg in messages:
                yield _decode_push(msg.data)

    # Control ---------------------------------------------------------------------------------------------

    async def set_engine(self, state: EngineState) -> None:
        """Writes the engine's entry."""
        await self._put(f"engine.{state.name}", encode(state))

    async def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        """All engines' entries now, which may be none, and again whenever one changes; never ends."""
        stream, subjects = f"KV_{self._control}", f"$KV.{self._control}.engine.>"
        states, position = await self._engine_states(stream, subjects)
        yield states
        async with aclosing(read_stream(self._js, stream, subjects, position + 1)) as messages:
            async for msg in messages:
                state = _decode_engine(msg.data)
                if states.get(state.name) != state:
                    states = {**states, state.name: state}
                    yield states

    async def _engine_states(self, stream: str, subjects: str) -> tuple[dict[str, EngineState], int]:
        """(entries, the stream's last sequence when they were read)."""
        while True:
            try:
                state = (await self._js.stream_info(stream, subjects_filter=subjects)).state
                entries = [await self._js.get_last_msg(stream, subject) for subject in state.subjects or ()]
            except (*LOST, nats.js.errors.NotFoundError):
                await anyio.sleep(RETRY_S)
                continue
            found = [_decode_engine(entry.data or b"") for entry in entries]
            return {engine.name: engine for engine in found}, state.last_seq

    async def request_drain(self) -> None:
        """Asks the run to stop admitting rollouts and to end when those in flight have ended."""
        await self._put("drain", str(time.time()).encode())

    async def clear_drain(self) -> None:
        """Forgets an earlier drain: a resumed run starts admitting again."""
        bucket = await self._js.key_value(self._control)
        await bucket.purge("drain")

    async def drained(self) -> None:
        """Waits until somebody asks for a drain."""
        asked = None
        while not asked:
            asked = await self._tolerant(self._drain_asked)
            await anyio.sleep(POLL_S)

    async def _drain_asked(self) -> bool:
        bucket = await self._js.key_value(self._control)
        try:
            await bucket.get("drain")
        except nats.js.errors.KeyNotFoundError:
            return False
        return True

    # The learner -----------------------------------------------------------------------------------------

    async def ask(self, message: LearnerMessage, timeout_s: float = 600.0) -> LearnerReply:
        """The learner's side: one message, one reply. Waits for a pipeline service that restarts.

        BrokerError after `timeout_s` without a reply. A message may arrive twice; the service answers alike.
        """
        deadline = anyio.current_time() + timeout_s
        while True:
            try:
                left = max(1.0, deadline - anyio.current_time())
                patience_s = min(ASK_AGAIN_S, left)
                reply = await self._client.request(f"{self._prefix}.learner", encode(message), timeout=patience_s)
                return _decode_reply(reply.data)
            except LOST as err:
                if anyio.current_time() > deadline:
                    name = type(message).__name__
                    raise BrokerError(
                        f"the pipeline service has not answered the learner's {name} for {timeout_s:.0f} s; "
                        "look into logs/pipeline.log of the run folder"
                    ) from err
                await anyio.sleep(RETRY_S)

    async def serve_learner(self, handler: Callable[[LearnerMessage], Awaitable[LearnerReply]]) -> None:
        """The service's side: answers one message after the other; never ends."""
        sub = await self._client.subscribe(f"{self._prefix}.learner")
        try:
            async for msg in sub.messages:
                reply = await handler(_decode_message(msg.data))
                await msg.respond(encode(reply))
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await unsubscribe(sub)

    # Shared ----------------------------------------------------------------------------------------------

    async def _publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 30.0) -> None:
        deadline = anyio.current_time() + timeout_s
        while True:
            try:
                left = max(0.1, deadline - anyio.current_time())
                await self._js.publish(subject, data, timeout=min(10.0, left), headers={"Nats-Msg-Id": message_id})
                return
            except (*LOST, nats.js.errors.APIError) as err:
                if anyio.current_time() > deadline or isinstance(err, nats.js.errors.BadRequestError):
                    raise BrokerError(
                        f"NATS did not store {message_id} on {subject} within {timeout_s:.0f} s ({err}); "
                        "check the server, its disk and [nats] max_store_bytes"
                    ) from err
                await anyio.sleep(RETRY_S)
            except nats.errors.MaxPayloadError as err:
                raise BrokerError(
                    f"{message_id} has {len(data)} bytes, more than the server's max_payload "
                    f"{self._client.max_payload}; raise max_payload"
                ) from err

    async def _put(self, key: str, value: bytes) -> None:
        with anyio.fail_after(30):
            while True:
                try:
                    bucket = await self._js.key_value(self._control)
                    await bucket.put(key, value)
                    return
                except LOST:
                    await anyio.sleep(RETRY_S)

    async def _tolerant(self, read: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await read()
        except (*LOST, nats.js.errors.NotFoundError):
            return None
