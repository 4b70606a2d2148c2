"""Joins the call records of a rollout to its manifest and hands over what can be trained of it.

Records come in any order and may come twice. A rollout is closed when every call of its manifest is there; one
whose manifest waits for longer than `close_timeout_s` is dropped by name. What waits here is bounded by
admission: only admitted rollouts have records. The caller passes the time, which must stand still while the
caller takes nothing from the stream, since a missing call may lie in what it has not taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import CallRecord, Infra, Role, RolloutManifest, VerifierInfra
from clawpipe.pipeline.segments import CallFate, DropReason, Part, Selection, branches_of, dropped_whole, select
from clawpipe.pipeline.tree import MalformedRecords, build, resolve


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


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A closed rollout: what is trained of it, and what became of each of its calls."""

    manifest: RolloutManifest
    parts: tuple[Part, ...]  # main first; none without branches
    fates: tuple[CallFate, ...]
    dropped: DropReason | None = None  # why all of it is dropped
    detail: str = ""  # what a person should know about that
    num_leaves: int = 0
    leaf_cap: int = 0  # by which it was judged; 0: it was not

    @property
    def rollout_id(self) -> str:
        """Its id."""
        return self.manifest.rollout_id

    @property
    def num_kept(self) -> int:
        """Trainable tokens."""
        return sum(part.num_kept for part in self.parts)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Those of the main conversation."""
        return branches_of(self.parts, Role.MAIN)

    @property
    def num_tokens(self) -> int:
        """Tokens on all kept branches: what it occupies."""
        return sum(len(branch.tokens) for part in self.parts for branch in part.branches)

    @property
    def newest_version(self) -> int:
        """The version of its newest trainable token. ValueError when it has none."""
        return max(int(branch.versions.max()) for part in self.parts for branch in part.branches)

    @property
    def reward(self) -> float:
        """The graded reward. ValueError for a rollout that was not graded."""
        outcome = self.manifest.outcome
        if isinstance(outcome, Infra | VerifierInfra):
            raise ValueError(f"rollout {self.rollout_id} was not graded: {outcome}")
        return outcome.reward


@dataclass(slots=True)
class _Open:
    records: dict[str, CallRecord] = field(default_factory=dict)
    manifest: RolloutManifest | None = None
    manifest_s: float = 0.0

    def missing(self) -> list[str]:
        """Ids of the manifest's calls that are not here."""
        assert self.manifest is not None
        return [entry.call_id for entry in self.manifest.calls if entry.call_id not in self.records]


class Assembler:
    """See the module."""

    def __init__(self, *, close_timeout_s: float, leaf_cap: int) -> None:
        self._close_timeout_s = close_timeout_s
        self._leaf_cap = leaf_cap
        self._open: dict[str, _Open] = {}
        self._closed: dict[str, frozenset[str]] = {}  # rollout -> the calls that are accounted for
        self._skipped: set[str] = set()  # closed rollouts of which every call that is read now is accounted for

    def add(self, record: CallRecord | RolloutManifest, now_s: float) -> Verdict:
        """Takes a record; gives the rollout if that closes it."""
        known = self._closed.get(record.rollout_id)
        if known is not None:
            return Verdict(self._after_the_end(record, known))
        waiting = self._open.setdefault(record.rollout_id, _Open())
        if isinstance(record, CallRecord):
            arrival = Arrival.DUPLICATE if record.call_id in waiting.records else Arrival.NEW
            waiting.records.setdefault(record.call_id, record)
        else:
            arrival = Arrival.DUPLICATE if waiting.manifest else Arrival.NEW
            if waiting.manifest is None:
                waiting.manifest, waiting.manifest_s = record, now_s
        if waiting.manifest is None or waiting.missing():
            return Verdict(arrival)
        return Verdict(arrival, self._close(record.rollout_id))

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
        self._closed[rollout_id] = frozenset(waiting.records)
        return _all(waiting.records.values(), reason)

    def skip(self, rollout_ids: Iterable[str]) -> None:
        """These are done and in the books: until `caught_up` everything that is read of them is known already."""
        for rollout_id in rollout_ids:
            self._closed.setdefault(rollout_id, frozenset())
            self._skipped.add(rollout_id)

    def caught_up(self) -> None:
        """What the stream held at the start is read: a call that comes now for a skipped rollout is a late one."""
        self._skipped.clear()

    def forget_calls(self, rollout_id: str) -> None:
        """Keeps no more of a closed rollout than that it is closed."""
        self._closed[rollout_id] = frozenset()

    def is_closed(self, rollout_id: str) -> bool:
        """Whether the rollout is over."""
        return rollout_id in self._closed

    @property
    def without_manifest(self) -> tuple[str, ...]:
        """Rollouts of which calls have come and the manifest has not."""
        return tuple(rollout_id for rollout_id, waiting in self._open.items() if waiting.manifest is None)

    def _after_the_end(self, record: CallRecord | RolloutManifest, known: frozenset[str]) -> Arrival:
        if isinstance(record, RolloutManifest) or record.call_id in known or record.rollout_id in self._skipped:
            return Arrival.DUPLICATE
        self._closed[record.rollout_id] = known | {record.call_id}
        return Arrival.LATE

    def _close(self, rollout_id: str) -> Rollout:
        waiting = self._open.pop(rollout_id)
        assert waiting.manifest is not None
        self._closed[rollout_id] = frozenset(waiting.records)
        return close(waiting.manifest, waiting.records.values(), self._leaf_cap)


def close(manifest: RolloutManifest, records: Iterable[CallRecord], leaf_cap: int) -> Rollout:
    """The rollout of a manifest and all records that came of it, other attempts' included."""
    listed = {entry.call_id for entry in manifest.calls}
    mine: list[CallRecord] = []
    others: list[CallRecord] = []
    for record in sorted(records, key=lambda r: (r.attempt, r.index, r.call_id)):
        (mine if record.call_id in listed else others).append(record)
    strange = tuple(fate for record in others for fate in _all([record], _reason_for_unlisted(record, manifest)))
    whole, detail = _reason_for_all(manifest, listed - {record.call_id for record in mine})
    if whole is None:
        selection = _selection(manifest, mine, leaf_cap)
        if isinstance(selection, Selection) and selection.num_kept:
            return Rollout(
                manifest=manifest,
                parts=selection.parts,
                fates=selection.fates + strange,
                num_leaves=selection.num_leaves,
                leaf_cap=leaf_cap,
            )
        if isinstance(selection, Selection):
            fates = selection.fates
            over = any(DropReason.OVER_BRANCHED in fate.dropped for fate in fates)
            whole = DropReason.OVER_BRANCHED if over else DropReason.NO_TOKENS
            return Rollout(
                manifest=manifest,
                parts=(),
                fates=fates + strange,
                dropped=whole,
                num_leaves=selection.num_leaves,
                leaf_cap=leaf_cap,
            )
        whole, detail = DropReason.MALFORMED, selection
    return Rollout(manifest=manifest, parts=(), fates=_all(mine, whole) + strange, dropped=whole, detail=detail)


def _reason_for_all(manifest: RolloutManifest, missing: set[str]) -> tuple[DropReason | None, str]:
    outcome = manifest.outcome
    if isinstance(outcome, Infra):
        return DropReason.INFRA, f"{outcome.boundary}: {outcome.message}"
    if isinstance(outcome, VerifierInfra):
        return DropReason.VERIFIER_INFRA, outcome.message
    if missing:
        first = min(missing)
        return DropReason.INCOMPLETE, f"{len(missing)} of {len(manifest.calls)} calls never came, {first} for one"
    if not math.isfinite(outcome.reward):
        return DropReason.MALFORMED, f"its reward is {outcome.reward}"
    return None, ""


def _selection(manifest: RolloutManifest, records: list[CallRecord], leaf_cap: int) -> Selection | str:
    """The kept branches, or what is wrong with the records."""
    try:
        tree = build(resolve(records))
    except MalformedRecords as err:
        return str(err)
    return select(
        tree,
        leaf_cap=leaf_cap,
        delivered={entry.call_id for entry in manifest.calls if entry.delivered},
        cut={entry.call_id for entry in manifest.calls if entry.cut},
    )


def _reason_for_unlisted(record: CallRecord, manifest: RolloutManifest) -> DropReason:
    return DropReason.UNLISTED if record.attempt == manifest.attempt else DropReason.LOST_ATTEMPT


def _all(records: Iterable[CallRecord], reason: DropReason) -> tuple[CallFate, ...]:
    return dropped_whole(((r.call_id, r.role, num_sampled(r)) for r in records), reason)


def num_sampled(record: CallRecord) -> int:
    """C."""
    return len(record.completion_ids) // np.dtype(np.int32).itemsize
