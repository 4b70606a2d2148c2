"""What the learner's messages mean: batches go out and come back trained, refused or lost. No I/O.

A batch is leased, not popped. Its groups are done when they have been trained `max_reuse` times; until then they
wait again, without credits: those go back at the first training. What a learner trained beyond its checkpoint is
undone when it starts anew, however often a group was in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from clawpipe.pipeline.batches import Built
from clawpipe.pipeline.books import BatchRow, Standing, UpdateRow
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.holdings import Holdings
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import BatchReady, Committed, Finished, Hello, NotYet, Stepped
from clawpipe.pipeline.replay import ReadyGroup, Taken
from clawpipe.pipeline.segments import DropReason

MAX_REFUSED_IN_ROW = 5


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A batch to be built; `leased` takes the result."""

    batch_id: str
    version: int
    groups: tuple[ReadyGroup, ...]


class Leases:
    """See the module."""

    def __init__(self, holdings: Holdings, *, updates: int, max_reuse: int, log: EventLog, process: str) -> None:
        """`updates`: of the run, in all. `process` tells this process from all earlier ones: the ids of its batches
        are made with it."""
        self.committed_updates: int | None = None  # of the learner's last checkpoint since it started
        self.checkpoint = 0  # updates of the newest one that was heard of: what is in it is not held here any more
        self._holdings = holdings
        self._updates = updates
        self._max_reuse = max_reuse
        self._log = log
        self._process = process
        self._leases = 0
        self._refused_in_row = 0

    @property
    def finished(self) -> bool:
        """Whether the run has had its updates."""
        return self._holdings.updates >= self._updates

    def hello(self, message: Hello) -> None:
        """The learner starts anew from a checkpoint: what it trained beyond waits again."""
        held = self._holdings
        self._check_known(message.updates)
        if message.updates < self.checkpoint:
            raise ClawpipeError(
                f"the learner starts from a checkpoint of {message.updates} updates, and one of {self.checkpoint} was "
                "written: what was trained in between can be trained again after `clawpipe up --resume` only"
            )
        for batch in held.batches.rewind(message.updates):
            self._undo(batch)
        held.ledger.rewound(message.updates)
        held.ledger.stands(Standing(cursor=message.cursor, updates=message.updates))
        held.updates, held.version, self.committed_updates = message.updates, message.version, None
        self.throttle()
        self._log.info("learner is up", version=message.version, updates=message.updates)

    def _check_known(self, updates: int) -> None:
        if updates > self._holdings.updates:
            raise ClawpipeError(
                f"the learner's checkpoint has seen {updates} updates, this run {self._holdings.updates}; "
                "resume the run folder that the checkpoint belongs to"
            )

    def _undo(self, batch: Built) -> None:
        """Its groups wait as they did before it was leased. A group may wait already, for a later training that was
        undone before this one."""
        held = self._holdings
        held.ledger.requeued(batch.batch_id)
        for group in batch.groups:
            held.replay.remove(group.group_id)
            held.replay.put(group)
            held.spans.set_over(group.group_id, False)
            held.admission.release_all(group.group_id)
            if not group.uses:
                held.admission.restore(group.group_id, len(group.rollouts))

    def lease(self, version: int) -> BatchReady | NotYet | Finished | Order:
        """The next batch: the one that is out already, or an order to build it."""
        held = self._holdings
        held.version = max(version, held.version)
        if held.batches.lease is not None:
            return held.batches.lease.ready
        if self.finished:
            return Finished()
        fresh = {group.group_id for group in held.replay.groups if not group.uses}
        taken = held.replay.take(held.version, held.scheduler.open_harnesses, held.scheduler.head)
        self._drop(taken, fresh)
        if not taken.groups:
            return NotYet()
        self._leases += 1
        held.building = taken.groups
        return Order(f"b-{self._process}-{self._leases:06d}", held.version, taken.groups)

    def leased(self, batch: Built) -> BatchReady:
        """The ordered batch is built and goes out."""
        held = self._holdings
        held.building = ()
        held.batches.start(batch)
        self._book_lease(batch)
        return batch.ready

    def stepped(self, message: Stepped, now_s: float) -> None:
        """The learner is done with its batch. Hearing so twice is once. `now_s` is the time of day."""
        held = self._holdings
        batch = held.batches.end(message.batch_id)
        if batch is None:
            return
        if message.refused or message.updates == held.updates:
            self._refuse(batch, message)
            return
        self._refused_in_row = 0
        held.updates, held.version = message.updates, message.version
        held.batches.trained(batch, message.updates)
        update = update_row(batch, message, now_s)
        self._book_training(batch, update)
        self._log.info(
            "update",
            update=update.updates,
            version=message.version,
            reward=round(update.reward_mean, 4),
            entries=update.num_entries,
            staleness=round(update.staleness_mean, 3),
            groups_without_spread=update.groups_without_spread,
        )
        self.throttle()

    def throttle(self) -> None:
        """Lowers or raises the staleness that is admitted, as [correction.auto_throttle] has it, and says so."""
        held = self._holdings
        before = held.admission.max_staleness
        held.follow_ess()
        if (now := held.admission.max_staleness) == before:
            return
        self._log.warning(
            "max_staleness lowered" if now < before else "max_staleness raised",
            before=before,
            now=now,
            configured=held.max_staleness,
            updates=held.updates,
            reason="the effective sample size, by [correction.auto_throttle]",
        )

    def committed(self, message: Committed) -> int:
        """A checkpoint is on disk. Gives the sequence below which the record stream may be purged."""
        held = self._holdings
        self._check_known(message.updates)
        held.ledger.committed(batch.batch_id for batch in held.batches.commit(message.updates))
        for rollout_id in held.ledger.finish(message.updates):
            held.assembler.forget_calls(rollout_id)
        held.spans.forget_below(message.cursor.sequence)
        self.checkpoint = self.committed_updates = message.updates
        held.ledger.stands(Standing(cursor=message.cursor, updates=message.updates, written=True))
        return message.cursor.sequence

    def claim(self, batch: Built, update: UpdateRow | None) -> None:
        """A batch of an earlier process: trained as `update`, or with the learner still (None)."""
        self._book_lease(batch)
        self._holdings.batches.restore(batch, update.updates if update else None)
        if update is not None:
            self._book_training(batch, update)

    def _book_lease(self, batch: Built) -> None:
        row = BatchRow(batch_id=batch.batch_id, version=batch.version, rollouts=batch.rollout_ids, digest=batch.digest)
        self._holdings.ledger.leased(row, batch.set_aside)

    def _book_training(self, batch: Built, update: UpdateRow) -> None:
        """The groups of a trained batch are done, or wait to be trained again."""
        held = self._holdings
        used = [replace(group, uses=group.uses + 1) for group in batch.groups]
        waiting = [group for group in used if group.uses < self._max_reuse]
        held.ledger.stepped(batch.batch_id, update, _rollout_ids(waiting))
        for group in used:
            if group.uses < self._max_reuse:
                held.admission.release_all(group.group_id)
                held.replay.put(group)
            else:
                held.end(group.group_id)

    def _drop(self, taken: Taken, fresh: Set[str]) -> None:
        """What left the queue for good at the take. `fresh`: the groups that were never trained."""
        held = self._holdings
        for key, rollout, reason in taken.dropped:
            held.ledger.dropped(rollout.rollout_id, reason)
            if key in fresh:
                held.admission.release(key, 1)
            if reason is DropReason.MALFORMED:
                self._log.warning(
                    "rollout of a version that the learner has not made",
                    rollout=rollout.rollout_id,
                    version=rollout.newest_version,
                    learner=held.version,
                )
        left = {group.group_id for group in (*taken.groups, *held.replay.groups)}
        for key, reason in {key: reason for key, _, reason in taken.dropped if key not in left}.items():
            held.end(key)
            self._log.info("group dropped", group=key, reason=reason.value)

    def _refuse(self, batch: Built, message: Stepped) -> None:
        reason = DropReason.REFUSED if message.refused else DropReason.NO_STEP
        self._holdings.ledger.refused(batch.batch_id, reason)
        for group in batch.groups:
            self._holdings.end(group.group_id)
        self._log.warning("batch without a step", batch=batch.batch_id, reason=message.refused or reason.value)
        self._refused_in_row = self._refused_in_row + 1 if message.refused else 0
        if self._refused_in_row >= MAX_REFUSED_IN_ROW:
            raise ClawpipeError(
                f"the learner refused {MAX_REFUSED_IN_ROW} batches in a row, the last one because: {message.refused}"
            )


def update_row(batch: Built, message: Stepped, now_s: float) -> UpdateRow:
    """What the history keeps of an update."""
    rewards: dict[str, tuple[float, ...]] = {}
    for group in batch.groups:
        rewards[group.harness] = rewards.get(group.harness, ()) + tuple(rollout.reward for rollout in group.rollouts)
    return UpdateRow(
        updates=message.updates,
        version=batch.version,
        stepped_s=now_s,
        reward_mean=batch.reward_mean,
        num_rollouts=len(batch.rollout_ids),
        num_groups=len(batch.groups),
        num_entries=batch.num_entries,
        staleness_mean=batch.staleness_mean,
        staleness_max=batch.staleness_max,
        groups_without_spread=batch.groups_without_spread,
        masked=message.masked_tokens,
        metrics={name: value for name, value in message.metrics.items() if math.isfinite(value)},  # JSON has no others
        rewards=rewards,
    )


def _rollout_ids(groups: Sequence[ReadyGroup]) -> set[str]:
    return {rollout.rollout_id for group in groups for rollout in group.rollouts}
