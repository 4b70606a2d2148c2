"""What the messages of the record stream mean: calls and manifests become rollouts, rollouts become groups. No I/O.

A record goes through the assembler to its group (scheduler), a complete group to the replay queue. What cannot
be used becomes a dead letter with its reason, which the service publishes; it spoils at most its own rollout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from clawpipe.pipeline.assembler import Arrival, Rollout
from clawpipe.pipeline.config import ScheduleConfig
from clawpipe.pipeline.credit import Spread
from clawpipe.pipeline.entries import MANIFEST, Entry
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.holdings import Holdings
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import CallRecord, DeadLetter, Flaw, RolloutRequest
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.scheduler import INFRASTRUCTURE, RolloutName, Settlement, parse
from clawpipe.pipeline.segments import DropReason

MIN_LOSSES_IN_ROW = 16  # rollouts lost to infrastructure, one after the other, that end the run
STEPS_WITHOUT_SPREAD = 4  # worth of groups of equal rewards, one after the other, that are worth a warning


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is known of earlier processes while their records are read again."""

    requests: Mapping[str, RolloutRequest]  # by rollout id
    uses: Mapping[str, int]  # open groups that were trained already, and how often
    turned_away: Collection[int]  # sequences of records that nobody had asked for
    end_number: int | None  # no group of this number or a higher one can have been admitted; None: not known


class Intake:
    """See the module."""

    def __init__(self, holdings: Holdings, schedule: ScheduleConfig, log: EventLog) -> None:
        self.dead_letters: list[DeadLetter] = []  # emptied by the service before it takes the next record
        self._earlier = Earlier(requests={}, uses={}, turned_away=(), end_number=None)
        self._holdings = holdings
        self._schedule = schedule
        self._log = log
        self._arrived: dict[str, dict[str, Entry]] = {}  # open rollout -> call id -> its message, without its body
        self._losses_in_row = 0
        self._without_spread_in_row = 0

    def take_up(self, earlier: Earlier) -> None:
        """Records of earlier processes are about to be read again."""
        self._earlier = earlier

    # Records ----------------------------------------------------------------------------------------------

    def record(self, entry: Entry, now_s: float) -> bool:
        """A message of the stream; says whether it closed a rollout."""
        name = self._admitted(entry)
        if name is None:
            self._turn_away(entry)
            return False
        held, key = self._holdings, name.group_id
        over = held.scheduler.is_over(name.number)
        held.spans.note(key, entry.rollout_id, entry.sequence, over=over)
        was_closed = held.assembler.is_closed(entry.rollout_id)
        if over and not was_closed:
            self.lost(entry.rollout_id, DropReason.LATE)
        rollout = self._spoilt(entry) if entry.record is None else self._added(entry, key, now_s)
        if rollout is not None:
            self._settle(key, rollout)
        return not was_closed and held.assembler.is_closed(entry.rollout_id)

    def expire(self, now_s: float) -> None:
        """Drops what has waited too long for its calls."""
        for rollout in self._holdings.assembler.expire(now_s):
            self._settle(_group_of(rollout.rollout_id), rollout)

    def lost(self, rollout_id: str, reason: DropReason) -> None:
        """Nothing more will come of the rollout that can be used."""
        held, key = self._holdings, _group_of(rollout_id)
        earlier = self._earlier.requests.get(rollout_id) if held.catching_up else None
        if earlier is not None:
            held.scheduler.adopt(earlier)
            held.ledger.requested(earlier)
        held.scheduler.know(rollout_id)
        fates = held.assembler.abandon(rollout_id, reason)
        held.ledger.abandoned(rollout_id, key, fates, reason, held.spans.last(key, rollout_id))
        self._arrived.pop(rollout_id, None)
        self._log.warning("rollout lost", rollout=rollout_id, reason=reason.value)
        self._advance(key, held.scheduler.lose(rollout_id))

    def _admitted(self, entry: Entry) -> RolloutName | None:
        """The rollout's name, if somebody asked for it."""
        name = parse(entry.rollout_id)
        if name is None or name.place >= self._schedule.group_size:
            return None
        if not self._holdings.catching_up:
            return name if self._holdings.scheduler.was_requested(name) else None
        end = self._earlier.end_number
        beyond = end is not None and name.number >= max(end, self._holdings.scheduler.next_number)
        return None if beyond or entry.sequence in self._earlier.turned_away else name

    def _added(self, entry: Entry, key: str, now_s: float) -> Rollout | None:
        record = entry.record
        assert record is not None
        verdict = self._holdings.assembler.add(record, now_s)
        if verdict.arrival in (Arrival.UNSOUND, Arrival.CONFLICTING):
            self._set_aside(entry, Flaw(verdict.arrival.value), verdict.detail)
            self._book_useless(entry, key, DropReason.QUARANTINED)
            if verdict.arrival is Arrival.UNSOUND and not isinstance(record, CallRecord):
                self._lose_open(entry.rollout_id, verdict.detail)
        elif isinstance(record, CallRecord) and verdict.arrival is Arrival.NEW:
            self._arrived.setdefault(record.rollout_id, {})[record.call_id] = replace(entry, record=None)
            self._holdings.ledger.sampled(record, key)
        elif verdict.arrival is Arrival.LATE:
            self._book_useless(entry, key, DropReason.LATE)
        return verdict.rollout

    def _spoilt(self, entry: Entry) -> Rollout | None:
        """A message that cannot even be read: what it must have been follows from its id."""
        assert entry.flaw is not None
        self._set_aside(entry, entry.flaw, entry.detail)
        if not entry.message_id.startswith(f"{entry.rollout_id}.a"):
            return None  # nothing that this rollout waits for
        if entry.kind == MANIFEST:
            self._lose_open(entry.rollout_id, entry.detail)
            return None
        return self._holdings.assembler.spoil(entry.rollout_id, entry.message_id)

    def _lose_open(self, rollout_id: str, why: str) -> None:
        """Its manifest is of no use."""
        if not self._holdings.assembler.is_closed(rollout_id):
            self.lost(rollout_id, DropReason.MALFORMED)
            self._count_losses(rollout_id, DropReason.MALFORMED, f"of its manifest: {why}")

    def _turn_away(self, entry: Entry) -> None:
        self._holdings.spans.pass_by(entry.sequence)
        detail = "nobody asked for this rollout; does another run write under the same [nats] prefix?"
        self._set_aside(entry, entry.flaw or Flaw.UNADMITTED, entry.detail or detail)
        self._book_useless(entry, entry.rollout_id, DropReason.UNADMITTED)

    def _set_aside(self, entry: Entry, flaw: Flaw, detail: str) -> None:
        self.dead_letters.append(entry.dead(flaw, detail))
        self._log.warning(
            "record set aside",
            flaw=flaw.value,
            rollout=entry.rollout_id,
            message_id=entry.message_id,
            sequence=entry.sequence,
            detail=detail,
        )

    def _book_useless(self, entry: Entry, key: str, reason: DropReason) -> None:
        if isinstance(entry.record, CallRecord):
            self._holdings.ledger.stray(entry.record, key, reason, entry.sequence)

    # Rollouts and groups ----------------------------------------------------------------------------------

    def _settle(self, key: str, rollout: Rollout) -> None:
        held = self._holdings
        self._set_orphans_aside(rollout)
        settlement = held.scheduler.settle(rollout)
        held.ledger.settled(rollout, key, settlement.reason, held.spans.last(key, rollout.rollout_id))
        self._log.info(
            "rollout closed",
            rollout=rollout.rollout_id,
            calls=len(rollout.manifest.calls),
            outcome=type(rollout.manifest.outcome).__name__,
            kept_tokens=rollout.num_kept,
            dropped=settlement.reason.value if settlement.reason else "",
            detail=rollout.detail,
        )
        self._advance(key, settlement)
        self._count_losses(rollout.rollout_id, settlement.reason, rollout.detail)

    def _set_orphans_aside(self, rollout: Rollout) -> None:
        arrived = self._arrived.pop(rollout.rollout_id, {})
        for orphan in rollout.orphans:
            entry = replace(arrived[orphan.call_id], record=orphan)
            self._set_aside(entry, Flaw.MISSING_PARENT, f"its parent {orphan.parent} never came")

    def _advance(self, key: str, settlement: Settlement) -> None:
        if settlement.place_closed and not self._holdings.catching_up:
            self._holdings.admission.release(key, 1)
        if settlement.complete:
            self._end_latecomers(key)
        if settlement.group is not None:
            self._complete(settlement.group)
        elif settlement.complete:
            self._holdings.end(key)

    def _end_latecomers(self, key: str) -> None:
        """The group is complete: a rollout of it that is open still is an earlier try that nobody waits for."""
        for rollout_id in self._holdings.spans.rollouts(key):
            if not self._holdings.assembler.is_closed(rollout_id):
                self.lost(rollout_id, DropReason.LATE)

    def _complete(self, group: ReadyGroup) -> None:
        """To the replay queue, or dropped whole."""
        reason = self._why_useless(group)
        self._count_without_spread(reason)
        if reason is None:
            self._holdings.replay.put(replace(group, uses=self._earlier.uses.get(group.group_id, 0)))
            return
        for rollout in group.rollouts:
            self._holdings.ledger.dropped(rollout.rollout_id, reason)
        self._holdings.end(group.group_id)
        self._log.info("group dropped", group=group.group_id, reason=reason.value, rollouts=len(group.rollouts))

    def _why_useless(self, group: ReadyGroup) -> DropReason | None:
        if len(group.rollouts) < self._schedule.min_group:
            return DropReason.SMALL_GROUP
        if not self._schedule.skip_zero_spread:
            return None
        spread = self._holdings.recipe.credit([rollout.reward for rollout in group.rollouts]).spread
        return DropReason.ZERO_SPREAD if spread is Spread.ZERO_SPREAD else None

    def _count_without_spread(self, reason: DropReason | None) -> None:
        self._without_spread_in_row = self._without_spread_in_row + 1 if reason is DropReason.ZERO_SPREAD else 0
        if self._without_spread_in_row == STEPS_WITHOUT_SPREAD * self._schedule.groups_per_step:
            self._log.warning(
                "only groups of equal rewards",
                groups=self._without_spread_in_row,
                detail="nothing is left to train on; are the tasks too hard or too easy, or is the verifier wrong?",
            )
            self._without_spread_in_row = 0

    def _count_losses(self, rollout_id: str, reason: DropReason | None, detail: str) -> None:
        self._losses_in_row = self._losses_in_row + 1 if reason in INFRASTRUCTURE else 0
        step = self._schedule.groups_per_step * self._schedule.group_size
        if self._losses_in_row >= max(MIN_LOSSES_IN_ROW, step) and not self._holdings.catching_up:
            raise ClawpipeError(
                f"{self._losses_in_row} rollouts in a row were lost to infrastructure, the last one "
                f"({rollout_id}) by {reason}: {detail}; look into logs/actor.log and logs/proxy.log"
            )


def _group_of(rollout_id: str) -> str:
    name = parse(rollout_id)
    assert name is not None, f"{rollout_id} is not an id of ours"
    return name.group_id
