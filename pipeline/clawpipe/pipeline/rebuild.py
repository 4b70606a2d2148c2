"""Rebuilds the trees and batches of a run from its stored records, and compares them bit for bit. Pure.

Records go through the same assembler as in the run, with the leaf caps that the ledger says were decided; a
batch is built by the same recipe from the rollouts that its row names. What must be equal: each rollout's tree,
kept tokens and calls, and each batch's body. Fed by `replay_command`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from msgspec import Struct

from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.batches import Built
from clawpipe.pipeline.books import BatchRow, CallRow, Row
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.entries import CALL, Entry
from clawpipe.pipeline.holdings import make_assembler, make_recipe
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.ledger_file import Stored
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.restart import decided_caps
from clawpipe.pipeline.scheduler import parse
from clawpipe.pipeline.segments import DropReason

# How rollouts end by the clock: when their records are read again, they may end otherwise.
_BY_THE_CLOCK = frozenset({DropReason.INCOMPLETE, DropReason.LOST, DropReason.LOST_ATTEMPT})


class Tally(Struct, kw_only=True):
    """How many were rebuilt equal, how many otherwise, and of how many not all records are kept."""

    equal: int = 0
    different: int = 0
    gone: int = 0


class Findings(Struct, kw_only=True):
    """What `clawpipe replay` found. `first` None: nothing differs."""

    records: int = 0  # read
    first_sequence: int = 0  # of the oldest record that is kept; 0 without any
    rollouts: Tally
    trees: Tally  # of those rollouts of which one was built
    batches: Tally
    first: str | None = None  # what is wrong: with the first batch, else the first rollout, else with the stream


class Rebuild:
    """See the module. Holds the rollouts of the batches that are not built yet."""

    def __init__(
        self,
        config: Config,
        stored: Stored,
        calls_of: Callable[[str], Iterable[CallRow]],
        keep: Callable[[Built], None],
    ) -> None:
        """`calls_of` gives the calls that the ledger has of a rollout, `keep` takes every batch that is built."""
        self._rows = {row.rollout_id: row for row in stored.rows if not row.is_stray}
        self._assembler = make_assembler(config, LeafCaps(config.replay.leaf_cap, decided_caps(stored)))
        self._recipe = make_recipe(config)
        self._calls_of = calls_of
        self._keep = keep
        self._batches = {batch.batch_id: (number, batch) for number, batch in enumerate(stored.batches)}
        self._waiting = _by_rollout(stored.batches)
        self._held: dict[str, Rollout] = {}
        self._closed: set[str] = set()
        self._newest = max((row.last_sequence for row in stored.rows), default=0)
        self._different: dict[tuple[int, int], str] = {}  # batches are 0, rollouts 1, records 2, each with its place
        self._position = 0  # sequence of the last record that was read
        self._found = Findings(rollouts=Tally(), trees=Tally(), batches=Tally())

    def take(self, entry: Entry) -> None:
        """The next record of the stream."""
        self._found.records += 1
        self._found.first_sequence = self._found.first_sequence or entry.sequence
        if self._position and entry.sequence > self._position + 1:
            gap = f"records {self._position + 1} to {entry.sequence - 1} are missing"
            self._different[2, entry.sequence] = f"{gap}, and only the oldest are ever purged"
        self._position = entry.sequence
        if entry.rollout_id not in self._rows:
            return  # nobody asked for it
        if (rollout := self._closed_by(entry)) is not None:
            self._closed.add(rollout.rollout_id)
            self._assembler.forget_calls(rollout.rollout_id)
            self._compare(self._rows[rollout.rollout_id], rollout)
            self._hold(rollout)

    def end(self, last_sequence: int) -> Findings:
        """No more records: what is not rebuilt by now cannot be. `last_sequence`: of the newest that ever came."""
        if last_sequence < self._newest:
            lost = f"the stream ends with record {last_sequence}, and the ledger has rollouts up to {self._newest}"
            self._different[2, last_sequence] = f"{lost}: the store is damaged"
        for row in self._rows.values():
            if _is_compared(row) and row.rollout_id not in self._closed:
                self._found.rollouts.gone += 1
                self._found.trees.gone += bool(row.tree)
        self._found.batches.gone += len(self._batches)
        if self._different:
            self._found.first = self._different[min(self._different)]
        return self._found

    def _closed_by(self, entry: Entry) -> Rollout | None:
        """What the record completes, if anything."""
        if entry.record is not None:
            return self._assembler.add(entry.record, 0.0).rollout
        if entry.kind == CALL:
            return self._assembler.spoil(entry.rollout_id, entry.message_id)
        return None

    def _compare(self, row: Row, rollout: Rollout) -> None:
        """The rollout against its row and the rows of its calls."""
        if not _is_compared(row):
            return
        what = self._difference(row, rollout)
        _count(self._found.rollouts, what)
        if row.tree:
            _count(self._found.trees, row.tree != rollout.tree_digest)
        if what:
            self._different[1, row.last_sequence] = f"rollout {row.rollout_id}: {what}"

    def _difference(self, row: Row, rollout: Rollout) -> str:
        if row.tree != rollout.tree_digest:
            return f"its tree was {row.tree or 'none'}, and is {rollout.tree_digest or 'none'} when rebuilt"
        if row.kept != rollout.num_kept:
            return f"{row.kept} tokens were kept, {rollout.num_kept} are when rebuilt"
        booked = {call.call_id: (call.sampled, call.kept, call.dropped) for call in self._calls_of(row.rollout_id)}
        for fate in rollout.fates:
            mine = fate.sampled, fate.kept, {reason.value: n for reason, n in fate.dropped.items() if n}
            if booked.get(fate.call_id) != mine:
                return f"call {fate.call_id} was {_call(booked.get(fate.call_id))}, and is {_call(mine)} when rebuilt"
        return ""

    def _hold(self, rollout: Rollout) -> None:
        """Builds the batches that waited for this rollout alone."""
        due = self._waiting.get(rollout.rollout_id)
        if not due:
            return
        self._held[rollout.rollout_id] = rollout
        for batch_id in list(due):
            number, batch = self._batches[batch_id]
            if all(each in self._held for each in batch.rollouts):
                del self._batches[batch_id]
                self._build(number, batch)
                self._let_go(batch)

    def _build(self, number: int, batch: BatchRow) -> None:
        what = self._batch_difference(batch)
        _count(self._found.batches, what)
        if what:
            self._different[0, number] = f"batch {batch.batch_id}: {what}"

    def _batch_difference(self, batch: BatchRow) -> str:
        dropped = [self._held[each] for each in batch.rollouts if self._held[each].dropped]
        if dropped:
            return f"its rollout {dropped[0].rollout_id} is dropped ({dropped[0].dropped}) when rebuilt"
        later = [each for each in batch.rollouts if self._held[each].newest_version > batch.version]
        if later:
            return f"it is of version {batch.version}, and its rollout {later[0]} has tokens of a later one"
        built = self._recipe.build(batch.batch_id, batch.version, tuple(_groups(batch, self._held)))
        self._keep(built)
        if built.digest != batch.digest:
            return f"its body had digest {batch.digest[:16]}, and has {built.digest[:16]} when rebuilt"
        return ""

    def _let_go(self, batch: BatchRow) -> None:
        for rollout_id in set(batch.rollouts):  # a damaged row may name one twice
            self._waiting[rollout_id].discard(batch.batch_id)
            if not self._waiting[rollout_id]:
                del self._held[rollout_id]


def _is_compared(row: Row) -> bool:
    """Whether its records alone say how it ended."""
    return bool(row.outcome) and row.reason not in _BY_THE_CLOCK


def _by_rollout(batches: Iterable[BatchRow]) -> Mapping[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for batch in batches:
        for rollout_id in batch.rollouts:
            found[rollout_id].add(batch.batch_id)
    return found


def _groups(batch: BatchRow, rollouts: Mapping[str, Rollout]) -> Iterator[ReadyGroup]:
    """The batch's groups as they were leased."""
    for number, members in groupby(batch.rollouts, key=_group_number):
        found = tuple(rollouts[rollout_id] for rollout_id in members)
        manifest = found[0].manifest
        yield ReadyGroup(manifest.group_id, number, manifest.version, found)


def _group_number(rollout_id: str) -> int:
    name = parse(rollout_id)
    assert name is not None, f"{rollout_id} is not an id of ours"
    return name.number


def _count(tally: Tally, different: object) -> None:
    if different:
        tally.different += 1
    else:
        tally.equal += 1


def _call(fate: tuple[int, int, Mapping[str, int]] | None) -> str:
    if fate is None:
        return "unknown"
    sampled, kept, dropped = fate
    lost = "".join(f", {n} {reason}" for reason, n in sorted(dropped.items()))
    return f"{sampled} tokens ({kept} kept{lost})"
