"""What the record stream holds, read: a message -> a call record or manifest, or why it cannot be used. Pure.

A bad message must stop nobody: whoever reads the stream gets an entry for every message, and sets the bad ones
aside (`records.DeadLetter`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from clawpipe.pipeline.records import SCHEMA, CallRecord, DeadLetter, Flaw, RolloutManifest

CALL, MANIFEST = "call", "manifest"

_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    CALL: msgspec.msgpack.Decoder(CallRecord),
    MANIFEST: msgspec.msgpack.Decoder(RolloutManifest),
}


class _Dated(msgspec.Struct, frozen=True, kw_only=True):
    """The one field that every schema has."""

    schema: int = SCHEMA


_dates = msgspec.msgpack.Decoder(_Dated)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One message of the record stream. `record` is None exactly when `flaw` is set."""

    sequence: int
    subject: str
    message_id: str  # a call's id, for a call
    rollout_id: str  # as the subject says
    record: CallRecord | RolloutManifest | None
    flaw: Flaw | None = None
    detail: str = ""
    body: bytes = b""  # as it came, when it cannot be used

    @property
    def kind(self) -> str:
        """CALL or MANIFEST, as the subject says."""
        return self.subject.split(".")[2]

    def dead(self, flaw: Flaw, detail: str) -> DeadLetter:
        """The letter that sets this message aside."""
        body = self.body or (msgspec.msgpack.encode(self.record) if self.record is not None else b"")
        return DeadLetter(
            flaw=flaw,
            detail=detail,
            sequence=self.sequence,
            subject=self.subject,
            message_id=self.message_id,
            rollout_id=self.rollout_id,
            body=body,
            set_aside_s=time.time(),
        )


def read(sequence: int, subject: str, message_id: str, body: bytes) -> Entry:
    """The entry of a message; subjects are <prefix>.records.<kind>.<rollout id>."""
    kind, rollout_id = subject.split(".")[2:4]
    try:
        record = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, KeyError) as err:
        flaw, detail = _what_is_wrong(body, err)
        return Entry(sequence, subject, message_id, rollout_id, None, flaw, detail, body)
    if record.schema > SCHEMA:
        return Entry(sequence, subject, message_id, rollout_id, None, Flaw.UNKNOWN_SCHEMA, _newer(record.schema), body)
    if record.rollout_id != rollout_id:
        detail = f"it names rollout {record.rollout_id}, and came as one of {rollout_id}"
        return Entry(sequence, subject, message_id, rollout_id, None, Flaw.UNSOUND, detail, body)
    return Entry(sequence, subject, message_id, rollout_id, record)


def _what_is_wrong(body: bytes, err: Exception) -> tuple[Flaw, str]:
    """A newer schema may have fields of other types: then that is the reason, not the type."""
    try:
        schema = _dates.decode(body).schema
    except msgspec.MsgspecError:
        return Flaw.UNREADABLE, str(err)
    return (Flaw.UNKNOWN_SCHEMA, _newer(schema)) if schema > SCHEMA else (Flaw.UNREADABLE, str(err))


def _newer(schema: int) -> str:
    return f"its schema is {schema}, this clawpipe reads up to {SCHEMA}; run all processes with one version"
