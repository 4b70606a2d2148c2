"""Makes batches of groups and serves them to the learner. No I/O: the service carries the messages.

A batch is leased, not popped: its groups are kept until a checkpoint holds what they taught. There is one lease
at a time; asking again gives the same batch again. What a learner trained beyond its checkpoint comes back
when it starts anew (`rewind`). The body of a batch follows from its groups alone, so a restarted service can
make it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.credit import Spread, credit
from clawpipe.pipeline.forest import Batch, RolloutRow
from clawpipe.pipeline.packing import Trainable, pack
from clawpipe.pipeline.records import BatchReady
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.segments import DropReason

CHUNK_BYTES = 512 * 1024  # below the payload limit of a NATS server as it comes


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A batch as the learner fetches it, and what the books need to know of it."""

    batch_id: str
    version: int  # learner version at the lease
    groups: tuple[ReadyGroup, ...]
    body: bytes  # msgpack of a Batch
    digest: str
    unused: dict[str, DropReason]  # rollouts without loss entries
    masked: dict[str, int]  # tokens over max_staleness by rollout, where there are any
    reward_mean: float
    num_entries: int
    staleness_mean: float  # of the tokens that are not over max_staleness
    staleness_max: int

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """In the order of the batch's rows."""
        return tuple(rollout.rollout_id for group in self.groups for rollout in group.rollouts)

    @property
    def ready(self) -> BatchReady:
        """What the learner is told."""
        num_chunks = -(-len(self.body) // CHUNK_BYTES)
        return BatchReady(batch_id=self.batch_id, num_chunks=num_chunks, digest=self.digest)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a batch is made by."""

    advantage_eps: float
    pack_tokens: int  # budget of one forest
    align: int  # forests are a multiple of this long
    max_staleness: int

    def build(self, batch_id: str, version: int, groups: Sequence[ReadyGroup]) -> Built:
        """Credit, packing and encoding: the costly part, without state. Same input, same bytes.

        AssertionError for a token of a version that the learner does not have yet.
        """
        rows, trainable, unused = self._rows(groups)
        forests = pack(trainable, self.pack_tokens, self.align)
        batch = Batch(batch_id=batch_id, version=version, rollouts=tuple(rows), forests=forests)
        body = msgspec.msgpack.encode(batch)
        names = [rows[each.rollout_index].rollout_id for each in trainable]
        staleness = [_staleness(name, each, version) for name, each in zip(names, trainable, strict=True)]
        over = [int((steps > self.max_staleness).sum()) for steps in staleness]
        counted = np.concatenate([np.empty(0, np.int64), *staleness])
        counted = counted[counted <= self.max_staleness]
        return Built(
            batch_id=batch_id,
            version=version,
            groups=tuple(groups),
            body=body,
            digest=hashlib.blake2b(body).hexdigest(),
            unused=unused,
            masked={name: tokens for name, tokens in zip(names, over, strict=True) if tokens},
            reward_mean=float(np.mean([row.reward for row in rows])),
            num_entries=sum(row.num_trainable for row in rows),
            staleness_mean=float(counted.mean()) if len(counted) else 0.0,
            staleness_max=int(counted.max(initial=0)),
        )

    def _rows(self, groups: Sequence[ReadyGroup]) -> tuple[list[RolloutRow], list[Trainable], dict[str, DropReason]]:
        """All rollouts as rows, those with an advantage as trainable, the others by why they have none."""
        rows: list[RolloutRow] = []
        trainable: list[Trainable] = []
        unused: dict[str, DropReason] = {}
        for group in groups:
            shares = credit([rollout.reward for rollout in group.rollouts], self.advantage_eps)
            for rollout, advantage in zip(group.rollouts, shares.advantages, strict=True):
                used = shares.spread is Spread.SPREAD
                if used:
                    trainable.append(Trainable(len(rows), rollout.branches))
                else:
                    unused[rollout.rollout_id] = DropReason(shares.spread.value)
                rows.append(_row(group, rollout, advantage, used))
        return rows, trainable, unused


def _row(group: ReadyGroup, rollout: Rollout, advantage: float, used: bool) -> RolloutRow:
    return RolloutRow(
        rollout_id=rollout.rollout_id,
        group_id=group.group_id,
        harness=rollout.manifest.harness,
        reward=rollout.reward,
        advantage=advantage,
        num_trainable=rollout.num_kept if used else 0,
    )


def _staleness(rollout_id: str, trainable: Trainable, version: int) -> npt.NDArray[np.int64]:
    """learner version - token version, for every loss entry of a rollout."""
    found = version - np.concatenate([branch.versions for branch in trainable.branches]).astype(np.int64)
    assert found.min() >= 0, f"rollout {rollout_id} has tokens of a version after {version}, the learner's own"
    return found


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
        """The learner starts anew after `updates`: the lease and all that it trained beyond, oldest first."""
        lost = [batch for number, batch in self._stepped if number > updates]
        self._stepped = [(number, batch) for number, batch in self._stepped if number <= updates]
        if self.lease is not None:
            lost.append(self.lease)
            self.lease = None
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
