"""Joins the call records of a rollout to its manifest and hands over what can be trained of it.

Records come in any order and may come twice. A rollout is closed when every call of its manifest is there; one
whose manifest waits for longer than `close_timeout_s` is dropped by name. What waits here is bounded by
admission: only admitted rollouts have records. Of a closed rollout its name is kept for as long as the process
lives, and what came of it until `forget_calls`. The caller passes the time, which must stand still while the
caller takes nothing from the stream, since a missing call may lie in what it has not taken.

A record that contradicts itself, or another copy of its call, is set aside by the caller. The call counts as
arrived, and its rollout closes dropped as malformed.

The same records give the same rollout in whatever order they come, with one exception: what comes after the
rollout is closed changes nothing any more, and of two copies of a call that differ the first one to come has its
tokens in the fates. (A leaf cap that is a quantile depends on the order in which rollouts close.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from clawpipe.pipeline import soundness
from clawpipe.pipeline.closing import Rollout as Rollout
from clawpipe.pipeline.closing import all_dropped, close, name_of
from clawpipe.pipeline.closing import num_sampled as num_sampled
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.records import CallRecord, RolloutManifest
from clawpipe.pipeline.segments import CallFate, DropReason


class Arrival(StrEnum):
    """What a record was to the assembler."""

    NEW = "new"
    DUPLICATE = "duplicate"  # seen before; nothing changed
    LATE = "late"  # a call that nobody knew of, of a rollout that is closed
    UNSOUND = "unsound"  # it contradicts itself
    CONFLICTING = "conflicting"  # seen before, with another content


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What became of a record."""

    arrival: Arrival
    rollout: Rollout | None = None  # that it closed
    detail: str = ""  # what is wrong with the record


@dataclass(slots=True, eq=False)
class _Seen:
    """What came of a rollout: all that is kept of it once it is closed. About 160 bytes a record."""

    names: set[str] = field(default_factory=set)  # of the records that were taken
    contents: set[int] = field(default_factory=set)  # of every record, those that were set aside included: hashes

    def look(self, record: CallRecord | RolloutManifest) -> Verdict:
        """Compares the record with what came before, and notes it."""
        content = hash(msgspec.msgpack.encode(record))  # 64 bits: enough to tell the records of one rollout apart
        if content in self.contents:
            return Verdict(Arrival.DUPLICATE)
        self.contents.add(content)
        wrong = soundness.problem(record)
        if wrong is not None:
            return Verdict(Arrival.UNSOUND, detail=wrong)
        if name_of(record) in self.names:
            return Verdict(Arrival.CONFLICTING, detail="it came before, with another content")
        self.names.add(name_of(record))
        return Verdict(Arrival.NEW)


@dataclass(slots=True, eq=False)
class _Open:
    seen: _Seen = field(default_factory=_Seen)
    records: dict[str, CallRecord] = field(default_factory=dict)
    spoiled: dict[str, str] = field(default_factory=dict)  # name -> why
    manifest: RolloutManifest | None = None
    manifest_s: float = 0.0  # when the first one came
    awaited: set[str] = field(default_factory=set)  # calls of the manifest of which nothing came

    def hear(self, record: CallRecord | RolloutManifest, now_s: float) -> Verdict:
        """Takes the record for what it is."""
        verdict = self.seen.look(record)
        if verdict.arrival in (Arrival.UNSOUND, Arrival.CONFLICTING):
            self.spoil(name_of(record), verdict.detail)
        elif verdict.arrival is Arrival.NEW and isinstance(record, CallRecord):
            self.records[record.call_id] = record
            self.awaited.discard(record.call_id)
        if isinstance(record, RolloutManifest) and verdict.arrival in (Arrival.NEW, Arrival.CONFLICTING):
            return self._weigh(record, verdict, now_s)
        return verdict

    def spoil(self, name: str, why: str) -> None:
        """A record of this name is of no use."""
        self.spoiled[name] = min(why, self.spoiled.get(name, why))  # of several the same in any order
        self.awaited.discard(name)

    def _weigh(self, manifest: RolloutManifest, verdict: Verdict, now_s: float) -> Verdict:
        """Of several manifests the one of the earliest attempt counts; of two that differ in content, any."""
        if self.manifest is None:
            self.manifest_s = now_s
        elif _rank(self.manifest) < _rank(manifest):
            return verdict if verdict.detail else Verdict(Arrival.DUPLICATE)
        self.manifest = manifest
        self.awaited = {entry.call_id for entry in manifest.calls} - self.records.keys() - self.spoiled.keys()
        return verdict


class Assembler:
    """See the module. With `auxiliary`, sub-agents and compactions have parts of their own."""

    def __init__(self, *, close_timeout_s: float, leaf_caps: LeafCaps, auxiliary: bool) -> None:
        self._close_timeout_s = close_timeout_s
        self._leaf_caps = leaf_caps
        self._auxiliary = auxiliary
        self._open: dict[str, _Open] = {}
        self._closed: dict[str, _Seen | None] = {}  # None: nobody knows any more what came of it
        self._skipped: set[str] = set()  # closed rollouts of which all that is read now is accounted for

    def add(self, record: CallRecord | RolloutManifest, now_s: float) -> Verdict:
        """Takes a record; gives the rollout if that closes it."""
        rollout_id = record.rollout_id
        if rollout_id in self._skipped:
            return Verdict(Arrival.DUPLICATE)
        if rollout_id in self._closed:
            return self._after_the_end(record)
        verdict = self._opened(rollout_id).hear(record, now_s)
        rollout = self._close_if_complete(rollout_id)
        return verdict if rollout is None else replace(verdict, rollout=rollout)

    def spoil(self, rollout_id: str, call_id: str) -> Rollout | None:
        """A record of this call came that cannot even be read; gives the rollout if that closes it."""
        if rollout_id in self._closed:
            return None
        self._opened(rollout_id).spoil(call_id, "a record of it came that cannot be read")
        return self._close_if_complete(rollout_id)

    def expire(self, now_s: float) -> list[Rollout]:
        """Closes the rollouts whose manifest has waited too long for its calls: dropped as incomplete."""
        late = [
            rollout_id
            for rollout_id, waiting in self._open.items()
            if waiting.manifest is not None and now_s - waiting.manifest_s > self._close_timeout_s
        ]
        return [self._close(rollout_id) for rollout_id in late]

    def abandon(self, rollout_id: str, reason: DropReason) -> tuple[CallFate, ...]:
        """Gives up a rollout without a manifest; gives the fates of the calls that came of it."""
        waiting = self._open.pop(rollout_id, _Open())
        self._closed[rollout_id] = waiting.seen
        return all_dropped(waiting.records.values(), reason)

    def skip(self, rollout_ids: Iterable[str]) -> None:
        """These are done and in the books: until `caught_up` everything that is read of them is known already."""
        for rollout_id in rollout_ids:
            self._closed.setdefault(rollout_id, None)
            self._skipped.add(rollout_id)

    def caught_up(self) -> None:
        """What the stream held at the start is read: a call that comes now for a skipped rollout is a late one."""
        self._skipped.clear()

    def forget_calls(self, rollout_id: str) -> None:
        """Keeps no more of a closed rollout than that it is closed."""
        self._closed[rollout_id] = None

    def is_closed(self, rollout_id: str) -> bool:
        """Whether the rollout is over."""
        return rollout_id in self._closed

    @property
    def without_manifest(self) -> tuple[str, ...]:
        """Rollouts of which calls have come and the manifest has not."""
        return tuple(rollout_id for rollout_id, waiting in self._open.items() if waiting.manifest is None)

    def _opened(self, rollout_id: str) -> _Open:
        waiting = self._open.get(rollout_id)
        if waiting is None:
            waiting = self._open[rollout_id] = _Open()
        return waiting

    def _after_the_end(self, record: CallRecord | RolloutManifest) -> Verdict:
        seen = self._closed[record.rollout_id]
        if seen is None:
            seen = self._closed[record.rollout_id] = _Seen()
        verdict = seen.look(record)
        if verdict.arrival is not Arrival.NEW:
            return verdict
        return Verdict(Arrival.LATE if isinstance(record, CallRecord) else Arrival.DUPLICATE)

    def _close_if_complete(self, rollout_id: str) -> Rollout | None:
        waiting = self._open[rollout_id]
        return self._close(rollout_id) if waiting.manifest is not None and not waiting.awaited else None

    def _close(self, rollout_id: str) -> Rollout:
        waiting = self._open.pop(rollout_id)
        assert waiting.manifest is not None
        self._closed[rollout_id] = waiting.seen
        harness = waiting.manifest.harness
        rollout = close(
            waiting.manifest,
            waiting.records.values(),
            self._leaf_caps.cap_for(rollout_id, harness),
            auxiliary=self._auxiliary,
            spoiled=waiting.spoiled,
        )
        if rollout.leaf_cap:
            self._leaf_caps.note(harness, rollout.num_leaves)
        return rollout


def _rank(manifest: RolloutManifest) -> tuple[int, bytes]:
    return manifest.attempt, msgspec.msgpack.encode(manifest)
