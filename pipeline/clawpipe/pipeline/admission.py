"""How many rollouts may be in flight. Pure.

A credit is held by each place in a group from the moment its rollout is requested until it is trained for the
first time or dropped for good: requested, running again after a loss, queued and leased all count. With
(max_staleness + 1) steps' worth of credits, a rollout admitted at version v is due for training by version
v + max_staleness. A group that waits to be trained again holds none: it must not starve new rollouts.
"""

from __future__ import annotations


class Admission:
    """Credits of (max_staleness + 1) x rollouts_per_step places."""

    def __init__(self, *, max_staleness: int, rollouts_per_step: int) -> None:
        self.max_staleness = max_staleness
        self._rollouts_per_step = rollouts_per_step
        self._held: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        """How many credits there are."""
        return (self.max_staleness + 1) * self._rollouts_per_step

    def limit_staleness(self, max_staleness: int) -> None:
        """Lowers or raises the bound. Credits over the new capacity drain: nothing is admitted until they have."""
        assert max_staleness >= 0, f"max_staleness {max_staleness} is below 0"
        self.max_staleness = max_staleness

    @property
    def held(self) -> int:
        """Credits that are out. More than the capacity only after it was lowered, or after a learner's crash gave
        trained ones back."""
        return sum(self._held.values())

    def admit(self, group_id: str, places: int) -> bool:
        """Takes a credit for every place of a new group, if there are so many."""
        if self.held + places > self.capacity:
            return False
        self.restore(group_id, places)
        return True

    def restore(self, group_id: str, places: int) -> None:
        """The group is in flight already: a restart found it, or its training was lost."""
        assert places > 0, f"group {group_id} without places"
        assert group_id not in self._held, f"group {group_id} was admitted before"
        self._held[group_id] = places

    def release(self, group_id: str, places: int) -> None:
        """Gives credits of a group back. A broken count of them is a crash."""
        left = self._held.get(group_id, 0) - places
        assert places >= 0, f"group {group_id} gives back {places} credits"
        assert left >= 0, f"group {group_id} gives back more than it holds"
        if left:
            self._held[group_id] = left
        else:
            self._held.pop(group_id, None)

    def release_all(self, group_id: str) -> None:
        """The group is over: gives back what it still holds."""
        self._held.pop(group_id, None)
