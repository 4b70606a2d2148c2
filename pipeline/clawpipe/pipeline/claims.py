"""Records that are too large for a message: the body as a blob in the object store, a claim in its place.

A blob's name holds its digest, so a blob is never overwritten, a repeated put is none, and the body that comes
back is proven to be the one that went in.

Blobs lie as NATS's clients lay objects out (chunks, and a description behind them), and any client reads them. But
they are put, read and deleted here. nats-py's object store with a time limit around it would not do:
- a put that is cut short leaves its chunks under a random name, which nobody finds; ours are named by the digest;
- a get that is cut short, as it waits for a chunk that is gone, leaves its subscription;
- a delete leaves a mark, and as many marks as there were blobs fill the bucket in the end.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated

import anyio
import msgspec
import nats.js.errors
from msgspec import Meta, Struct
from nats.js import JetStreamContext
from nats.js.api import ObjectInfo, ObjectMetaOptions

from clawpipe.pipeline.decoding import UNREADABLE
from clawpipe.pipeline.entries import digest_of
from clawpipe.pipeline.stream_reader import LOST, RETRY_S
from clawpipe.pipeline.streams import Names

ORPHAN_AGE = timedelta(hours=1)  # far longer than from a blob to its claim
CHUNK_BYTES = 128 * 1024  # what NATS's own clients take


class Claim(Struct, frozen=True, kw_only=True):
    """What is stored in the place of a large record."""

    blob: str  # name in the object store: "<message id>-<digest>"
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # `digest_of` the body
    num_bytes: int


class _Description(Struct, frozen=True, kw_only=True):
    """What is read of an object's description."""

    nuid: str  # names its chunks
    chunks: int = 0


class MissingBlobError(Exception):
    """The body that a claim stands for is not there, or is another one. The message is for a person."""


_decode_claim = msgspec.msgpack.Decoder(Claim).decode
_decode_description = msgspec.json.Decoder(_Description).decode


def claim_for(message_id: str, body: bytes) -> Claim:
    """The claim of a body."""
    digest = digest_of(body)
    return Claim(blob=f"{message_id}-{digest}", digest=digest, num_bytes=len(body))


class Claims:
    """The bucket of large bodies, and the claims to them in the record stream."""

    def __init__(self, js: JetStreamContext, names: Names) -> None:
        self._js = js
        self._names = names
        self._stream = f"OBJ_{names.blobs}"

    async def put(self, claim: Claim, body: bytes, timeout_s: float) -> None:
        """Stores the body unless it is there. TimeoutError, or what NATS says; may be repeated."""
        with anyio.fail_after(timeout_s):
            try:
                await self._description(claim.blob)
            except nats.js.errors.NotFoundError:
                await self._put(claim, body)

    async def _put(self, claim: Claim, body: bytes) -> None:
        """The description last: it says which chunks are the blob, and that they are all there.

        Every try has a subject of its own: what an earlier one had on its way may still come after the purge.
        """
        await self._js.purge_stream(self._stream, subject=self._chunks(f"{claim.digest}.>"))
        nuid = f"{claim.digest}.{secrets.token_hex(4)}"
        subject = self._chunks(nuid)
        for start in range(0, len(body), CHUNK_BYTES):
            await self._js.publish(subject, body[start : start + CHUNK_BYTES])
        description = ObjectInfo(
            name=claim.blob,
            bucket=self._names.blobs,
            nuid=nuid,
            size=len(body),
            chunks=-(-len(body) // CHUNK_BYTES),
            mtime=datetime.now(UTC).isoformat(),
            digest=f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode()}",
            options=ObjectMetaOptions(max_chunk_size=CHUNK_BYTES),
        )
        await self._js.publish(
            self._described(claim.blob), msgspec.json.encode(description.as_dict()), headers={"Nats-Rollup": "sub"}
        )

    async def body(self, stub: bytes) -> bytes:
        """The body that the claim stands for. MissingBlobError; waits for a server that cannot be reached."""
        try:
            claim = _decode_claim(stub)
        except UNREADABLE as err:
            raise MissingBlobError(f"its claim cannot be read: {err}") from err
        while True:
            try:
                return _proven(claim, await self._read(claim))
            except nats.js.errors.NotFoundError as err:
                raise MissingBlobError(f"blob {claim.blob} is not in the object store") from err
            except LOST:
                await anyio.sleep(RETRY_S)
            except (nats.js.errors.Error, *UNREADABLE) as err:
                raise MissingBlobError(f"blob {claim.blob} cannot be read: {err}") from err

    async def _read(self, claim: Claim) -> bytes:
        description = await self._description(claim.blob)
        chunks: list[bytes] = []
        position = 1
        for _ in range(description.chunks):
            raw = await self._js.get_msg(self._stream, position, self._chunks(description.nuid), direct=True, next=True)
            chunks.append(raw.data or b"")
            position = (raw.seq or 0) + 1
        return b"".join(chunks)

    async def delete_below(self, below: int) -> None:
        """Deletes the blobs of all claims whose sequence is lower than `below`. May be repeated."""
        for claim in await self._claims(below):
            await self._delete(claim)

    async def delete_orphans(self, age: timedelta = ORPHAN_AGE) -> int:
        """Deletes what a killed publisher left behind: blobs and chunks without a claim, older than `age`.

        Returns how many subjects it removed.
        """
        claims = await self._claims()
        kept = {self._described(claim.blob) for claim in claims} | {self._chunks(claim.digest) for claim in claims}
        orphans = [subject for subject in await self._subjects() if ".".join(subject.split(".")[:4]) not in kept]
        old = [subject for subject in orphans if await self._is_older(subject, age)]
        for subject in old:
            await self._js.purge_stream(self._stream, subject=subject)
        return len(old)

    async def _claims(self, below: int | None = None) -> list[Claim]:
        """The claims in the record stream that can be read, up to sequence `below`, oldest first."""
        found: list[Claim] = []
        sequence = 0
        while below is None or sequence + 1 < below:
            try:
                raw = await self._js.get_msg(self._names.records, sequence + 1, self._names.claim_subjects, next=True)
            except nats.js.errors.NotFoundError:
                break
            sequence = raw.seq or sequence + 1
            if below is not None and sequence >= below:
                break
            with suppress(*UNREADABLE):
                found.append(_decode_claim(raw.data or b""))
        return found

    async def _delete(self, claim: Claim) -> None:
        await self._js.purge_stream(self._stream, subject=self._chunks(f"{claim.digest}.>"))
        await self._js.purge_stream(self._stream, subject=self._described(claim.blob))

    async def _description(self, blob: str) -> _Description:
        raw = await self._js.get_last_msg(self._stream, self._described(blob))
        return _decode_description(raw.data or b"")

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._names.blobs}.C.{nuid}"

    def _described(self, blob: str) -> str:
        return f"$O.{self._names.blobs}.M.{base64.urlsafe_b64encode(blob.encode()).decode()}"

    async def _subjects(self) -> list[str]:
        found = await self._js.stream_info(self._stream, f"$O.{self._names.blobs}.>")
        return sorted(found.state.subjects or ())

    async def _is_older(self, subject: str, age: timedelta) -> bool:
        raw = await self._js.get_last_msg(self._stream, subject)
        return raw.time is not None and datetime.now(UTC) - raw.time > age


def _proven(claim: Claim, body: bytes) -> bytes:
    if digest_of(body) != claim.digest:
        raise MissingBlobError(
            f"blob {claim.blob} has {len(body)} bytes with digest {digest_of(body)} where {claim.digest} was stored"
        )
    return body
