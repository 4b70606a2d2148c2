"""How many leaves a rollout's tree may have: a fixed number, or a quantile of what its harness did lately. Pure.

Decided rollout by rollout in the order in which they close, from those that closed before. What an earlier
process decided stands, so that a restart and `clawpipe replay` judge every rollout as it was judged.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from clawpipe.pipeline.config import LeafQuantile


class LeafCaps:
    """See the module. `decided`: caps by rollout id that are not to be decided again."""

    def __init__(self, cap: int | LeafQuantile, decided: Mapping[str, int] | None = None) -> None:
        self._cap = cap
        self._decided = dict(decided or {})
        self._windows: dict[str, _Window] = {}  # by harness

    def cap_for(self, rollout_id: str, harness: str) -> int:
        """The most leaves that the rollout may have. Changes nothing."""
        decided = self._decided.get(rollout_id)
        if decided is not None:
            return decided
        if isinstance(self._cap, int):
            return self._cap
        window = self._windows.get(harness)
        if window is None or len(window.latest) < self._cap.window_rollouts:
            return self._cap.at_most
        return min(max(window.quantile(self._cap.quantile), self._cap.at_least), self._cap.at_most)

    def note(self, harness: str, num_leaves: int) -> None:
        """A rollout of the harness closed with so many leaves, over the cap or not."""
        if isinstance(self._cap, LeafQuantile):
            self._windows.setdefault(harness, _Window()).add(num_leaves, self._cap.window_rollouts)


@dataclass(slots=True, eq=False)
class _Window:
    """The leaves of the latest rollouts of a harness."""

    latest: deque[int] = field(default_factory=deque)  # oldest first
    ascending: list[int] = field(default_factory=list)

    def add(self, num_leaves: int, size: int) -> None:
        self.latest.append(num_leaves)
        insort(self.ascending, num_leaves)
        if len(self.latest) > size:
            del self.ascending[bisect_left(self.ascending, self.latest.popleft())]

    def quantile(self, q: float) -> int:
        """The smallest number that a share `q` of the rollouts does not exceed."""
        place = math.ceil(q * len(self.ascending) - 1e-9)  # 0.07 * 100 is a little over 7
        return self.ascending[max(place, 1) - 1]
