"""Proves from a run's ledger alone that every rollout, call and token ended in a named state. Pure.

The conservation law, rollout by rollout: sampled = open + kept + dropped, kept tokens are where the rollout is or
set aside for a reason, its calls sum to its row, and what was trained is in the batches of its updates. The
proof ends at the first rollout that breaks it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clawpipe.pipeline.books import BatchRow, CallRow, RolloutState, Row
from clawpipe.pipeline.ledger_file import Stored
from clawpipe.pipeline.report import GRADED, UNGRADED
from clawpipe.pipeline.segments import DropReason

_REASONS = frozenset(DropReason)
_USABLE = frozenset({RolloutState.QUEUED, RolloutState.LEASED, RolloutState.TRAINED})


@dataclass(frozen=True, slots=True)
class Breach:
    """What breaks the law: the rollout, and what is wrong with it by how much."""

    rollout_id: str
    what: str

    def __str__(self) -> str:
        return f"rollout {self.rollout_id}: {self.what}"


@dataclass(slots=True)
class _Calls:
    """The calls of one rollout, summed."""

    number: int = 0
    sampled: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    wrong: str = ""  # what is wrong with the first bad one

    def add(self, call: CallRow) -> None:
        self.number += 1
        self.sampled += call.sampled
        self.kept += call.kept
        self.dropped.update(call.dropped)
        self.wrong = self.wrong or _wrong_call(call)


@dataclass(frozen=True, slots=True)
class _Books:
    """What the laws look up beside the row."""

    calls: Mapping[str, _Calls]
    batches: Mapping[str, Sequence[BatchRow]]  # by rollout
    updates: frozenset[int]
    groups: Mapping[str, Row]  # the first rollout of each group
    max_reuse: int
    over: bool


def first_breach(stored: Stored, calls: Iterable[CallRow], *, max_reuse: int, over: bool) -> Breach | None:
    """The first rollout that breaks the law, in the order in which rollouts settled, then by id; None: none does.

    `over`: the run has ended, so that nothing may be in flight.
    """
    rows = sorted(stored.rows, key=lambda row: (row.last_sequence or float("inf"), row.rollout_id))
    books = _Books(
        calls=_summed(calls),
        batches=_by_rollout(stored.batches),
        updates=frozenset(row.updates for row in stored.updates),
        groups={row.group_id: row for row in reversed(rows) if row.task_id},
        max_reuse=max_reuse,
        over=over,
    )
    for row in rows:
        for law in _LAWS:
            if what := law(row, books):
                return Breach(row.rollout_id, what)
    return _first_without_row(books, {row.rollout_id for row in rows})


def _summed(calls: Iterable[CallRow]) -> Mapping[str, _Calls]:
    found: defaultdict[str, _Calls] = defaultdict(_Calls)
    for call in calls:
        found[call.rollout_id].add(call)
    return found


def _by_rollout(batches: Iterable[BatchRow]) -> Mapping[str, Sequence[BatchRow]]:
    found: defaultdict[str, list[BatchRow]] = defaultdict(list)
    for batch in batches:
        for rollout_id in batch.rollouts:
            found[rollout_id].append(batch)
    return found


def _first_without_row(books: _Books, known: set[str]) -> Breach | None:
    for rollout_id in sorted((books.calls.keys() | books.batches.keys()) - known):
        calls = books.calls.get(rollout_id, _Calls())
        batches = [batch.batch_id for batch in books.batches.get(rollout_id, ())]
        where = f"batch {batches[0]}" if batches else f"{_counted(calls.number, 'call')} of {calls.sampled} tokens"
        return Breach(rollout_id, f"it has no row, and {where}")
    return None


# The laws: what is wrong with the row, or nothing ---------------------------------------------------------


def _each_call(row: Row, books: _Books) -> str:
    return books.calls[row.rollout_id].wrong if row.rollout_id in books.calls else ""


def _wrong_call(call: CallRow) -> str:
    if min(call.sampled, call.kept, *call.dropped.values(), 0) < 0:
        return f"call {call.call_id} has a negative number of tokens"
    if unnamed := sorted(call.dropped.keys() - _REASONS):
        return f"call {call.call_id} has tokens dropped as {unnamed[0]!r}, which is no reason"
    return _unequal(f"call {call.call_id} sampled", call.sampled, call.kept + sum(call.dropped.values()))


def _tokens(row: Row, _: _Books) -> str:
    counts = row.sampled, row.open, row.kept, *row.dropped.values(), *row.set_aside.values()
    if min(counts) < 0:
        return f"it has a negative number of tokens: {min(counts)}"
    if unnamed := sorted((row.dropped.keys() | row.set_aside.keys()) - _REASONS):
        return f"it has tokens dropped as {unnamed[0]!r}, which is no reason"
    return _unequal("it sampled", row.sampled, row.open + row.kept + sum(row.dropped.values()))


def _calls_sum_to_the_row(row: Row, books: _Books) -> str:
    calls = books.calls.get(row.rollout_id, _Calls())
    settled = row.state is not RolloutState.IN_FLIGHT
    pairs = [
        ("sampled tokens", calls.sampled, row.sampled - row.open),
        ("kept tokens", calls.kept, row.kept),
        *((f"tokens dropped as {name}", calls.dropped[name], n) for name, n in sorted(row.dropped.items())),
        ("dropped tokens", sum(calls.dropped.values()), sum(row.dropped.values())),
        *([("calls", calls.number, row.calls)] if settled else []),
    ]
    wrong = [(what, found, booked) for what, found, booked in pairs if found != booked]
    if not wrong:
        return ""
    what, found, booked = wrong[0]
    return f"its calls have {found} {what}, its row {booked}: {abs(found - booked)} too {_few_or_many(found - booked)}"


def _set_aside(row: Row, _: _Books) -> str:
    aside = sum(row.set_aside.values())
    if aside > row.kept:
        return f"{aside} tokens are set aside of {row.kept} kept: {aside - row.kept} too many"
    if row.state is RolloutState.DROPPED and aside < row.kept:
        return f"it is dropped, and {row.kept - aside} of its {row.kept} kept tokens have no reason"
    return ""


def _state(row: Row, books: _Books) -> str:
    match row.state:
        case RolloutState.IN_FLIGHT:
            return _in_flight(row, books)
        case RolloutState.WITHDRAWN:
            return f"it was withdrawn, and sampled {row.sampled} tokens" if row.sampled or row.updates else ""
        case RolloutState.DROPPED:
            if row.reason not in _REASONS:
                return f"it is dropped as {row.reason!r}, which is no reason"
            return f"it is dropped, and was trained in {_numbers(row.updates)}" if row.updates else ""
    if row.outcome not in GRADED:
        return f"it is {row.state}, and its outcome is {row.outcome or 'none'}"
    return f"{row.open} of its tokens are open, and it is {row.state}" if row.open else ""


def _in_flight(row: Row, books: _Books) -> str:
    if row.outcome or row.updates or row.reason:
        return f"it is in flight, and has {row.outcome or row.reason or _numbers(row.updates)}"
    return "it is in flight, and the run is over" if books.over else ""


def _outcome(row: Row, _: _Books) -> str:
    if row.outcome and row.outcome not in GRADED + UNGRADED:
        return f"its outcome is {row.outcome!r}, which is none"
    if (row.outcome in GRADED) != (row.reward is not None):
        return f"its outcome is {row.outcome or 'none'}, and its reward {row.reward}"
    return f"{row.open} of its tokens are open, and it has ended" if row.open and row.outcome else ""


def _updates(row: Row, books: _Books) -> str:
    if row.updates != sorted(set(row.updates)):
        return f"its updates {row.updates} are not each later than the one before"
    if len(row.updates) > books.max_reuse:
        return f"it was trained {len(row.updates)} times, {len(row.updates) - books.max_reuse} more than max_reuse"
    if row.state is RolloutState.TRAINED and not row.updates:
        return "it is trained, and in no update"
    if missing := [number for number in row.updates if number not in books.updates]:
        return f"it was trained in {_numbers(missing)}, of which the ledger has no row"
    return ""


def _batches(row: Row, books: _Books) -> str:
    batches = books.batches.get(row.rollout_id, ())
    held = sorted(batch.updates for batch in batches if batch.updates is not None)
    out = [batch.batch_id for batch in batches if batch.updates is None]
    if held != row.updates:
        return f"its row says {_numbers(row.updates)}, and it is in the batches of {_numbers(held)}"
    if len(out) != (row.state is RolloutState.LEASED):
        return f"it is {row.state}, and in {_counted(len(out), 'batch', 'batches')} that the learner holds"
    return ""


def _group(row: Row, books: _Books) -> str:
    first = books.groups.get(row.group_id)
    if first is None or not row.task_id:
        return "it is usable, and of no task" if row.state in _USABLE else ""
    mine, theirs = (row.task_id, row.harness), (first.task_id, first.harness)
    if mine != theirs:
        return f"it is of {'/'.join(mine)}, and {first.rollout_id} of its group {row.group_id} of {'/'.join(theirs)}"
    return ""


_LAWS: tuple[Callable[[Row, _Books], str], ...] = (
    _each_call,
    _tokens,
    _calls_sum_to_the_row,
    _set_aside,
    _state,
    _outcome,
    _updates,
    _batches,
    _group,
)


def _unequal(what: str, sampled: int, accounted: int) -> str:
    if sampled == accounted:
        return ""
    difference = accounted - sampled
    return f"{what} {sampled} tokens, {accounted} are accounted for: {abs(difference)} too {_few_or_many(difference)}"


def _few_or_many(difference: int) -> str:
    return "many" if difference > 0 else "few"


def _numbers(updates: Sequence[int]) -> str:
    if not updates:
        return "no update"
    return f"update{'s' if len(updates) > 1 else ''} {', '.join(map(str, updates))}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
