"""The state between the record stream and the learner: what each record and each message means. No I/O.

Put together from the room's parts: `intake` turns records into groups that wait for the learner, `leases` hands
them out in batches, `holdings` knows who has what; here is how much is asked of the actors. `service` feeds the
flow and carries what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clawpipe.pipeline.batches import Built
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.entries import Entry
from clawpipe.pipeline.holdings import Holdings
from clawpipe.pipeline.intake import Earlier, Intake
from clawpipe.pipeline.leases import Leases
from clawpipe.pipeline.leases import Order as Order
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    BatchReady,
    Committed,
    DeadLetter,
    Finished,
    Hello,
    NotYet,
    RolloutRequest,
    Stepped,
    StreamCursor,
)
from clawpipe.pipeline.scheduler import group_id
from clawpipe.pipeline.segments import DropReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a run."""

    updates: int  # in all
    groups_per_step: int
    group_size: int
    max_reuse: int  # trainings of a group


class Flow:
    """See the module."""

    def __init__(
        self,
        config: Config,
        tasks: Iterable[str],
        ledger: Ledger,
        log: EventLog,
        process: str,
        leaf_caps: Mapping[str, int] | None = None,
    ) -> None:
        """`process` tells this process from all earlier ones: the ids of its batches are made with it. `leaf_caps`:
        what those decided, by rollout id."""
        schedule = config.schedule
        max_reuse = config.replay.max_reuse
        self.limits = Limits(config.run.updates, schedule.groups_per_step, schedule.group_size, max_reuse)
        self.holdings = Holdings(config, tasks, ledger, leaf_caps or {})
        self.intake = Intake(self.holdings, schedule, log)
        self.leases = Leases(self.holdings, updates=config.run.updates, max_reuse=max_reuse, log=log, process=process)
        self.assembler = self.holdings.assembler
        self.scheduler = self.holdings.scheduler
        self.admission = self.holdings.admission
        self.replay = self.holdings.replay
        self.recipe = self.holdings.recipe
        self.batches = self.holdings.batches
        self.spans = self.holdings.spans
        self.ledger = ledger
        self.draining = False

    @property
    def version(self) -> int:
        """The learner's."""
        return self.holdings.version

    @property
    def updates(self) -> int:
        """That the learner has made."""
        return self.holdings.updates

    @property
    def committed_updates(self) -> int | None:
        """Of the learner's last checkpoint since it started."""
        return self.leases.committed_updates

    @property
    def max_staleness(self) -> dict[str, int]:
        """The bound as it is now, and as the configuration has it."""
        return {"now": self.admission.max_staleness, "configured": self.holdings.max_staleness}

    @property
    def finished(self) -> bool:
        """Whether the run has had its updates."""
        return self.leases.finished

    @property
    def catching_up(self) -> bool:
        """Whether records are read again that an earlier process had read."""
        return self.holdings.catching_up

    # Records ----------------------------------------------------------------------------------------------

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Records that cannot be used; whoever reads the stream publishes them before it takes the next record."""
        return self.intake.dead_letters

    @property
    def full(self) -> bool:
        """Whether no more may be taken from the stream now."""
        return self.replay.full(self.scheduler.head)

    def record(self, entry: Entry, now_s: float) -> bool:
        """A message of the stream; says whether it closed a rollout.

        `now_s` stands still while nothing is taken from the stream.
        """
        return self.intake.record(entry, now_s)

    def tick(self, now_s: float) -> None:
        """Drops what has waited too long for its calls, then proves that nothing is missing."""
        self.intake.expire(now_s)
        if not self.catching_up:
            self.check()

    def check(self) -> None:
        """The conservation law; AssertionError with the first rollout that breaks it."""
        self.holdings.check()

    def lost(self, rollout_id: str, reason: DropReason = DropReason.LOST) -> None:
        """The rollout's request is gone, and no manifest came."""
        self.intake.lost(rollout_id, reason)

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

    def close(self) -> None:
        """The run has had its updates: what is in flight still has come too late for it."""
        for rollout_id in self.ledger.in_flight:
            row = self.ledger.rows[rollout_id]
            if not row.calls:
                self.ledger.withdrawn(rollout_id, row.group_id)
                continue
            fates = self.assembler.abandon(rollout_id, DropReason.LATE)
            last = self.spans.last(row.group_id, rollout_id)
            self.ledger.abandoned(rollout_id, row.group_id, fates, DropReason.LATE, last)

    def _wants_group(self) -> bool:
        """No more groups than the updates that are left will train.

        Each update trains a group once at most, so a group that is trained n times more fills n places of the
        updates that are left, and never more than there are updates.
        """
        left = self.limits.updates - self.updates
        uses = [group.uses for group in self.holdings.groups] + [0] * len(self.scheduler.open_groups)
        places = sum(min(self.limits.max_reuse - used, left) for used in uses)
        return places < left * self.limits.groups_per_step

    # The learner ------------------------------------------------------------------------------------------

    def hello(self, message: Hello) -> None:
        """The learner starts anew from a checkpoint: what it trained beyond waits again."""
        self.leases.hello(message)

    def lease(self, version: int) -> BatchReady | NotYet | Finished | Order:
        """The next batch: the one that is out already, or an order to build it."""
        return self.leases.lease(version)

    def leased(self, batch: Built) -> BatchReady:
        """The ordered batch is built and goes out."""
        return self.leases.leased(batch)

    def stepped(self, message: Stepped, now_s: float) -> None:
        """The learner is done with its batch. Hearing so twice is once. `now_s` is the time of day."""
        self.leases.stepped(message, now_s)

    def cursor(self) -> StreamCursor:
        """The cursor of a checkpoint taken now."""
        return self.holdings.cursor()

    def committed(self, message: Committed) -> int:
        """A checkpoint is on disk. Gives the sequence below which the record stream may be purged."""
        return self.leases.committed(message)

    # Taking a run up --------------------------------------------------------------------------------------

    def take_up(
        self,
        cursor: StreamCursor,
        earlier: Earlier,
        *,
        checkpoint: int,
        updates: int,
        version: int,
        committed_updates: int | None,
    ) -> None:
        """Records from `cursor` on, which a checkpoint of `checkpoint` updates holds, are about to be read again; the
        learner has made `updates` and holds `version`."""
        self.holdings.catching_up = True
        self.holdings.updates, self.holdings.version = updates, version
        self.leases.checkpoint, self.leases.committed_updates = checkpoint, committed_updates
        self.spans.start_at(cursor.sequence)
        self.intake.take_up(earlier)

    def taken_up(self) -> None:
        """All that there was is read, and what earlier processes trained of it is known. Proves the books."""
        self.holdings.catching_up = False
        self.assembler.caught_up()
        self.leases.throttle()
        self.check()
