"""What the record stream holds, read: a message -> a call record or manifest, or why it cannot be used. Pure.

A bad message must stop nobody: whoever reads the stream gets an entry for every message, and sets the bad ones
aside (`records.DeadLetter`).
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from clawpipe.pipeline.decoding import UNREADABLE
from clawpipe.pipeline.records import SCHEMA, CallRecord, DeadLetter, Flaw, RolloutManifest

CALL, MANIFEST = "call", "manifest"
LETTER_BYTES = 480 * 1024  # of a dead letter's body; the record itself stays in the stream until it is purged
KEPT_BYTES = 64 * 1024  # of a longer one
DETAIL_CHARS = 1000
DIGEST_BYTES = 16
MAX_DEPTH = 64  # of what a harness asked for: one that can just be read could not be written again

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
    """The entry of a message; subjects are <prefix>.records.<kind>.<rollout id>, and .claim behind it for a claim."""
    tokens = subject.split(".")
    kind, rollout_id = tokens[2], tokens[3] if len(tokens) > 3 else ""
    try:
        record = _decoders[kind].decode(body)
    except KeyError:
        return bad(sequence, subject, message_id, body, Flaw.UNREADABLE, f"there are no records of kind {kind!r}")
    except UNREADABLE as err:
        return bad(sequence, subject, message_id, body, *_what_is_wrong(body, err))
    if record.schema > SCHEMA:
        return bad(sequence, subject, message_id, body, Flaw.UNKNOWN_SCHEMA, _newer(record.schema))
    if record.rollout_id != rollout_id:
        detail = f"it names rollout {record.rollout_id}, and came as one of {rollout_id}"
        return bad(sequence, subject, message_id, body, Flaw.UNSOUND, detail)
    if kind == CALL and _is_deeper(record.requested, MAX_DEPTH):
        return bad(sequence, subject, message_id, body, Flaw.UNREADABLE, f"it is nested deeper than {MAX_DEPTH}")
    return Entry(sequence, subject, message_id, rollout_id, record)


def bad(sequence: int, subject: str, message_id: str, body: bytes, flaw: Flaw, detail: str) -> Entry:
    """The entry of a message that cannot be used."""
    rollout_id = "".join(subject.split(".")[3:4])
    return Entry(sequence, subject, message_id, rollout_id, None, flaw, detail, body)


def digest_of(body: bytes) -> str:
    """blake2b of 16 bytes, in hexadecimal digits."""
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).hexdigest()


def cut(letter: DeadLetter) -> DeadLetter:
    """The letter in a size that one message holds: of a longer body its beginning, its length and its digest."""
    detail, message_id = letter.detail[:DETAIL_CHARS], letter.message_id[:DETAIL_CHARS]
    letter = msgspec.structs.replace(letter, detail=detail, message_id=message_id)
    if len(letter.body) <= LETTER_BYTES:
        return letter
    digest = digest_of(letter.body)
    detail = f"{detail} [body of {len(letter.body)} bytes, blake2b {digest}, cut to {KEPT_BYTES}]"
    return msgspec.structs.replace(letter, body=letter.body[:KEPT_BYTES], detail=detail)


def _what_is_wrong(body: bytes, err: Exception) -> tuple[Flaw, str]:
    """A newer schema may have fields of other types: then that is the reason, not the type."""
    try:
        schema = _dates.decode(body).schema
    except UNREADABLE:
        return Flaw.UNREADABLE, str(err)
    return (Flaw.UNKNOWN_SCHEMA, _newer(schema)) if schema > SCHEMA else (Flaw.UNREADABLE, str(err))


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and tables lie in each other more than `depth` times."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if not isinstance(value, list | tuple):
        return False
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in value)


def _newer(schema: int) -> str:
    return f"its schema is {schema}, this clawpipe reads up to {SCHEMA}; run all processes with one version"
