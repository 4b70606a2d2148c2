"""The bounded queue of complete groups between the assembler and the learner.

What waits: groups whose rollouts are all closed. What wakes it: a lease, which takes the oldest groups, of each
harness as many as every step must have. When full, the assembler stops pulling from the stream (`full`), which
holds everything back as far as the scheduler; nothing is ever thrown out to make room. A queue that has not the
groups for one batch is never full, else nothing would move again. Staleness is checked at the take, so the time
in the queue counts.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
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
    def harness(self) -> str:
        """Its harness's name."""
        return self.rollouts[0].manifest.harness

    @property
    def num_tokens(self) -> int:
        """Tokens on the kept branches: what the group occupies."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a take gave. `groups` is empty when there are not enough of them."""

    groups: tuple[ReadyGroup, ...]
    stale: tuple[tuple[str, Rollout], ...]  # (group id, rollout) that left the queue for good


class Replay:
    """See the module."""

    def __init__(
        self,
        *,
        capacity_tokens: int,
        capacity_rollouts: int,
        max_staleness: int,
        groups_per_step: int,
        shares: Mapping[str, int] | None = None,
    ) -> None:
        """`shares`: by harness, how many groups a batch must have of it, as long as there are any to come."""
        self._capacity_tokens = capacity_tokens
        self._capacity_rollouts = capacity_rollouts
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._shares = dict(shares or {})
        self._groups: list[ReadyGroup] = []  # oldest first

    def put(self, group: ReadyGroup) -> None:
        """Queues a group by its age: the order of admission, not that of completion."""
        assert group.rollouts, f"group {group.group_id} has no rollout to queue"
        insort(self._groups, group, key=lambda each: each.number)

    def take(self, learner_version: int, awaited: Collection[str] = ()) -> Taken:
        """The oldest `groups_per_step` groups with every harness's share among them, or none.

        A share that cannot be had is waited for while its harness is `awaited`, which is to say that groups of it
        are still running; then the oldest others take its place. A rollout is stale when even its newest trainable
        token is over max_staleness; single tokens over it are left out by the learner. A group goes when its last
        rollout does.
        """
        stale: list[tuple[str, Rollout]] = []
        fresh: list[ReadyGroup] = []
        for group in self._groups:
            rollouts = tuple(r for r in group.rollouts if not self._is_stale(r, learner_version))
            stale += [(group.group_id, r) for r in group.rollouts if r not in rollouts]
            if rollouts:
                fresh.append(group if len(rollouts) == len(group.rollouts) else replace(group, rollouts=rollouts))
        taken = self._mixed(fresh, awaited)
        self._groups = [group for group in fresh if group not in taken]
        return Taken(groups=tuple(taken), stale=tuple(stale))

    def _mixed(self, groups: Iterable[ReadyGroup], awaited: Collection[str]) -> list[ReadyGroup]:
        """The groups of one batch, oldest first; none when they must be waited for."""
        missing = Counter(self._shares)
        due: list[ReadyGroup] = []
        others: list[ReadyGroup] = []
        for group in groups:
            (due if missing[group.harness] > 0 else others).append(group)
            missing[group.harness] -= 1
        others = others[: self._groups_per_step - len(due)]
        waits = any(missing[harness] > 0 for harness in awaited)
        if waits or len(due) + len(others) < self._groups_per_step:
            return []
        return sorted([*due, *others], key=lambda group: group.number)

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
        """Whether a take could give a batch with every share in it, staleness aside."""
        return bool(self._mixed(self._groups, self._shares))

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
