"""The state between the record stream and the learner: what each record and each message means. No I/O.

Put together from the room's parts: a record goes through the assembler to its group (scheduler), complete
groups to the replay queue, from there in batches to the learner; credits (admission) come back when a place is
closed or trained; the ledger hears of every step. `service` feeds it and carries what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clawpipe.pipeline.admission import Admission
from clawpipe.pipeline.assembler import Arrival, Assembler, Rollout
from clawpipe.pipeline.batches import Batches, Built, Recipe
from clawpipe.pipeline.books import BatchRow, RolloutState, Standing, UpdateRow
from clawpipe.pipeline.config import Config, GrpoConfig
from clawpipe.pipeline.cursor import Spans
from clawpipe.pipeline.entries import Entry
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    BatchReady,
    CallRecord,
    Committed,
    Finished,
    Hello,
    NotYet,
    RolloutManifest,
    RolloutRequest,
    Stepped,
    StreamCursor,
)
from clawpipe.pipeline.replay import ReadyGroup, Replay, Taken
from clawpipe.pipeline.scheduler import INFRASTRUCTURE, Scheduler, Settlement, group_id, parse
from clawpipe.pipeline.segments import DropReason

MIN_LOSSES_IN_ROW = 16  # rollouts lost to infrastructure, one after the other, that end the run
MAX_REFUSED_IN_ROW = 5


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A batch to be built; `Flow.leased` takes the result."""

    batch_id: str
    version: int
    groups: tuple[ReadyGroup, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a run."""

    updates: int  # in all
    groups_per_step: int
    group_size: int


class Flow:
    """See the module."""

    def __init__(self, config: Config, tasks: Iterable[str], ledger: Ledger, log: EventLog, process: str) -> None:
        """`process` tells this process from all earlier ones: the ids of its batches are made with it."""
        schedule, replay = config.schedule, config.replay
        parallel = config.learner.parallel
        self.limits = Limits(config.run.updates, schedule.groups_per_step, schedule.group_size)
        leaf_cap = replay.leaf_cap if isinstance(replay.leaf_cap, int) else replay.leaf_cap.at_most
        self.assembler = Assembler(close_timeout_s=replay.close_timeout_s, leaf_cap=leaf_cap)
        self.scheduler = Scheduler(
            tasks=tuple(tasks),
            harnesses=[(harness.name, harness.weight) for harness in config.harness],
            groups_per_step=schedule.groups_per_step,
            group_size=schedule.group_size,
            seed=config.run.seed,
            refill=schedule.refill,
        )
        self.admission = Admission(
            max_staleness=schedule.max_staleness,
            rollouts_per_step=schedule.groups_per_step * schedule.group_size,
        )
        self.replay = Replay(
            capacity_tokens=replay.capacity_tokens,
            capacity_rollouts=replay.capacity_rollouts,
            max_staleness=schedule.max_staleness,
            groups_per_step=schedule.groups_per_step,
            shares=self.scheduler.shares,
        )
        assert isinstance(config.algorithm, GrpoConfig), "the learner's preflight refuses any other"
        self.recipe = Recipe(
            advantage_eps=config.algorithm.advantage_eps,
            pack_tokens=config.learner.pack_tokens,
            align=parallel.tensor,
            max_staleness=schedule.max_staleness,
        )
        self.batches = Batches()
        self.spans = Spans()
        self.ledger = ledger
        self.version = 0  # the learner's
        self.updates = 0
        self.committed_updates: int | None = None  # of the learner's last checkpoint since it started
        self.draining = False
        self.catching_up = False  # reading again what an earlier process had read
        self._log = log
        self._process = process
        self._building: tuple[ReadyGroup, ...] = ()
        self._leases = 0
        self._losses_in_row = 0
        self._refused_in_row = 0

    # Records ----------------------------------------------------------------------------------------------

    def record(self, entry: Entry, now_s: float) -> bool:
        """A message of the stream; says whether it closed a rollout.

        `now_s` stands still while nothing is taken from the stream.
        """
        sequence, record = entry.sequence, entry.record
        assert record is not None, "bad messages are set aside"
        name = parse(record.rollout_id)
        if name is None or (name.number >= self.scheduler.next_number and not self.catching_up):
            self._turn_away(sequence, record)
            return False
        key = name.group_id
        self.spans.note(key, record.rollout_id, sequence, over=self.scheduler.is_over(name.number))
        verdict = self.assembler.add(record, now_s)
        arrival, rollout = verdict.arrival, verdict.rollout
        if isinstance(record, CallRecord) and arrival is Arrival.NEW:
            self.ledger.sampled(record, key)
        elif isinstance(record, CallRecord) and arrival is Arrival.LATE:
            self.ledger.stray(record, key, DropReason.LATE)
        if rollout is not None:
            self._settle(key, rollout)
        return rollout is not None

    def tick(self, now_s: float) -> None:
        """Drops what has waited too long for its calls, then proves that nothing is missing."""
        for rollout in self.assembler.expire(now_s):
            self._settle(_group_of(rollout.rollout_id), rollout)
        if not self.catching_up:
            self.check()

    def check(self) -> None:
        """The conservation law; AssertionError with the first rollout that breaks it."""
        self.ledger.check(dict(self._held()))

    def lost(self, rollout_id: str, reason: DropReason = DropReason.LOST) -> None:
        """The rollout's request is gone, and no manifest came."""
        key = _group_of(rollout_id)
        fates = self.assembler.abandon(rollout_id, reason)
        self.ledger.abandoned(rollout_id, key, fates, reason)
        self._log.warning("rollout lost", rollout=rollout_id, reason=reason.value)
        self._advance(key, self.scheduler.lose(rollout_id))

    def _settle(self, key: str, rollout: Rollout) -> None:
        settlement = self.scheduler.settle(rollout)
        self.ledger.settled(rollout, key, settlement.reason, self.spans.last(key, rollout.rollout_id))
        outcome = type(rollout.manifest.outcome).__name__
        self._log.info(
            "rollout closed",
            rollout=rollout.rollout_id,
            calls=len(rollout.manifest.calls),
            outcome=outcome,
            kept_tokens=rollout.num_kept,
            dropped=settlement.reason.value if settlement.reason else "",
            detail=rollout.detail,
        )
        self._advance(key, settlement)
        self._count_losses(rollout, settlement.reason)

    def _advance(self, key: str, settlement: Settlement) -> None:
        if settlement.place_closed and not self.catching_up:
            self.admission.release(key, 1)
        if settlement.group is not None:
            self.replay.put(settlement.group)
        elif settlement.complete:
            self._end(key)

    def _end(self, key: str) -> None:
        """The group is done for good."""
        self.spans.set_over(key, True)
        self.admission.release_all(key)

    def _turn_away(self, sequence: int, record: CallRecord | RolloutManifest) -> None:
        self.spans.note(record.rollout_id, record.rollout_id, sequence, over=True)
        self._log.warning("record of a rollout that nobody asked for", rollout=record.rollout_id)
        if isinstance(record, CallRecord):
            self.ledger.stray(record, record.rollout_id, DropReason.UNADMITTED)

    def _count_losses(self, rollout: Rollout, reason: DropReason | None) -> None:
        self._losses_in_row = self._losses_in_row + 1 if reason in INFRASTRUCTURE else 0
        step = self.limits.groups_per_step * self.limits.group_size
        if self._losses_in_row >= max(MIN_LOSSES_IN_ROW, step) and not self.catching_up:
            raise ClawpipeError(
                f"{self._losses_in_row} rollouts in a row were lost to infrastructure, the last one "
                f"({rollout.rollout_id}) by {reason}: {rollout.detail}; look into logs/actor.log and logs/proxy.log"
            )

    # Requests ---------------------------------------------------------------------------------------------

    def requests(self, now_s: float) -> list[RolloutRequest]:
        """What is to be put onto the work queue now. `now_s` is the time of day."""
        if self.draining or self.catching_up or self.finished:
            return []
        while self._wants_group() and self.admission.admit(
            group_id(self.scheduler.next_number), self.limits.group_size
        ):
            self.scheduler.open(self.version)
        return self.scheduler.requests(now_s)

    def requested(self, request: RolloutRequest) -> None:
        """The request is on the work queue."""
        self.ledger.requested(request)

    def withdrawn(self, request: RolloutRequest) -> None:
        """The request was taken back before anybody ran it."""
        self.scheduler.withdraw(request.rollout_id)
        self.ledger.withdrawn(request.rollout_id, request.group_id)

    def _wants_group(self) -> bool:
        """No more groups than the updates that are left will train."""
        leased = len(self.batches.lease.groups) if self.batches.lease else 0
        ahead = len(self.scheduler.open_groups) + self.replay.num_groups + len(self._building) + leased
        return ahead < (self.limits.updates - self.updates) * self.limits.groups_per_step

    # The learner ------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the run has had its updates."""
        return self.updates >= self.limits.updates

    def hello(self, message: Hello) -> None:
        """The learner starts anew from a checkpoint: what it trained beyond waits again."""
        if message.updates > self.updates:
            raise ClawpipeError(
                f"the learner's checkpoint has seen {message.updates} updates, this run {self.updates}; "
                "resume the run folder that the checkpoint belongs to"
            )
        for batch in self.batches.rewind(message.updates):
            self.ledger.requeued(batch.batch_id)
            for group in batch.groups:
                self.replay.put(group)
                self.spans.set_over(group.group_id, False)
                self.admission.release_all(group.group_id)
                self.admission.restore(group.group_id, len(group.rollouts))
        self.ledger.rewound(message.updates)
        self.ledger.stands(Standing(cursor=message.cursor, updates=message.updates))
        self.updates, self.version, self.committed_updates = message.updates, message.version, None
        self._log.info("learner is up", version=message.version, updates=message.updates)

    def lease(self, version: int) -> BatchReady | NotYet | Finished | Order:
        """The next batch: the one that is out already, or an order to build it."""
        self.version = max(version, self.version)
        if self.batches.lease is not None:
            return self.batches.lease.ready
        if self.finished:
            return Finished()
        taken = self.replay.take(self.version, self.scheduler.open_harnesses)
        self._drop_stale(taken)
        if not taken.groups:
            return NotYet()
        self._leases += 1
        self._building = taken.groups
        return Order(f"b-{self._process}-{self._leases:06d}", self.version, taken.groups)

    def leased(self, batch: Built) -> BatchReady:
        """The ordered batch is built and goes out."""
        self._building = ()
        self.batches.start(batch)
        row = BatchRow(batch_id=batch.batch_id, version=batch.version, rollouts=batch.rollout_ids)
        self.ledger.leased(row, batch.unused, batch.masked)
        return batch.ready

    def stepped(self, message: Stepped, now_s: float) -> None:
        """The learner is done with its batch. Hearing so twice is once. `now_s` is the time of day."""
        batch = self.batches.end(message.batch_id)
        if batch is None:
            return
        if message.refused or message.updates == self.updates:
            self._refuse(batch, message)
            return
        self._refused_in_row = 0
        self.updates, self.version = message.updates, message.version
        self.batches.trained(batch, message.updates)
        update = update_row(batch, message, now_s)
        self.ledger.stepped(batch.batch_id, update)
        for group in batch.groups:
            self.spans.set_over(group.group_id, True)
            self.admission.release_all(group.group_id)
        self._log.info(
            "update",
            update=update.updates,
            version=message.version,
            reward=round(update.reward_mean, 4),
            entries=update.num_entries,
            staleness=round(update.staleness_mean, 3),
            groups_without_spread=update.groups_without_spread,
        )

    def cursor(self) -> StreamCursor:
        """The cursor of a checkpoint taken now."""
        return self.spans.cursor()

    def committed(self, message: Committed) -> int:
        """A checkpoint is on disk. Gives the sequence below which the record stream may be purged."""
        finished = self.batches.commit(message.updates)
        self.ledger.committed(batch.batch_id for batch in finished)
        for rollout_id in self.ledger.finish(message.updates):
            self.assembler.forget_calls(rollout_id)
        self.spans.forget_below(message.cursor.sequence)
        self.committed_updates = message.updates
        self.ledger.stands(Standing(cursor=message.cursor, updates=message.updates, written=True))
        return message.cursor.sequence

    def _drop_stale(self, taken: Taken) -> None:
        for key, rollout in taken.stale:
            self.ledger.dropped(rollout.rollout_id, DropReason.STALE)
            self.admission.release(key, 1)
        left = {group.group_id for group in (*taken.groups, *self.replay.groups)}
        for key in dict.fromkeys(key for key, _ in taken.stale if key not in left):
            self._end(key)

    def _refuse(self, batch: Built, message: Stepped) -> None:
        reason = DropReason.REFUSED if message.refused else DropReason.NO_STEP
        self.ledger.refused(batch.batch_id, reason)
        for group in batch.groups:
            self._end(group.group_id)
        self._log.warning("batch without a step", batch=batch.batch_id, reason=message.refused or reason.value)
        self._refused_in_row = self._refused_in_row + 1 if message.refused else 0
        if self._refused_in_row >= MAX_REFUSED_IN_ROW:
            raise ClawpipeError(
                f"the learner refused {MAX_REFUSED_IN_ROW} batches in a row, the last one because: {message.refused}"
            )

    def _held(self) -> Iterable[tuple[str, tuple[RolloutState, int]]]:
        """Every settled rollout that somebody here holds, with its state and trainable tokens."""
        groups = (*self.replay.groups, *self._building)
        waiting = (*self.scheduler.waiting, *(rollout for group in groups for rollout in group.rollouts))
        for rollout in waiting:
            yield rollout.rollout_id, (RolloutState.QUEUED, rollout.num_kept)
        for group in self.batches.lease.groups if self.batches.lease else ():
            for rollout in group.rollouts:
                yield rollout.rollout_id, (RolloutState.LEASED, rollout.num_kept)


def update_row(batch: Built, message: Stepped, now_s: float) -> UpdateRow:
    """What the history keeps of an update."""
    rewards: dict[str, tuple[float, ...]] = {}
    for group in batch.groups:
        rewards[group.harness] = rewards.get(group.harness, ()) + tuple(rollout.reward for rollout in group.rollouts)
    without = {group.group_id for group in batch.groups if group.rollouts[0].rollout_id in batch.unused}
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
        groups_without_spread=len(without),
        masked=message.masked_tokens,
        metrics=message.metrics,
        rewards=rewards,
    )


def _group_of(rollout_id: str) -> str:
    name = parse(rollout_id)
    assert name is not None, f"{rollout_id} is not an id of ours"
    return name.group_id
