"""Makes batches of groups and serves them to the learner. No I/O: the service carries the messages.

A batch is leased, not popped: its groups are kept until a checkpoint holds what they taught. There is one lease
at a time; asking again gives the same batch again. What a learner trained beyond its checkpoint comes back
when it starts anew (`rewind`). The body of a batch follows from its groups alone, so a restarted service can
make it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.credit import Credit, Spread
from clawpipe.pipeline.forest import Batch, RolloutRow
from clawpipe.pipeline.packing import Trainable, pack
from clawpipe.pipeline.records import BatchReady, Role
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.segments import DropReason, Part

CHUNK_BYTES = 512 * 1024  # below the payload limit of a NATS server as it comes


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A batch as the learner fetches it, and what the books need to know of it."""

    batch_id: str
    version: int  # learner version at the lease
    groups: tuple[ReadyGroup, ...]
    body: bytes  # msgpack of a Batch
    digest: str
    set_aside: dict[str, dict[DropReason, int]]  # rollout id -> reason -> kept tokens that are not trained, if any
    reward_mean: float  # over the rollouts, each once
    num_entries: int  # loss entries, stale ones too
    groups_without_spread: int  # whose main conversations have no advantage
    staleness_mean: float  # of the tokens that are not over max_staleness
    staleness_max: int

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Every rollout once, in the order of the groups."""
        return tuple(rollout.rollout_id for group in self.groups for rollout in group.rollouts)

    @property
    def ready(self) -> BatchReady:
        """What the learner is told."""
        num_chunks = -(-len(self.body) // CHUNK_BYTES)
        return BatchReady(batch_id=self.batch_id, num_chunks=num_chunks, digest=self.digest)


@dataclass(frozen=True, slots=True)
class _Line:
    """One row of a batch and what it is made of: the part of a rollout that has the group's credit of its role."""

    row: RolloutRow
    part: Part
    spread: Spread

    @property
    def used(self) -> bool:
        """Whether its tokens have loss entries."""
        return self.spread is Spread.SPREAD


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a batch is made by."""

    credit: Callable[[Sequence[float]], Credit]  # rewards of the members of a group -> what each is credited with
    pack_tokens: int  # budget of one forest
    align: int  # forests are a multiple of this long
    max_staleness: int

    def build(self, batch_id: str, version: int, groups: Sequence[ReadyGroup]) -> Built:
        """Credit, packing and encoding: the costly part, without state. Same input, same bytes.

        AssertionError for a token of a version that the learner does not have yet.
        """
        lines = [line for group in groups for line in self._lines(group)]
        trainable = [Trainable(index, line.part.branches) for index, line in enumerate(lines) if line.used]
        forests = pack(trainable, self.pack_tokens, self.align)
        rows = tuple(line.row for line in lines)
        body = msgspec.msgpack.encode(Batch(batch_id=batch_id, version=version, rollouts=rows, forests=forests))
        staleness = [_staleness(line, version) for line in lines]
        counted = self._counted(lines, staleness)
        return Built(
            batch_id=batch_id,
            version=version,
            groups=tuple(groups),
            body=body,
            digest=hashlib.blake2b(body).hexdigest(),
            set_aside=self._set_aside(lines, staleness),
            reward_mean=float(np.mean([rollout.reward for group in groups for rollout in group.rollouts])),
            num_entries=sum(row.num_trainable for row in rows),
            groups_without_spread=_without_spread(lines),
            staleness_mean=float(counted.mean()) if len(counted) else 0.0,
            staleness_max=int(counted.max(initial=0)),
        )

    def _lines(self, group: ReadyGroup) -> Iterator[_Line]:
        """The group's rows, main first. The members of a role are the rollouts that have a part of it: the others
        are in neither its mean nor its deviation."""
        for role in Role:
            members = [(rollout, part) for rollout in group.rollouts for part in rollout.parts if part.role is role]
            if not members:
                continue
            credit = self.credit([rollout.reward for rollout, _ in members])
            for (rollout, part), advantage in zip(members, credit.advantages, strict=True):
                used = credit.spread is Spread.SPREAD
                yield _Line(_row(group, rollout, part, advantage, used), part, credit.spread)

    def _counted(self, lines: Sequence[_Line], staleness: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """The staleness of every token that the learner will train."""
        used = [steps[steps <= self.max_staleness] for line, steps in zip(lines, staleness, strict=True) if line.used]
        return np.concatenate([np.empty(0, np.int64), *used])

    def _set_aside(
        self, lines: Sequence[_Line], staleness: Sequence[npt.NDArray[np.int64]]
    ) -> dict[str, dict[DropReason, int]]:
        """`Built.set_aside`: all kept tokens of a row without credit, else those that are stale."""
        found: dict[str, dict[DropReason, int]] = {}
        for line, steps in zip(lines, staleness, strict=True):
            reason = DropReason.STALE if line.used else DropReason(line.spread.value)
            tokens = int((steps > self.max_staleness).sum()) if line.used else line.part.num_kept
            if tokens:
                reasons = found.setdefault(line.row.rollout_id, {})
                reasons[reason] = reasons.get(reason, 0) + tokens
        return found


def _row(group: ReadyGroup, rollout: Rollout, part: Part, advantage: float, used: bool) -> RolloutRow:
    return RolloutRow(
        rollout_id=rollout.rollout_id,
        group_id=group.group_id,
        harness=rollout.manifest.harness,
        reward=rollout.reward,
        advantage=advantage,
        num_trainable=part.num_kept if used else 0,
        role=part.role.value,
    )


def _staleness(line: _Line, version: int) -> npt.NDArray[np.int64]:
    """learner version - token version, for every kept token of a row."""
    found = version - np.concatenate([branch.versions for branch in line.part.branches]).astype(np.int64)
    name = line.row.rollout_id
    assert found.min(initial=0) >= 0, f"rollout {name} has tokens of a version after {version}, the learner's own"
    return found


def _without_spread(lines: Iterable[_Line]) -> int:
    return len({line.row.group_id for line in lines if line.part.role is Role.MAIN and not line.used})


class Batches:
    """What is leased, and what is trained and not in a checkpoint yet."""

    def __init__(self) -> None:
        self.lease: Built | None = None
        self._stepped: list[tuple[int, Built]] = []  # updates after the step, oldest first
        self._done: set[str] = set()  # ids of batches whose Stepped was taken

    def start(self, batch: Built) -> None:
        """The batch goes to the learner."""
        assert self.lease is None, f"batch {batch.batch_id} leased while one is out"
        self.lease = batch

    def chunk(self, batch_id: str, index: int) -> bytes:
        """A part of the leased batch's body. Empty for any other batch: the learner sees by the digest that it
        has nothing, and refuses the batch."""
        if self.lease is None or self.lease.batch_id != batch_id:
            return b""
        return self.lease.body[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def end(self, batch_id: str) -> Built | None:
        """The learner is done with the lease. None when that is known already.

        AssertionError for a batch that nobody leased.
        """
        if batch_id in self._done:
            return None
        lease = self.lease
        assert lease is not None, f"the learner stepped on {batch_id} without a lease"
        assert lease.batch_id == batch_id, f"the learner stepped on {batch_id}, but leased {lease.batch_id}"
        self._done.add(batch_id)
        self.lease = None
        return lease

    def trained(self, batch: Built, updates: int) -> None:
        """The batch is trained: `updates` counts it."""
        self._stepped.append((updates, replace(batch, body=b"")))  # the body can be made again

    def rewind(self, updates: int) -> list[Built]:
        """The learner starts anew after `updates`: the lease and all that it trained beyond, newest first.

        A group may be in several of them. Each batch holds it as it was when that batch was leased, so whoever
        undoes them in this order ends with the group as it was before the first.
        """
        lost = [] if self.lease is None else [self.lease]
        lost += [batch for number, batch in reversed(self._stepped) if number > updates]
        self.lease = None
        self._stepped = [(number, batch) for number, batch in self._stepped if number <= updates]
        return lost

    def commit(self, updates: int) -> list[Built]:
        """A checkpoint holds `updates`: gives the batches that are finished for good."""
        finished = [batch for number, batch in self._stepped if number <= updates]
        self._stepped = [(number, batch) for number, batch in self._stepped if number > updates]
        return finished

    def restore(self, batch: Built, updates: int | None) -> None:
        """A batch of an earlier process: trained at `updates`, or out with the learner still (None)."""
        if updates is None:
            self.start(batch)
            return
        self._done.add(batch.batch_id)
        self.trained(batch, updates)

    @property
    def uncommitted(self) -> int:
        """Trained batches that no checkpoint holds."""
        return len(self._stepped)
