"""Takes a run up again: after --resume, and after the service alone was started anew.

The record stream is the truth. What must come from elsewhere is where to read from and what the learner has
trained: a learner that starts says so itself (Hello: the cursor and updates of its checkpoint); one that lives
on has trained what the ledger says. `prepare` sets the flow up for reading from the cursor, `complete` finds
out, when all records have been read, what is still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from clawpipe.pipeline.books import BatchRow, RolloutState, Row, Standing
from clawpipe.pipeline.flow import Flow
from clawpipe.pipeline.ledger_file import Stored
from clawpipe.pipeline.records import Hello, LearnerMessage, RolloutRequest, StreamCursor
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.scheduler import group_id, parse
from clawpipe.pipeline.segments import DropReason


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where the run is taken up."""

    cursor: StreamCursor
    updates: int
    version: int
    lease_lives: bool  # the learner may hold a batch still
    committed_updates: int | None = None  # of the learner's last checkpoint since it started


def anchor(message: LearnerMessage, stored: Stored) -> Anchor:
    """What the first message that a learner sends says about it."""
    if isinstance(message, Hello):
        return Anchor(message.cursor, message.updates, message.version, lease_lives=False)
    standing = stored.standing or Standing()
    return Anchor(
        cursor=standing.cursor,
        updates=max((row.updates for row in stored.updates), default=standing.updates),
        version=max((row.version for row in stored.updates), default=0),
        lease_lives=True,
        committed_updates=standing.updates if standing.written else None,
    )


def prepare(flow: Flow, stored: Stored, at: Anchor) -> None:
    """Before the records from `at.cursor` on are read."""
    flow.catching_up = True
    flow.updates, flow.version = at.updates, at.version
    flow.committed_updates = at.committed_updates
    flow.spans.start_at(at.cursor.sequence)
    above = set(at.cursor.done)
    done = [r for r in stored.rows if r.rollout_id in above or 0 < r.last_sequence < at.cursor.sequence]
    done_ids = above | {row.rollout_id for row in done}
    kept = [row for row in stored.rows if row.rollout_id not in done_ids and _never_ran(row)]
    kept_ids = {row.rollout_id for row in kept}
    flow.assembler.skip(done_ids)
    for rollout_id in done_ids:
        flow.scheduler.know(rollout_id, over=True)
    flow.ledger.restore(done, kept, [row for row in stored.updates if row.updates <= at.updates])
    flow.ledger.rewound(at.updates)
    flow.ledger.discard(
        [row.rollout_id for row in stored.rows if row.rollout_id not in done_ids | kept_ids],
        [batch.batch_id for batch in stored.batches],
    )


def complete(flow: Flow, stored: Stored, at: Anchor, pending: Sequence[RolloutRequest]) -> None:
    """After the last record that the stream had. `pending`: the requests that are still in the work queue."""
    for request in pending:
        if not flow.assembler.is_closed(request.rollout_id):
            flow.scheduler.adopt(request)
            flow.requested(request)
    in_flight = set(flow.scheduler.in_flight)
    for rollout_id in flow.assembler.without_manifest:
        if rollout_id not in in_flight:
            flow.lost(rollout_id, DropReason.LOST_ATTEMPT)
    _find_lost(flow, stored)
    for rollout_id in (row.rollout_id for row in stored.rows):
        flow.scheduler.know(rollout_id)
    claims = [batch for batch in stored.batches if _is_claimed(batch, at)]
    for batch in sorted(claims, key=lambda b: (b.updates is None, b.updates or 0)):
        _claim(flow, stored, batch)
    _restore_credits(flow)
    flow.assembler.caught_up()
    flow.catching_up = False
    flow.check()


def _never_ran(row: Row) -> bool:
    """Nothing of it is in the stream, and nothing is to come."""
    ended = RolloutState.WITHDRAWN, RolloutState.DROPPED
    return row.state in ended and row.last_sequence == 0 and row.sampled == 0


def _find_lost(flow: Flow, stored: Stored) -> None:
    """Rollouts that were requested, of which neither the work queue nor the stream knows."""
    for row in stored.rows:
        if row.state is RolloutState.IN_FLIGHT and row.rollout_id not in flow.ledger.rows:
            if flow.assembler.is_closed(row.rollout_id):
                continue
            flow.requested(
                RolloutRequest(
                    rollout_id=row.rollout_id,
                    group_id=row.group_id,
                    task_id=row.task_id,
                    harness=row.harness,
                    version=row.version,
                    admitted_s=row.admitted_s,
                )
            )
            flow.lost(row.rollout_id)


def _is_claimed(batch: BatchRow, at: Anchor) -> bool:
    if batch.updates is None:
        return at.lease_lives
    return batch.updates <= at.updates


def _claim(flow: Flow, stored: Stored, batch: BatchRow) -> None:
    """Gives the batch the groups that were queued again while the records were read."""
    members = set(batch.rollouts)
    found = [flow.replay.remove(key) for key in _groups_of(batch)]
    groups = [_restricted(flow, group, members) for group in found if group is not None]
    if not groups:
        return  # a checkpoint holds it
    built = flow.recipe.build(batch.batch_id, batch.version, groups)
    row = BatchRow(batch_id=batch.batch_id, version=batch.version, rollouts=built.rollout_ids)
    flow.ledger.leased(row, built.unused, built.masked)
    flow.batches.restore(built, batch.updates)
    if batch.updates is not None:
        [update] = [row for row in stored.updates if row.updates == batch.updates]
        flow.ledger.stepped(batch.batch_id, update)
        for group in groups:
            flow.spans.set_over(group.group_id, True)


def _groups_of(batch: BatchRow) -> Iterable[str]:
    numbers = (parse(rollout_id) for rollout_id in batch.rollouts)
    return dict.fromkeys(group_id(name.number) for name in numbers if name is not None)


def _restricted(flow: Flow, group: ReadyGroup, members: set[str]) -> ReadyGroup:
    """The group as it was leased: what was stale then is not trained now."""
    for rollout in group.rollouts:
        if rollout.rollout_id not in members:
            flow.ledger.dropped(rollout.rollout_id, DropReason.STALE)
    return replace(group, rollouts=tuple(r for r in group.rollouts if r.rollout_id in members))


def _restore_credits(flow: Flow) -> None:
    for key, places in flow.scheduler.open_groups.items():
        flow.admission.restore(key, places)
    lease = flow.batches.lease
    for group in (*flow.replay.groups, *(lease.groups if lease else ())):
        flow.admission.restore(group.group_id, len(group.rollouts))
