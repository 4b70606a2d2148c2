"""The bounded queue of complete groups between the assembler and the learner.

What waits: groups whose rollouts are all closed. What wakes it: a lease, which takes the oldest groups. When
full, the assembler stops pulling from the stream (`full`), which holds everything back as far as the
scheduler; nothing is ever thrown out to make room. A queue that has not enough groups for one batch is never
full, else nothing would move again. Staleness is checked at the take, so the time in the queue counts.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace

from clawpipe.pipeline.assembler import Rollout


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """The usable rollouts of one (task, harness) group, at least one."""

    group_id: str
    number: int  # order of admission
    version: int  # learner version at admission
    rollouts: tuple[Rollout, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens on the kept paths: what the group occupies."""
        return sum(len(path.tokens) for rollout in self.rollouts for path in rollout.paths)


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a take gave. `groups` is empty when there are not enough of them."""

    groups: tuple[ReadyGroup, ...]
    stale: tuple[tuple[str, Rollout], ...]  # (group id, rollout) that left the queue for good


class Replay:
    """See the module."""

    def __init__(
        self, *, capacity_tokens: int, capacity_rollouts: int, max_staleness: int, groups_per_step: int
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._capacity_rollouts = capacity_rollouts
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._groups: list[ReadyGroup] = []  # oldest first

    def put(self, group: ReadyGroup) -> None:
        """Queues a group by its age: the order of admission, not that of completion."""
        assert group.rollouts, f"group {group.group_id} has no rollout to queue"
        insort(self._groups, group, key=lambda each: each.number)

    def take(self, learner_version: int) -> Taken:
        """The oldest `groups_per_step` groups, or none.

        A rollout is stale when even its newest trainable token is over max_staleness; single tokens over it
        are left out by the learner. A group goes when its last rollout does.
        """
        stale: list[tuple[str, Rollout]] = []
        fresh: list[ReadyGroup] = []
        for group in self._groups:
            rollouts = tuple(r for r in group.rollouts if not self._is_stale(r, learner_version))
            stale += [(group.group_id, r) for r in group.rollouts if r not in rollouts]
            if rollouts:
                fresh.append(group if len(rollouts) == len(group.rollouts) else replace(group, rollouts=rollouts))
        number = self._groups_per_step if len(fresh) >= self._groups_per_step else 0
        self._groups = fresh[number:]
        return Taken(groups=tuple(fresh[:number]), stale=tuple(stale))

    def remove(self, group_id: str) -> ReadyGroup | None:
        """Takes one group out, if it is here."""
        for index, group in enumerate(self._groups):
            if group.group_id == group_id:
                return self._groups.pop(index)
        return None

    @property
    def groups(self) -> tuple[ReadyGroup, ...]:
        """What waits, oldest first."""
        return tuple(self._groups)

    @property
    def ready(self) -> bool:
        """Whether a take could give a batch, staleness aside."""
        return len(self._groups) >= self._groups_per_step

    @property
    def full(self) -> bool:
        """Whether the assembler must wait."""
        over = self.num_tokens >= self._capacity_tokens or self.num_rollouts >= self._capacity_rollouts
        return over and self.ready

    @property
    def num_groups(self) -> int:
        """Groups in the queue."""
        return len(self._groups)

    @property
    def num_rollouts(self) -> int:
        """Rollouts in the queue."""
        return sum(len(group.rollouts) for group in self._groups)

    @property
    def num_tokens(self) -> int:
        """Tokens in the queue."""
        return sum(group.num_tokens for group in self._groups)

    def _is_stale(self, rollout: Rollout, learner_version: int) -> bool:
        return learner_version - rollout.newest_version > self._max_staleness
