"""A rollout's manifest and records -> what can be trained of it, and a reason for all that cannot. Pure.

The `assembler` calls it once for every rollout, when nothing more is to come; `clawpipe replay` calls it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import CallRecord, Infra, Role, RolloutManifest, VerifierInfra
from clawpipe.pipeline.segments import CallFate, DropReason, Part, Selection, branches_of, dropped_whole, select
from clawpipe.pipeline.tree import MalformedRecords, PrefixTree, build, resolve

TOKEN_BYTES = 4


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
    tree_digest: str = ""  # of its calls' prefix tree; empty: none was built
    orphans: tuple[CallRecord, ...] = ()  # of this attempt, whose parent never came

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


def name_of(record: CallRecord | RolloutManifest) -> str:
    """The record's name in the run: two records of one name must be equal."""
    if isinstance(record, CallRecord):
        return record.call_id
    return f"{record.rollout_id}.a{record.attempt}.manifest"


def close(
    manifest: RolloutManifest,
    records: Iterable[CallRecord],
    leaf_cap: int,
    *,
    auxiliary: bool = False,
    spoiled: Mapping[str, str] | None = None,
) -> Rollout:
    """The rollout of a manifest and all sound records that came of it, other attempts' included, in any order.

    With `auxiliary`, sub-agents and compactions have parts of their own. `spoiled`: the names of the records that
    came and cannot be used, and why; one that the manifest lists, or the manifest's own, drops the rollout.
    """
    listed = {entry.call_id for entry in manifest.calls}
    mine: list[CallRecord] = []
    others: list[CallRecord] = []
    for record in sorted(records, key=lambda r: (r.attempt, r.index, r.call_id)):
        (mine if record.call_id in listed else others).append(record)
    strange = tuple(fate for record in others for fate in all_dropped([record], _reason_for_unlisted(record, manifest)))
    bad = spoiled or {}
    rollout = _judge(manifest, mine, leaf_cap, auxiliary, bad)
    return replace(rollout, fates=rollout.fates + strange, orphans=_orphans(mine, bad))


def all_dropped(records: Iterable[CallRecord], reason: DropReason) -> tuple[CallFate, ...]:
    """The fates of calls that are all dropped for one reason."""
    return dropped_whole(((r.call_id, r.role, num_sampled(r)) for r in records), reason)


def num_sampled(record: CallRecord) -> int:
    """C."""
    return len(record.completion_ids) // TOKEN_BYTES


def _judge(
    manifest: RolloutManifest, mine: Sequence[CallRecord], leaf_cap: int, auxiliary: bool, spoiled: Mapping[str, str]
) -> Rollout:
    """The rollout of the records that its manifest lists."""
    whole, detail = _reason_for_all(manifest, {record.call_id for record in mine}, spoiled)
    if whole is None:
        try:
            tree = build(resolve(mine))
        except MalformedRecords as err:
            whole, detail = DropReason.MALFORMED, str(err)
        else:
            return _selected(manifest, tree, leaf_cap, auxiliary)
    return Rollout(manifest=manifest, parts=(), fates=all_dropped(mine, whole), dropped=whole, detail=detail)


def _reason_for_all(
    manifest: RolloutManifest, here: set[str], spoiled: Mapping[str, str]
) -> tuple[DropReason | None, str]:
    outcome = manifest.outcome
    listed = [entry.call_id for entry in manifest.calls]
    if isinstance(outcome, Infra):
        return DropReason.INFRA, f"{outcome.boundary}: {outcome.message}"
    if isinstance(outcome, VerifierInfra):
        return DropReason.VERIFIER_INFRA, outcome.message
    bad = min((name for name in [name_of(manifest), *listed] if name in spoiled), default=None)
    if bad is not None:
        return DropReason.MALFORMED, f"{bad}: {spoiled[bad]}"
    missing = set(listed) - here
    if missing:
        return DropReason.INCOMPLETE, f"{len(missing)} of {len(listed)} calls never came, {min(missing)} for one"
    if not math.isfinite(outcome.reward):
        return DropReason.MALFORMED, f"its reward is {outcome.reward}"
    return None, ""


def _selected(manifest: RolloutManifest, tree: PrefixTree, leaf_cap: int, auxiliary: bool) -> Rollout:
    selection = select(
        tree,
        leaf_cap=leaf_cap,
        delivered={entry.call_id for entry in manifest.calls if entry.delivered},
        cut={entry.call_id for entry in manifest.calls if entry.cut},
        auxiliary=auxiliary,
    )
    return Rollout(
        manifest=manifest,
        parts=selection.parts,
        fates=selection.fates,
        dropped=_reason_for_nothing(selection, leaf_cap),
        num_leaves=selection.num_leaves,
        leaf_cap=leaf_cap,
        tree_digest=tree.digest(),
    )


def _reason_for_nothing(selection: Selection, leaf_cap: int) -> DropReason | None:
    if selection.num_leaves > leaf_cap:
        return DropReason.OVER_BRANCHED
    return None if selection.num_kept else DropReason.NO_TOKENS


def _orphans(mine: Sequence[CallRecord], spoiled: Mapping[str, str]) -> tuple[CallRecord, ...]:
    """Those whose parent never came; not what is spoiled itself, of which any copy may be here."""
    came = {record.call_id for record in mine} | spoiled.keys()
    return tuple(
        record
        for record in mine
        if record.parent is not None and record.parent not in came and record.call_id not in spoiled
    )


def _reason_for_unlisted(record: CallRecord, manifest: RolloutManifest) -> DropReason:
    return DropReason.UNLISTED if record.attempt == manifest.attempt else DropReason.LOST_ATTEMPT
