"""Takes a run up again: after --resume, and after the service alone was started anew.

The record stream is the truth. What must come from elsewhere is where to read from and what the learner has
trained: a learner that starts says so itself (Hello: the cursor and updates of its checkpoint); one that lives
on has trained what the ledger says. In this order: `anchor`, `prepare`, all records from the anchor's cursor on,
`rejoin` finds out what is in flight, each of `claims` is made again (`groups_of`, build, `claim`), `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from clawpipe.pipeline.batches import Built
from clawpipe.pipeline.books import BatchRow, RolloutState, Row, Standing
from clawpipe.pipeline.flow import Flow
from clawpipe.pipeline.intake import Earlier
from clawpipe.pipeline.ledger_file import Stored
from clawpipe.pipeline.records import DeadLetter, Flaw, Hello, LearnerMessage, RolloutRequest, StreamCursor
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.scheduler import group_id, parse
from clawpipe.pipeline.segments import DropReason

# Groups that may have been admitted since the ledger was last written, in times of what may be in flight.
UNBOOKED_ADMISSIONS = 8

# Why the clock or an audit dropped a rollout: reading its records again would not tell.
_NOT_IN_THE_STREAM = frozenset({DropReason.INCOMPLETE.value, DropReason.LOST.value})


# Why a rollout left the queue for good: its records alone would put it there again.
_OUT_OF_THE_QUEUE = frozenset(
    reason.value for reason in (DropReason.STALE, DropReason.SMALL_GROUP, DropReason.REFUSED, DropReason.NO_STEP)
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where the run is taken up."""

    cursor: StreamCursor
    checkpoint: int  # updates that the cursor's checkpoint holds
    updates: int  # that the learner has made
    version: int
    lease_lives: bool  # the learner may hold a batch still
    committed_updates: int | None = None  # of the learner's last checkpoint since it started


def anchor(message: LearnerMessage, stored: Stored) -> Anchor:
    """What the first message that a learner sends says about it."""
    if isinstance(message, Hello):
        return Anchor(message.cursor, message.updates, message.updates, message.version, lease_lives=False)
    standing = stored.standing or Standing()
    return Anchor(
        cursor=standing.cursor,
        checkpoint=standing.updates,
        updates=max((row.updates for row in stored.updates), default=standing.updates),
        version=max((row.version for row in stored.updates), default=0),
        lease_lives=True,
        committed_updates=standing.updates if standing.written else None,
    )


def decided_caps(stored: Stored) -> dict[str, int]:
    """The leaf caps by which rollouts were judged, by id."""
    return {row.rollout_id: row.leaf_cap for row in stored.rows if row.leaf_cap}


def prepare(flow: Flow, stored: Stored, at: Anchor, letters: Iterable[DeadLetter] = ()) -> None:
    """Before the records from `at.cursor` on are read. `letters`: what was set aside so far."""
    above = set(at.cursor.done)
    below = {r.rollout_id for r in stored.rows if 0 < r.last_sequence < at.cursor.sequence}
    settled = above | below
    dropped = {r.rollout_id for r in stored.rows if r.rollout_id not in settled and _dropped_by_the_clock(r)}
    strays = {r.rollout_id for r in stored.rows if r.is_stray and r.group_id in settled | dropped}
    done = settled | dropped | strays
    kept = [row for row in stored.rows if row.rollout_id not in done and _never_ran(row)]
    earlier = _earlier(flow, stored, at, letters)
    flow.take_up(
        at.cursor,
        earlier,
        checkpoint=at.checkpoint,
        updates=at.updates,
        version=at.version,
        committed_updates=at.committed_updates,
    )
    flow.assembler.skip(done)
    for rollout_id in settled:
        flow.scheduler.know(rollout_id, over=True)
    for row in stored.rows:
        if row.rollout_id in done and row.leaf_cap:
            flow.holdings.leaf_caps.note(row.harness, row.num_leaves)
    for rollout_id in sorted(dropped & earlier.requests.keys(), key=_again):
        flow.scheduler.adopt(earlier.requests[rollout_id])
        flow.scheduler.lose(rollout_id)
    _restore_books(flow, stored, at, done, kept)


def rejoin(flow: Flow, stored: Stored, at: Anchor, pending: Sequence[RolloutRequest]) -> None:
    """After the last record that the stream had. `pending`: the requests that are still in the work queue."""
    for request in pending:
        if not flow.assembler.is_closed(request.rollout_id):
            flow.scheduler.adopt(request)
            flow.requested(request)
    in_flight = set(flow.scheduler.in_flight)
    for rollout_id in flow.assembler.without_manifest:
        if rollout_id not in in_flight:
            flow.lost(rollout_id, DropReason.LOST_ATTEMPT)
    for row in stored.rows:
        if _has_vanished(flow, row):
            flow.lost(row.rollout_id)
    for rollout_id in (*flow.ledger.rows, *(row.rollout_id for row in stored.rows)):
        flow.scheduler.know(rollout_id)
    for row in stored.rows:
        _restore_trainings(flow, row, at)
    _drop_again(flow, stored)


def claims(stored: Stored, at: Anchor) -> list[BatchRow]:
    """The batches that are the learner's and in no checkpoint, oldest first. Their groups were queued again while
    the records were read."""
    found = [batch for batch in stored.batches if _is_claimed(batch, at)]
    return sorted(found, key=lambda batch: (batch.updates is None, batch.updates or 0))


def groups_of(flow: Flow, batch: BatchRow) -> list[ReadyGroup]:
    """Takes the groups of a claim out of the queue, as they were when it was leased."""
    members = set(batch.rollouts)
    numbers = (parse(rollout_id) for rollout_id in batch.rollouts)
    keys = dict.fromkeys(group_id(name.number) for name in numbers if name is not None)
    found = [flow.replay.remove(key) for key in keys]
    return [_restricted(flow, group, members) for group in found if group is not None]


def claim(flow: Flow, stored: Stored, batch: BatchRow, built: Built) -> None:
    """The batch, built again, is the learner's as before."""
    updates = [row for row in stored.updates if row.updates == batch.updates]
    flow.leases.claim(built, updates[0] if updates else None)


def finish(flow: Flow) -> None:
    """Everything is known: credits are given to what is in flight, and the books are proved."""
    for key, places in flow.scheduler.open_groups.items():
        flow.admission.restore(key, places)
    groups = flow.holdings.groups
    for group in groups:
        if not group.uses:
            flow.admission.restore(group.group_id, len(group.rollouts))
    held = {*flow.scheduler.open_groups, *(group.group_id for group in groups)}
    for key in flow.spans.open:
        if key not in held:  # all its rollouts are lost, and it is not known what to ask for again
            flow.spans.set_over(key, True)
    flow.taken_up()


def complete(flow: Flow, stored: Stored, at: Anchor, pending: Sequence[RolloutRequest]) -> None:
    """All that follows the last record, at once: for those who have no loop to keep free."""
    rejoin(flow, stored, at, pending)
    for batch in claims(stored, at):
        if groups := groups_of(flow, batch):
            claim(flow, stored, batch, flow.recipe.build(batch.batch_id, batch.version, groups))
    finish(flow)


def _earlier(flow: Flow, stored: Stored, at: Anchor, letters: Iterable[DeadLetter]) -> Earlier:
    rows = [row for row in stored.rows if not row.is_stray]
    names = [name for name in (parse(row.rollout_id) for row in rows) if name is not None]
    margin = UNBOOKED_ADMISSIONS * flow.admission.capacity // flow.limits.group_size
    return Earlier(
        requests={row.rollout_id: _request(row) for row in rows if row.task_id},
        uses=at.cursor.uses,
        turned_away={letter.sequence for letter in letters if letter.flaw is Flaw.UNADMITTED},
        end_number=None if stored.empty else max((name.number for name in names), default=-1) + 1 + margin,
    )


def _restore_books(flow: Flow, stored: Stored, at: Anchor, done: Set[str], kept: Sequence[Row]) -> None:
    flow.ledger.restore(
        [row for row in stored.rows if row.rollout_id in done],
        kept,
        [row for row in stored.updates if row.updates <= at.updates],
    )
    flow.ledger.rewound(at.updates)
    stays = done | {row.rollout_id for row in kept}
    flow.ledger.discard(
        [row.rollout_id for row in stored.rows if row.rollout_id not in stays],
        [batch.batch_id for batch in stored.batches if batch.updates is None or batch.updates > at.checkpoint],
    )


def _restore_trainings(flow: Flow, row: Row, at: Anchor) -> None:
    """A rollout whose group was trained and waits to be trained again: its records are those of an untrained one."""
    updates = [number for number in row.updates if number <= at.checkpoint]
    here = flow.ledger.rows.get(row.rollout_id)
    if updates and here is not None and here.state is RolloutState.QUEUED:
        flow.ledger.trained_before(row.rollout_id, updates, row.set_aside)


def _drop_again(flow: Flow, stored: Stored) -> None:
    """What left the queue stays out of it: the checkpoint that is on its way does not hold it as waiting."""
    rows = (row for row in stored.rows if row.state is RolloutState.DROPPED and row.reason in _OUT_OF_THE_QUEUE)
    reasons = {row.rollout_id: DropReason(row.reason) for row in rows}
    for group in flow.replay.groups:
        if reasons.keys().isdisjoint(rollout.rollout_id for rollout in group.rollouts):
            continue
        flow.replay.remove(group.group_id)
        for rollout in group.rollouts:
            if rollout.rollout_id in reasons:
                flow.ledger.dropped(rollout.rollout_id, reasons[rollout.rollout_id])
        left = tuple(rollout for rollout in group.rollouts if rollout.rollout_id not in reasons)
        if left:
            flow.replay.put(replace(group, rollouts=left))
        else:
            flow.holdings.end(group.group_id)


def _dropped_by_the_clock(row: Row) -> bool:
    return row.state is RolloutState.DROPPED and row.reason in _NOT_IN_THE_STREAM and not row.is_stray


def _again(rollout_id: str) -> int:
    """Which try of its place it was: they are lost in this order."""
    name = parse(rollout_id)
    return name.again if name is not None else 0


def _never_ran(row: Row) -> bool:
    """Nothing of it is in the stream, and nothing is to come."""
    ended = RolloutState.WITHDRAWN, RolloutState.DROPPED
    return row.state in ended and row.last_sequence == 0 and row.sampled == 0


def _has_vanished(flow: Flow, row: Row) -> bool:
    """It was requested, and neither the work queue nor the stream knows of it. One that was settled has vanished when
    the learner is back at a checkpoint below which its records were kept no longer."""
    unknown = not row.is_stray and row.rollout_id not in flow.ledger.rows
    return unknown and not flow.assembler.is_closed(row.rollout_id)


def _request(row: Row) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        task_id=row.task_id,
        harness=row.harness,
        version=row.version,
        admitted_s=row.admitted_s,
    )


def _is_claimed(batch: BatchRow, at: Anchor) -> bool:
    if batch.updates is None:
        return at.lease_lives
    return at.checkpoint < batch.updates <= at.updates


def _restricted(flow: Flow, group: ReadyGroup, members: set[str]) -> ReadyGroup:
    """The group as it was leased: what was stale then is not trained now."""
    for rollout in group.rollouts:
        if rollout.rollout_id not in members:
            flow.ledger.dropped(rollout.rollout_id, DropReason.STALE)
    return replace(group, rollouts=tuple(r for r in group.rollouts if r.rollout_id in members))
