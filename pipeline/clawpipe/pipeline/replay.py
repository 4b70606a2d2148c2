"""The bounded queue of complete groups between the assembler and the learner.

What waits: groups whose rollouts are all closed. What wakes it: a lease, which takes the groups that were trained
the fewest times, the oldest of these first, of each harness as many as every step must have. When full, the
assembler stops pulling from the stream (`full`), which holds everything back as far as the scheduler; nothing is
ever thrown out to make room. A queue that has not the groups for one batch is never full, else nothing would
move again. Staleness is checked at the take, so the time in the queue counts.

With a window, what is taken is less than `window_groups` ahead of the oldest group that still runs (the head), so
that short rollouts cannot run ahead of long ones without bound. The head is no part of the queue, so a batch
that waits for it holds nothing back that the head needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.segments import DropReason


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """The usable rollouts of one (task, harness) group, at least one."""

    group_id: str
    number: int  # order of admission
    version: int  # learner version at admission
    rollouts: tuple[Rollout, ...]
    uses: int = 0  # how often it was trained

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
    dropped: tuple[tuple[str, Rollout, DropReason], ...]  # (group id, rollout, why) that left the queue for good


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A group, and what every take asks of it."""

    group: ReadyGroup
    newest: tuple[int, ...]  # version of the newest trainable token of each rollout
    num_tokens: int

    @property
    def order(self) -> tuple[int, int]:
        return self.group.uses, self.group.number


class Replay:
    """See the module."""

    def __init__(
        self,
        *,
        capacity_tokens: int,
        capacity_rollouts: int,
        max_staleness: int,
        groups_per_step: int,
        min_group: int = 1,
        window_groups: int | None = None,
        shares: Mapping[str, int] | None = None,
    ) -> None:
        """`window_groups`: None takes the oldest, however long an older group runs. `shares`: by harness, how many
        groups a batch must have of it, as long as there are any to come."""
        self._capacity_tokens = capacity_tokens
        self._capacity_rollouts = capacity_rollouts
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._min_group = min_group
        self._window_groups = window_groups
        self._shares = dict(shares or {})
        self._queued: dict[str, _Queued] = {}
        self._num_rollouts = 0
        self._num_tokens = 0

    def limit_staleness(self, max_staleness: int) -> None:
        """Lowers or raises the bound that holds from the next take on."""
        self._max_staleness = max_staleness

    def put(self, group: ReadyGroup) -> None:
        """Queues a group, whenever it was completed: the take goes by uses and order of admission."""
        assert group.rollouts, f"group {group.group_id} has no rollout to queue"
        assert group.group_id not in self._queued, f"group {group.group_id} is in the queue already"
        newest = tuple(rollout.newest_version for rollout in group.rollouts)
        self._queued[group.group_id] = _Queued(group, newest, group.num_tokens)
        self._num_rollouts += len(group.rollouts)
        self._num_tokens += group.num_tokens

    def remove(self, group_id: str) -> ReadyGroup | None:
        """Takes one group out, if it is here."""
        found = self._queued.pop(group_id, None)
        if found is None:
            return None
        self._num_rollouts -= len(found.group.rollouts)
        self._num_tokens -= found.num_tokens
        return found.group

    def take(self, learner_version: int, awaited: Collection[str] = (), head: int | None = None) -> Taken:
        """The first `groups_per_step` groups with every harness's share among them, or none.

        A share that cannot be had is waited for while its harness is `awaited`, which is to say that groups of it
        are still running, or its groups are beyond the window; then the first others take its place. `head` is
        the lowest number of a group that is still running; None: there is none.

        A rollout is stale when even its newest trainable token is over max_staleness; single tokens over it are
        left out by the learner. One that names a version which the learner has not made is malformed. A group that is
        left with fewer than `min_group` rollouts goes whole.
        """
        dropped = tuple(self._evict(learner_version))
        groups = tuple(self._batch(awaited, head))
        for group in groups:
            self.remove(group.group_id)
        return Taken(groups=groups, dropped=dropped)

    def ready(self, head: int | None = None) -> bool:
        """Whether a take could give a batch with every share in it, staleness aside."""
        return bool(self._batch(self._shares, head))

    def full(self, head: int | None = None) -> bool:
        """Whether the assembler must wait."""
        over = self._num_tokens >= self._capacity_tokens or self._num_rollouts >= self._capacity_rollouts
        return over and self.ready(head)

    @property
    def groups(self) -> tuple[ReadyGroup, ...]:
        """What waits, in the order of the take."""
        return tuple(each.group for each in sorted(self._queued.values(), key=lambda each: each.order))

    @property
    def num_groups(self) -> int:
        """Groups in the queue."""
        return len(self._queued)

    @property
    def num_rollouts(self) -> int:
        """Rollouts in the queue."""
        return self._num_rollouts

    @property
    def num_tokens(self) -> int:
        """Tokens in the queue."""
        return self._num_tokens

    def _evict(self, learner_version: int) -> Iterator[tuple[str, Rollout, DropReason]]:
        usable = range(learner_version - self._max_staleness, learner_version + 1)
        spent = [each for each in self._queued.values() if self._is_spent(each, usable)]
        for each in sorted(spent, key=lambda each: each.order):
            group = each.group
            self.remove(group.group_id)
            pairs = list(zip(group.rollouts, each.newest, strict=True))
            for rollout, newest in pairs:
                if newest not in usable:
                    reason = DropReason.STALE if newest < usable.start else DropReason.MALFORMED
                    yield group.group_id, rollout, reason
            left = tuple(rollout for rollout, newest in pairs if newest in usable)
            if len(left) >= self._min_group:
                self.put(replace(group, rollouts=left))
            else:
                yield from ((group.group_id, rollout, DropReason.SMALL_GROUP) for rollout in left)

    def _is_spent(self, each: _Queued, usable: range) -> bool:
        outside = min(each.newest) < usable.start or max(each.newest) >= usable.stop
        return outside or len(each.newest) < self._min_group

    def _batch(self, awaited: Collection[str], head: int | None) -> list[ReadyGroup]:
        """The groups of one batch in the order of the take; none when they must be waited for."""
        if len(self._queued) < self._groups_per_step:
            return []
        groups = self.groups
        beyond = math.inf if self._window_groups is None or head is None else head + self._window_groups
        later = {group.harness for group in groups if group.number >= beyond}
        return self._mixed((group for group in groups if group.number < beyond), later.union(awaited))

    def _mixed(self, groups: Iterable[ReadyGroup], awaited: Collection[str]) -> list[ReadyGroup]:
        """The first groups that make up every share, and the first others; none when some must be waited for."""
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
        return sorted([*due, *others], key=lambda group: (group.uses, group.number))
