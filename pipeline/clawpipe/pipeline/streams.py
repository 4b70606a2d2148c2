"""What streams there are and what each may hold at most. `broker` fills and reads them.

Every stream lies in files and has a limit in bytes, so that a server's room is given away once, at the start of
a run: records 1, blobs 1/2, requests, weights 1/8 each, dead letters 1/16, control 1/32 of [nats] max_store_bytes,
less than the two that the embedded server has. A full stream of ours refuses (NEW) where losing the oldest
message would lose work, and forgets its oldest (OLD) where it would only lose a report.
"""

from __future__ import annotations

from dataclasses import dataclass

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from clawpipe.pipeline.errors import BrokerError

# Larger records are blobs and leave a claim in the stream: a server with the default max_payload (1 MiB) takes all.
CLAIM_BYTES = 512 * 1024
HEADROOM_BYTES = 16 * 1024  # subject and headers, which count
SMALL_BYTES = 64 * 1024  # of a request, a weight version, an engine's entry: ours have a few hundred

# Longer than anybody tries to publish one message (30 s unless configured), so that a retry is no second message.
# The server keeps each id that long in memory.
DUPLICATE_WINDOW_S = 120.0

RUNNERS = "runners"
ACK_WAIT_S = 30.0  # a runner's proxy says every 10 s that it is still at it; a dead one is noticed after this
MAX_UNDER_WAY = 10_000  # requests that are taken and not acknowledged: more than admission ever grants
MAX_REQUESTS = 100_000
MAX_REPORTS = 100_000  # weight versions, and one report per engine of each
MAX_DEAD_LETTERS = 10_000  # for a person to read; they are counted for every status


@dataclass(frozen=True, slots=True)
class Names:
    """Names of streams and subjects of the runs with one prefix."""

    prefix: str

    @property
    def requests(self) -> str:
        """The work queue."""
        return f"{self.prefix}-REQUESTS"

    @property
    def records(self) -> str:
        """Calls and manifests, the truth about a run."""
        return f"{self.prefix}-RECORDS"

    @property
    def weights(self) -> str:
        """Weight versions and the engines' reports of them."""
        return f"{self.prefix}-WEIGHTS"

    @property
    def dead_letters(self) -> str:
        """Messages that cannot be used, with the reason."""
        return f"{self.prefix}-DEADLETTERS"

    @property
    def blobs(self) -> str:
        """The object store's bucket of large records."""
        return f"{self.prefix}-BLOBS"

    @property
    def control(self) -> str:
        """The key-value bucket of engines' entries and the drain mark."""
        return f"{self.prefix}-CONTROL"

    @property
    def request_subject(self) -> str:
        """Of every request."""
        return f"{self.prefix}.requests"

    @property
    def record_subjects(self) -> str:
        """Of every record."""
        return f"{self.prefix}.records.>"

    @property
    def dead_subjects(self) -> str:
        """Of every dead letter."""
        return f"{self.prefix}.dead.>"

    @property
    def claim_subjects(self) -> str:
        """Of the claims among the records."""
        return f"{self.prefix}.records.*.*.claim"


def all_streams(names: Names, max_store_bytes: int) -> tuple[StreamConfig, ...]:
    """The streams of a run, buckets included, which are streams with certain subjects."""
    return (
        _requests(names, max_store_bytes // 8),
        _records(names, max_store_bytes),
        _weights(names, max_store_bytes // 8),
        _dead_letters(names, max_store_bytes // 16),
        _blobs(names, max_store_bytes // 2),
        _control(names, max_store_bytes // 32),
    )


def runners(names: Names) -> ConsumerConfig:
    """The one consumer of the work queue, from which all runners pull."""
    return ConsumerConfig(
        durable_name=RUNNERS,
        filter_subject=names.request_subject,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=MAX_UNDER_WAY,
    )


def _requests(names: Names, max_bytes: int) -> StreamConfig:
    """Full means refused: a request that is dropped would be a rollout that never ends."""
    return StreamConfig(
        name=names.requests,
        subjects=[names.request_subject],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        max_msgs=MAX_REQUESTS,
        max_msg_size=SMALL_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
    )


def _records(names: Names, max_bytes: int) -> StreamConfig:
    """Full means refused, and no call ends without its record: back-pressure up to the harness.

    No limit on their number: bytes are what a disk has.
    """
    return StreamConfig(
        name=names.records,
        subjects=[names.record_subjects],
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        max_msg_size=CLAIM_BYTES + HEADROOM_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
    )


def _weights(names: Names, max_bytes: int) -> StreamConfig:
    """Full means the oldest goes: only the newest version is ever read, and old push reports are statistics."""
    return StreamConfig(
        name=names.weights,
        subjects=[f"{names.prefix}.weights.>"],
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        max_msgs=MAX_REPORTS,
        max_msg_size=SMALL_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
    )


def _dead_letters(names: Names, max_bytes: int) -> StreamConfig:
    """One letter per subject, which names the message: setting it aside again after a restart changes nothing."""
    return StreamConfig(
        name=names.dead_letters,
        subjects=[names.dead_subjects],
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        max_msgs=MAX_DEAD_LETTERS,
        max_msgs_per_subject=1,
        max_msg_size=CLAIM_BYTES + HEADROOM_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
    )


def _blobs(names: Names, max_bytes: int) -> StreamConfig:
    """An object store, as NATS's clients lay it out: chunks of 128 KiB, and one description per object."""
    return StreamConfig(
        name=f"OBJ_{names.blobs}",
        subjects=[f"$O.{names.blobs}.C.>", f"$O.{names.blobs}.M.>"],
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        allow_rollup_hdrs=True,
        allow_direct=True,
    )


def _control(names: Names, max_bytes: int) -> StreamConfig:
    """A key-value bucket, as NATS's clients lay it out, without history."""
    return StreamConfig(
        name=f"KV_{names.control}",
        subjects=[f"$KV.{names.control}.>"],
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        num_replicas=1,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        max_msg_size=SMALL_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
        deny_delete=True,
    )


async def ensure(js: JetStreamContext, config: StreamConfig) -> None:
    """A new stream, or the existing one with these limits. BrokerError when the server refuses."""
    try:
        await js.stream_info(config.name or "")
    except nats.js.errors.NotFoundError:
        change = js.add_stream
    else:
        change = js.update_stream
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
