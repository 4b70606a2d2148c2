"""The books of a run: every rollout, call and token ends in a named state.

The flow tells the ledger what happens; `check` proves at every tick that what was sampled is in flight,
queued, leased, trained or dropped for a reason. The books are kept in memory and handed in batches to
`ledger_file`, which writes them off the hot path. The records stream remains the truth: after a restart the
rows of rollouts that are not done are made anew from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy

import msgspec

from clawpipe.pipeline.assembler import Rollout, num_sampled
from clawpipe.pipeline.books import (
    BatchRow,
    CallRow,
    Changes,
    RolloutState,
    Row,
    Standing,
    Totals,
    UpdateRow,
    added,
    copy_id,
    most_of,
)
from clawpipe.pipeline.records import AgentFailed, CallRecord, RolloutManifest, RolloutRequest
from clawpipe.pipeline.segments import CallFate, DropReason


class Ledger:
    """See the module. One row for each rollout that is not finished; finished ones are summed up."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.batches: dict[str, BatchRow] = {}
        self.updates: dict[int, UpdateRow] = {}
        self._finished: dict[str, Totals] = {}  # by harness
        self._leaving: list[Row] = []  # finished, and not handed over yet
        self._leaving_batches: dict[str, BatchRow] = {}  # committed, and not handed over yet
        self._dirty: set[str] = set()
        self._unchecked: set[str] = set()
        self._removed_rows: set[str] = set()
        self._calls: list[CallRow] = []
        self._dirty_batches: set[str] = set()
        self._dirty_updates: set[int] = set()
        self._cut_updates: int | None = None
        self._standing: Standing | None = None

    # What happens -----------------------------------------------------------------------------------------

    def requested(self, request: RolloutRequest) -> None:
        """A rollout is on the work queue."""
        row = self._row(request.rollout_id, request.group_id)
        if row.state is RolloutState.WITHDRAWN:
            row.state = RolloutState.IN_FLIGHT
        row.task_id, row.harness = request.task_id, request.harness
        row.version, row.admitted_s = request.version, request.admitted_s

    def sampled(self, record: CallRecord, group_id: str) -> None:
        """A call that was not known has come."""
        row = self._row(record.rollout_id, group_id)
        row.harness = row.harness or record.harness
        _count_call(row, record)
        row.sampled += num_sampled(record)
        row.open += num_sampled(record)

    def stray(self, record: CallRecord, group_id: str, reason: DropReason, sequence: int) -> None:
        """A call that is not used, whatever becomes of its rollout: late, of nobody's rollout, or set aside."""
        tokens = num_sampled(record)
        row = self.rows.get(record.rollout_id)
        name = record.call_id if row and reason is DropReason.LATE else copy_id(record.call_id, sequence)
        if row is None:
            row = Row(rollout_id=name, group_id=record.rollout_id, harness=record.harness, last_sequence=sequence)
            row.state, row.reason = RolloutState.DROPPED, reason.value
            self._leaving.append(row)
        else:
            self._touch(row)
            row.harness = row.harness or record.harness
        # What a record that contradicts itself says of its prompt would spoil the sums.
        _count_call(row, record, sound=reason is not DropReason.QUARANTINED)
        row.sampled += tokens
        row.dropped = added(row.dropped, {reason.value: tokens} if tokens else {})
        fate = CallFate(name, record.role, tokens, 0, {reason: tokens} if tokens else {})
        self._calls.append(_call_row(row.rollout_id, fate))
        if row.is_stray:
            self._finished.setdefault(row.harness, Totals()).add(row)

    def settled(self, rollout: Rollout, group_id: str, reason: DropReason | None, last_sequence: int) -> None:
        """The rollout is closed; `reason`: why it is not used, also if it could be trained."""
        manifest = rollout.manifest
        row = self._row(manifest.rollout_id, group_id)
        _describe(row, manifest)
        row.last_sequence = last_sequence
        row.detail = rollout.detail or row.detail
        row.num_leaves, row.leaf_cap, row.tree = rollout.num_leaves, rollout.leaf_cap, rollout.tree_digest
        self._take_fates(row, rollout.fates)
        row.state = RolloutState.QUEUED
        if reason is not None:
            self._drop(row, reason)

    def abandoned(
        self, rollout_id: str, group_id: str, fates: Iterable[CallFate], reason: DropReason, last_sequence: int
    ) -> None:
        """No manifest will come: what was sampled is dropped."""
        row = self._row(rollout_id, group_id)
        row.last_sequence = last_sequence
        self._take_fates(row, fates)
        self._drop(row, reason)

    def withdrawn(self, rollout_id: str, group_id: str) -> None:
        """The request was taken back before it ran."""
        self._row(rollout_id, group_id).state = RolloutState.WITHDRAWN

    def dropped(self, rollout_id: str, reason: DropReason) -> None:
        """A queued rollout leaves for good: dropped, or trained if it waited to be trained again."""
        self._leave(self.rows[rollout_id], reason)

    def leased(self, batch: BatchRow, set_aside: Mapping[str, Mapping[DropReason, int]]) -> None:
        """A batch went to the learner. `set_aside`: rollout id -> reason -> kept tokens without a loss entry or with
        one that the learner leaves out."""
        self.batches[batch.batch_id] = batch
        self._dirty_batches.add(batch.batch_id)
        for rollout_id in batch.rollouts:
            row = self._touch(self.rows[rollout_id])
            assert row.state is RolloutState.QUEUED, f"{rollout_id} is {row.state}, and leased"
            row.state = RolloutState.LEASED
            if not row.updates:  # else the first training stands: what it left out can only become more
                row.set_aside = {reason.value: n for reason, n in set_aside.get(rollout_id, {}).items()}
                row.reason = most_of(row.set_aside) if sum(row.set_aside.values()) == row.kept else ""

    def stepped(self, batch_id: str, update: UpdateRow, waiting: Collection[str] = ()) -> None:
        """The learner trained on a leased batch. `waiting`: its rollouts that wait to be trained again."""
        self.batches[batch_id] = msgspec.structs.replace(self.batches[batch_id], updates=update.updates)
        self._dirty_batches.add(batch_id)
        self.updates[update.updates] = update
        self._dirty_updates.add(update.updates)
        for rollout_id in self.batches[batch_id].rollouts:
            row = self._touch(self.rows[rollout_id])
            assert row.state is RolloutState.LEASED, f"{rollout_id} is {row.state}, and trained"
            row.state = RolloutState.QUEUED if rollout_id in waiting else RolloutState.TRAINED
            row.updates = [*row.updates, update.updates]

    def requeued(self, batch_id: str) -> None:
        """What the learner did with the batch is lost: its rollouts wait again."""
        batch = self._remove_batch(batch_id)
        for rollout_id in batch.rollouts:
            row = self._touch(self.rows[rollout_id])
            row.state = RolloutState.QUEUED
            row.updates = [number for number in row.updates if number != batch.updates]
            if not row.updates:
                row.set_aside, row.reason = {}, ""

    def refused(self, batch_id: str, reason: DropReason) -> None:
        """Nothing was trained of the batch and nothing will be."""
        for rollout_id in self._remove_batch(batch_id).rollouts:
            self._leave(self.rows[rollout_id], reason)

    def rewound(self, updates: int) -> None:
        """The learner is back at `updates`: later updates never happened."""
        self.updates = {number: row for number, row in self.updates.items() if number <= updates}
        self._dirty_updates = {number for number in self._dirty_updates if number <= updates}
        self._cut_updates = updates if self._cut_updates is None else min(updates, self._cut_updates)

    def committed(self, batch_ids: Iterable[str]) -> None:
        """These batches are in a checkpoint for good: the file keeps them, the memory does not."""
        for batch_id in batch_ids:
            batch = self.batches.pop(batch_id)
            if batch_id in self._dirty_batches:
                self._dirty_batches.discard(batch_id)
                self._leaving_batches[batch_id] = batch

    def finish(self, updates: int) -> list[str]:
        """Rollouts that are dropped or in a checkpoint of `updates` will not change any more: from memory into
        the sums. Gives their ids."""
        found = [
            row
            for row in self.rows.values()
            if row.state is RolloutState.DROPPED or (row.state is RolloutState.TRAINED and max(row.updates) <= updates)
        ]
        for row in found:
            _check(row)
            self._finished.setdefault(row.harness, Totals()).add(self.rows.pop(row.rollout_id))
            self._unchecked.discard(row.rollout_id)
            if row.rollout_id in self._dirty:
                self._dirty.discard(row.rollout_id)
                self._leaving.append(row)
        return [row.rollout_id for row in found]

    def stands(self, standing: Standing) -> None:
        """The learner has told of a checkpoint."""
        self._standing = standing

    # Restart ----------------------------------------------------------------------------------------------

    def restore(self, done: Iterable[Row], others: Iterable[Row], updates: Iterable[UpdateRow]) -> None:
        """Takes up what an earlier process wrote: rollouts that are done, others to keep, and the updates."""
        for row in done:
            self._finished.setdefault(row.harness, Totals()).add(row)
        self.rows.update({row.rollout_id: row for row in others})
        self.updates = {row.updates: row for row in updates}

    def trained_before(self, rollout_id: str, updates: Sequence[int], set_aside: Mapping[str, int]) -> None:
        """A queued rollout that was made anew from the stream waits to be trained again: these updates stand."""
        row = self._touch(self.rows[rollout_id])
        assert row.state is RolloutState.QUEUED, f"{rollout_id} is {row.state}, and was trained before"
        row.updates, row.set_aside = list(updates), dict(set_aside)

    def discard(self, rollout_ids: Iterable[str], batch_ids: Iterable[str]) -> None:
        """Rows of an earlier process that are made anew from the stream."""
        self._removed_rows.update(rollout_ids)
        self._dirty_batches.update(batch_ids)

    # Reading ----------------------------------------------------------------------------------------------

    def changes(self) -> Changes:
        """What the file does not have yet. The caller must write it."""
        found = Changes(
            rows=(*self._leaving, *(msgspec.structs.replace(self.rows[key]) for key in sorted(self._dirty))),
            removed_rows=tuple(sorted(self._removed_rows)),
            calls=tuple(self._calls),
            batches=(
                *self._leaving_batches.values(),
                *(self.batches[key] for key in sorted(self._dirty_batches) if key in self.batches),
            ),
            removed_batches=tuple(key for key in sorted(self._dirty_batches) if key not in self.batches),
            updates=tuple(self.updates[number] for number in sorted(self._dirty_updates)),
            removed_updates_above=self._cut_updates,
            standing=self._standing,
        )
        self._leaving, self._dirty, self._removed_rows, self._calls = [], set(), set(), []
        self._leaving_batches, self._dirty_batches = {}, set()
        self._dirty_updates, self._cut_updates = set(), None
        self._standing = None
        return found

    def totals(self) -> dict[str, Totals]:
        """Sums by harness over all rollouts, finished or not."""
        found = {harness: deepcopy(totals) for harness, totals in self._finished.items()}
        for row in self.rows.values():
            found.setdefault(row.harness, Totals()).add(row)
        return found

    def check(self, held: Mapping[str, tuple[RolloutState, int]]) -> None:
        """The conservation law. `held`: the settled rollouts that scheduler, queue and batches hold, with their
        trainable tokens. AssertionError that names the first rollout which breaks it."""
        for rollout_id in sorted(self._unchecked):
            _check(self.rows[rollout_id])
        self._unchecked.clear()
        live = RolloutState.QUEUED, RolloutState.LEASED
        booked = {row.rollout_id: (row.state, row.kept) for row in self.rows.values() if row.state in live}
        wrong = sorted(set(booked.items()) ^ set(held.items()))
        assert not wrong, f"rollout {wrong[0][0]}: booked {booked.get(wrong[0][0])}, held {held.get(wrong[0][0])}"

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Ids of the rollouts that are requested and not closed."""
        return tuple(row.rollout_id for row in self.rows.values() if row.state is RolloutState.IN_FLIGHT)

    # Inside -----------------------------------------------------------------------------------------------

    def _row(self, rollout_id: str, group_id: str) -> Row:
        row = self.rows.get(rollout_id)
        if row is None:
            row = self.rows[rollout_id] = Row(rollout_id=rollout_id, group_id=group_id)
        return self._touch(row)

    def _touch(self, row: Row) -> Row:
        self._dirty.add(row.rollout_id)
        self._unchecked.add(row.rollout_id)
        return row

    def _take_fates(self, row: Row, fates: Iterable[CallFate]) -> None:
        row.open = 0
        for fate in fates:
            self._calls.append(_call_row(row.rollout_id, fate))
            row.kept += fate.kept
            row.dropped = added(row.dropped, {reason.value: n for reason, n in fate.dropped.items()})

    def _leave(self, row: Row, reason: DropReason) -> None:
        if row.updates:
            self._touch(row).state = RolloutState.TRAINED
        else:
            self._drop(row, reason)

    def _drop(self, row: Row, reason: DropReason) -> None:
        """Tokens that were set aside for a reason keep it; the others get this one."""
        self._touch(row)
        left = row.kept - sum(row.set_aside.values())
        if left:
            row.set_aside = added(row.set_aside, {reason.value: left})
        row.state = RolloutState.DROPPED
        row.reason = reason.value if left or not row.kept else most_of(row.set_aside)

    def _remove_batch(self, batch_id: str) -> BatchRow:
        self._dirty_batches.add(batch_id)
        return self.batches.pop(batch_id)


def _check(row: Row) -> None:
    accounted = row.open + row.kept + sum(row.dropped.values())
    assert row.sampled == accounted, (
        f"rollout {row.rollout_id}: {row.sampled} tokens sampled, {accounted} accounted for"
    )
    assert sum(row.set_aside.values()) <= row.kept, f"{row.rollout_id}: more set aside than the {row.kept} tokens kept"
    assert not row.open or row.state is RolloutState.IN_FLIGHT, f"{row.rollout_id}: {row.state} with open calls"


def _count_call(row: Row, record: CallRecord, *, sound: bool = True) -> None:
    row.calls += 1
    row.roles = added(row.roles, {record.role.value: 1})
    if not sound:
        return
    row.prompt_tokens += record.prompt_tokens
    row.reused_tokens += record.parent_tokens
    row.malformed += record.malformed_tool_call
    if record.graft_broken is not None:
        row.broken = added(row.broken, {record.graft_broken: 1})


def _describe(row: Row, manifest: RolloutManifest) -> None:
    outcome = manifest.outcome
    row.task_id, row.harness, row.attempt = manifest.task_id, manifest.harness, manifest.attempt
    row.version, row.admitted_s = manifest.version, manifest.admitted_s
    row.started_s, row.ended_s, row.num_aborted = manifest.started_s, manifest.ended_s, manifest.num_aborted
    row.outcome = str(type(outcome).__struct_config__.tag)
    row.reward = getattr(outcome, "reward", None)
    if isinstance(outcome, AgentFailed):
        row.detail = outcome.message


def _call_row(rollout_id: str, fate: CallFate) -> CallRow:
    return CallRow(
        call_id=fate.call_id,
        rollout_id=rollout_id,
        role=fate.role.value,
        sampled=fate.sampled,
        kept=fate.kept,
        dropped={reason.value: tokens for reason, tokens in fate.dropped.items()},
    )
