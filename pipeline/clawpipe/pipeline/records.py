"""What crosses NATS: requests, call records, manifests, weight versions, and the learner's messages.

Fields are only ever added, with defaults. Token arrays travel as little-endian bytes; each comment gives
dtype and shape (P prompt tokens, C completion tokens). Times are seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

SCHEMA = 1  # of CallRecord and RolloutManifest; a record of a newer one is set aside

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Role(StrEnum):
    """What a call was for, told from the request alone."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    TITLE = "title"
    NUDGE = "nudge"
    MEMORY = "memory"
    UNKNOWN = "unknown"


class FinishReason(StrEnum):
    """Why sampling ended. CUT: the settling deadline ended the call; its tokens are still recorded."""

    STOP = "stop"
    LENGTH = "length"
    CUT = "cut"


class RolloutRequest(Struct, frozen=True, kw_only=True):
    """One rollout to run: an entry of the work queue."""

    rollout_id: str
    group_id: str
    task_id: str
    harness: str
    version: int = 0  # learner version when admitted
    admitted_s: float = 0.0


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Completion tokens [start, end) were sampled by weights of `version`."""

    version: int
    start: int
    end: int


class CallRecord(Struct, frozen=True, kw_only=True):
    """One model call, delta-encoded: the prompt is the parent's first `parent_tokens` tokens + `prompt_delta`.

    The parent's tokens are its whole prompt followed by its completion. Without a parent, `parent_tokens` is 0.
    """

    rollout_id: str
    attempt: int  # tells the deliveries of the request apart, at least 1; a later one has a higher number
    call_id: str  # unique in the run: "<rollout_id>.a<attempt>.c<index>"
    index: int  # order of arrival within the attempt, from 0
    parent: str | None  # call_id
    parent_tokens: int
    prompt_delta: bytes  # int32 LE [P - parent_tokens]
    prompt_tokens: int  # P
    completion_ids: bytes  # int32 LE [C]
    logprobs: bytes  # float32 LE [C], of the sampling distribution at the configured temperature
    versions: tuple[VersionSpan, ...]  # cover [0, C) without gaps
    finish_reason: FinishReason
    role: Role
    harness: str
    digest: str  # blake2b of the canonical request body
    graft_broken: str | None = None  # why an earlier turn could not be grafted, if one could not
    malformed_tool_call: bool = False
    requested: dict[str, Any] = {}  # sampling parameters that the harness asked for
    started_s: float = 0.0
    ended_s: float = 0.0
    schema: int = SCHEMA


class CallEntry(Struct, frozen=True, kw_only=True):
    """A call that exists, as the manifest lists it."""

    call_id: str
    delivered: bool  # the final event reached the harness's socket
    cut: bool = False


class Scored(Struct, frozen=True, kw_only=True, tag="scored"):
    """The harness ended by itself and the workspace was graded."""

    reward: float
    checks: dict[str, float] = {}


class TimedOut(Struct, frozen=True, kw_only=True, tag="timed_out"):
    """The wall clock ended the harness; the workspace was graded as it stood."""

    reward: float
    checks: dict[str, float] = {}


class AgentFailed(Struct, frozen=True, kw_only=True, tag="agent_failed"):
    """The harness ended with an error of its own making; the workspace was graded as it stood."""

    reward: float
    message: str
    checks: dict[str, float] = {}


class Infra(Struct, frozen=True, kw_only=True, tag="infra"):
    """Our side failed at `boundary`: in no statistic and no denominator."""

    boundary: str
    message: str


class VerifierInfra(Struct, frozen=True, kw_only=True, tag="verifier_infra"):
    """Grading failed for a reason that is not the agent's; can be graded again from the stored workspace."""

    message: str
    workspace: str = ""  # path of the stored workspace


Outcome = Scored | TimedOut | AgentFailed | Infra | VerifierInfra


class RolloutManifest(Struct, frozen=True, kw_only=True):
    """Exactly which calls of a rollout exist, and how it ended. Published once, after settling and grading."""

    rollout_id: str
    attempt: int
    group_id: str
    task_id: str
    harness: str
    calls: tuple[CallEntry, ...]
    outcome: Outcome
    version: int = 0  # learner version when admitted
    admitted_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    num_aborted: int = 0  # calls that ended in an error which the harness could see
    schema: int = SCHEMA


class Flaw(StrEnum):
    """Why a record is set aside in the dead-letter stream."""

    UNREADABLE = "unreadable"  # cut short, or no message of ours
    UNKNOWN_SCHEMA = "unknown_schema"  # written by a newer clawpipe
    UNSOUND = "unsound"  # it contradicts itself: lengths, version spans, ids
    MISSING_PARENT = "missing_parent"  # its parent never came
    CONFLICTING = "conflicting"  # a call that was recorded before, with another content
    UNADMITTED = "unadmitted"  # of a rollout that nobody asked for
    MISSING_BLOB = "missing_blob"  # its body is not in the object store, or is not what its digest says


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A record that cannot be used, as it came, with the reason."""

    flaw: Flaw
    detail: str  # for a person
    sequence: int  # in the record stream
    subject: str
    message_id: str
    rollout_id: str
    body: bytes = b""
    set_aside_s: float = 0.0


class WeightVersion(Struct, frozen=True, kw_only=True):
    """A version of the policy, staged for the engines. Numbers go up and are never reused."""

    version: int
    path: str  # safetensors file with Hugging Face names, on storage that every engine can read
    num_bytes: int
    created_s: float


class PushReport(Struct, frozen=True, kw_only=True):
    """One engine took one weight version."""

    engine: str
    version: int
    pause_s: float  # from pause to resume
    applied_s: float  # when


class EngineState(Struct, frozen=True, kw_only=True):
    """An engine's entry in the control bucket, key `engine.<name>`."""

    name: str
    url: str
    version: int | None  # None: still starting, or restarted and without its weights
    healthy: bool
    since_s: float = 0.0


class StreamCursor(Struct, frozen=True, kw_only=True):
    """Where a resumed run reads on: everything below `sequence` is trained or dropped, and so is `done`."""

    sequence: int = 0
    done: tuple[str, ...] = ()  # rollout ids at or above `sequence`
    uses: dict[str, int] = {}  # open groups that were trained already (max_reuse), and how often


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """The learner is up. What it trained beyond its checkpoint is lost and must be queued again."""

    version: int  # version under which it serves its (restored) weights
    updates: int  # updates that these weights have seen
    cursor: StreamCursor


class Lease(Struct, frozen=True, kw_only=True, tag="lease"):
    """Asks for the next batch."""

    version: int


class Chunk(Struct, frozen=True, kw_only=True, tag="chunk"):
    """Asks for part `index` of the body of a leased batch."""

    batch_id: str
    index: int


# The names in `Stepped.metrics` of where the learner's seconds went since its last report.
LEARNER_SECONDS = ("wait_s", "fetch_s", "train_s", "push_s", "checkpoint_s")


class Stepped(Struct, frozen=True, kw_only=True, tag="stepped"):
    """The learner is done with a batch and holds `version` now, the one before if there was nothing to learn from."""

    batch_id: str
    version: int
    updates: int
    metrics: dict[str, float]
    masked_tokens: dict[str, int] = {}  # trainable tokens left out of the loss, by reason
    refused: str = ""  # not empty: the batch was refused whole, for this reason; no step was made


class AskCursor(Struct, frozen=True, kw_only=True, tag="ask_cursor"):
    """Asks which cursor a checkpoint taken now must hold."""


class Committed(Struct, frozen=True, kw_only=True, tag="committed"):
    """A checkpoint with this cursor is safely on disk: all below may be purged."""

    version: int
    updates: int
    cursor: StreamCursor
    path: str


LearnerMessage = Hello | Lease | Chunk | Stepped | AskCursor | Committed


class BatchReady(Struct, frozen=True, kw_only=True, tag="batch"):
    """A leased batch; its body is fetched in `num_chunks` parts. `digest` is blake2b of the whole body."""

    batch_id: str
    num_chunks: int
    digest: str


class NotYet(Struct, frozen=True, kw_only=True, tag="not_yet"):
    """No batch is ready; ask again."""


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """The run has had its updates, or drains."""


class Data(Struct, frozen=True, kw_only=True, tag="data"):
    """A part of a batch's body."""

    body: bytes


class Ok(Struct, frozen=True, kw_only=True, tag="ok"):
    """Taken."""


class Cursor(Struct, frozen=True, kw_only=True, tag="cursor"):
    """The cursor that was asked for."""

    cursor: StreamCursor


LearnerReply = BatchReady | NotYet | Finished | Data | Ok | Cursor


def encode(message: Struct) -> bytes:
    """The message as msgpack bytes."""
    return msgspec.msgpack.encode(message)


def int_bytes(values: npt.ArrayLike) -> bytes:
    """Token ids as int32 little-endian bytes."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def float_bytes(values: npt.ArrayLike) -> bytes:
    """Logprobs as float32 little-endian bytes."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def ints(data: bytes) -> IntArray:
    """int32 LE bytes -> [n] array (read-only view)."""
    return np.frombuffer(data, dtype="<i4")


def floats(data: bytes) -> FloatArray:
    """float32 LE bytes -> [n] array (read-only view)."""
    return np.frombuffer(data, dtype="<f4")
