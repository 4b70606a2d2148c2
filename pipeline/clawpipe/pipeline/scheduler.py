"""Which (task, harness) comes next, and when a group has all its rollouts.

Group number n has its task and harness from the seed and n alone: tasks in seeded shuffled passes, harnesses
mixed within every step's groups by their weights. A group has `group_size` places; each is filled by the first
usable rollout that was run for it, or closed for good. A rollout that infrastructure lost leaves its place open
again (refill). After a restart the groups are rebuilt from the records and the requests that are still about;
`adopt` and `settle` accept groups that this process never opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from clawpipe.pipeline.assembler import Rollout
from clawpipe.pipeline.records import RolloutManifest, RolloutRequest
from clawpipe.pipeline.replay import ReadyGroup
from clawpipe.pipeline.segments import DropReason

MAX_LOSSES = 3  # of one place to infrastructure; then it is closed, lest a broken task blocks its group for good

INFRASTRUCTURE = frozenset(
    {
        DropReason.INFRA,
        DropReason.VERIFIER_INFRA,
        DropReason.INCOMPLETE,
        DropReason.MALFORMED,
        DropReason.LOST,
    }
)

_ROLLOUT = re.compile(r"r-(\d{6,})-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class RolloutName:
    """The parts of a rollout's id: "r-000012-3" is place 3 of group 12, "r-000012-3-2" the second try again."""

    number: int
    place: int
    again: int

    @property
    def group_id(self) -> str:
        """Its group."""
        return group_id(self.number)

    def __str__(self) -> str:
        return f"r-{self.number:06d}-{self.place}" + (f"-{self.again}" if self.again else "")


def group_id(number: int) -> str:
    """The id of a group."""
    return f"g-{number:06d}"


def parse(rollout_id: str) -> RolloutName | None:
    """The parts of an id that we made, or None: one rollout has one id, without zeros that another could leave out."""
    found = _ROLLOUT.fullmatch(rollout_id)
    name = RolloutName(int(found[1]), int(found[2]), int(found[3] or 0)) if found else None
    return name if str(name) == rollout_id else None


@dataclass(slots=True)
class _Place:
    """Empty and not closed: a rollout is out for it, or must be requested."""

    again: int = -1  # of the newest rollout that was requested for it
    out: bool = False  # that rollout is in flight
    lost: set[int] = field(default_factory=set)  # those that infrastructure lost, by `again`
    filled: Rollout | None = None
    closed: bool = False

    @property
    def over(self) -> bool:
        return self.filled is not None or self.closed


@dataclass(slots=True)
class _Group:
    number: int
    task_id: str
    harness: str
    version: int
    places: list[_Place]


@dataclass(frozen=True, slots=True, eq=False)
class Settlement:
    """What a closed rollout means for its group."""

    reason: DropReason | None  # why the rollout is not used
    place_closed: bool = False  # nothing will be run for its place any more: a credit is free
    complete: bool = False  # the group is over
    group: ReadyGroup | None = None  # its usable rollouts, if there are any


class Scheduler:
    """See the module."""

    def __init__(
        self,
        *,
        tasks: Sequence[str],
        harnesses: Sequence[tuple[str, float]],
        groups_per_step: int,
        group_size: int,
        seed: int,
        refill: bool = True,
    ) -> None:
        """`harnesses` are names and weights. ValueError without tasks or harnesses."""
        if not tasks or not harnesses:
            raise ValueError("no tasks or no harnesses to schedule")
        self._tasks = tuple(tasks)
        self._harnesses = tuple(name for name, _ in harnesses)
        weights = np.array([weight for _, weight in harnesses], np.float64)
        self._weights = weights / weights.sum()
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._seed = seed
        self._refill = refill
        self._groups: dict[str, _Group] = {}
        self._over: set[int] = set()  # numbers of the groups that are complete
        self.next_number = 0
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._mix = lru_cache(maxsize=2)(self._mixed)

    def assignment(self, number: int) -> tuple[str, str]:
        """Task and harness of a group."""
        lap, at = divmod(number, len(self._tasks))
        step, place = divmod(number, self._groups_per_step)
        return self._tasks[self._order(lap)[at]], self._harnesses[self._mix(step)[place]]

    @property
    def shares(self) -> dict[str, int]:
        """How many groups every step has of each harness at least."""
        # A share that is whole must not fall to the number below it by the rounding of its weight.
        least = np.floor(self._groups_per_step * self._weights + 1e-9).astype(int).tolist()
        return dict(zip(self._harnesses, least, strict=True))

    @property
    def open_harnesses(self) -> frozenset[str]:
        """The harnesses of groups that are not complete."""
        return frozenset(group.harness for group in self._groups.values())

    @property
    def head(self) -> int | None:
        """The lowest number of a group that is not complete; None: there is none."""
        return min((group.number for group in self._groups.values()), default=None)

    def open(self, version: int) -> str:
        """Opens the next group, all its places to be requested; gives its id."""
        task_id, harness = self.assignment(self.next_number)
        name = RolloutName(self.next_number, 0, 0)
        self._group(name, task_id, harness, version)
        return name.group_id

    def requests(self, now_s: float) -> list[RolloutRequest]:
        """A request for every place that needs one, oldest group first; they count as in flight from now on."""
        found = []
        for group in sorted(self._groups.values(), key=lambda each: each.number):
            for index, place in enumerate(group.places):
                if place.over or place.out:
                    continue
                place.again, place.out = place.again + 1, True
                name = RolloutName(group.number, index, place.again)
                found.append(
                    RolloutRequest(
                        rollout_id=str(name),
                        group_id=name.group_id,
                        task_id=group.task_id,
                        harness=group.harness,
                        version=group.version,
                        admitted_s=now_s,
                    )
                )
        return found

    def adopt(self, request: RolloutRequest) -> None:
        """This request is in the work queue still: its rollout is in flight."""
        found = self._find(request)
        if found is None:
            return
        name, _, place = found
        if name.again >= place.again:
            place.again, place.out = name.again, not place.over

    def know(self, rollout_id: str, *, over: bool = False) -> None:
        """This id has been used: neither it nor an older one is given out again. `over`: its group is."""
        name = parse(rollout_id)
        if name is None:
            return
        self.next_number = max(self.next_number, name.number + 1)
        if over:
            self._over.add(name.number)
        group = self._groups.get(name.group_id)
        if group is not None and name.place < len(group.places):
            place = group.places[name.place]
            place.again = max(place.again, name.again)

    def is_over(self, number: int) -> bool:
        """Whether the group is complete: nothing can be added to it."""
        return number in self._over

    def was_requested(self, name: RolloutName) -> bool:
        """Whether such a rollout can have been asked for. Of a complete group it is not known which ones were."""
        group = self._groups.get(name.group_id)
        if group is None or name.place >= len(group.places):
            return name.number < self.next_number and name.place < self._group_size
        return name.again <= group.places[name.place].again

    def settle(self, rollout: Rollout) -> Settlement:
        """A rollout is closed."""
        found = self._find(rollout.manifest)
        if found is None:
            return Settlement(DropReason.LATE)
        name, group, place = found
        if name.again >= place.again:
            place.again, place.out = name.again, False
        if place.over:
            return Settlement(DropReason.LATE)
        if rollout.dropped is None:
            place.filled, place.out = rollout, False
            return self._settled(group, None)
        return self._unused(group, place, name.again, rollout.dropped)

    def lose(self, rollout_id: str) -> Settlement:
        """A rollout in flight that nothing will be heard of again."""
        found = self._newest(rollout_id)
        if found is None:
            return Settlement(DropReason.LOST)
        name, group, place = found
        place.out = False
        if place.over:  # by an older rollout that was heard of after all
            return Settlement(DropReason.LOST)
        return self._unused(group, place, name.again, DropReason.LOST)

    def withdraw(self, rollout_id: str) -> None:
        """Its request was taken back before anybody ran it: the place can be requested anew."""
        found = self._newest(rollout_id)
        if found is not None:
            found[2].out = False

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Ids of the rollouts that are requested and not closed."""
        return tuple(
            str(RolloutName(group.number, index, place.again))
            for group in self._groups.values()
            for index, place in enumerate(group.places)
            if place.out
        )

    @property
    def open_groups(self) -> dict[str, int]:
        """The groups that are not complete, with the number of places that are filled or can be."""
        return {key: sum(not place.closed for place in group.places) for key, group in self._groups.items()}

    @property
    def waiting(self) -> tuple[Rollout, ...]:
        """Usable rollouts whose groups are not complete."""
        return tuple(
            place.filled for group in self._groups.values() for place in group.places if place.filled is not None
        )

    def _newest(self, rollout_id: str) -> tuple[RolloutName, _Group, _Place] | None:
        """Name, group and place of a rollout, if it is the newest that was requested for that place."""
        name = parse(rollout_id)
        group = self._groups.get(name.group_id) if name else None
        if name is None or group is None or name.place >= len(group.places):
            return None
        place = group.places[name.place]
        return (name, group, place) if place.again == name.again else None

    def _unused(self, group: _Group, place: _Place, again: int, reason: DropReason) -> Settlement:
        if reason in INFRASTRUCTURE:
            place.lost.add(again)  # it may be heard of after it was given up: it is lost once all the same
            if self._refill and len(place.lost) < MAX_LOSSES:
                return Settlement(reason)
        place.closed, place.out = True, False
        return self._settled(group, reason)

    def _settled(self, group: _Group, reason: DropReason | None) -> Settlement:
        if not all(place.over for place in group.places):
            return Settlement(reason, place_closed=reason is not None)
        key = group_id(group.number)
        del self._groups[key]
        self._over.add(group.number)
        rollouts = tuple(place.filled for place in group.places if place.filled is not None)
        ready = ReadyGroup(key, group.number, group.version, rollouts) if rollouts else None
        return Settlement(reason, place_closed=reason is not None, complete=True, group=ready)

    def _find(self, what: RolloutRequest | RolloutManifest) -> tuple[RolloutName, _Group, _Place] | None:
        """Name, group and place of a rollout; None when its group is over, or the id is not ours."""
        name = parse(what.rollout_id)
        if name is None or name.place >= self._group_size or name.number in self._over:
            return None
        group = self._group(name, what.task_id, what.harness, what.version)
        return name, group, group.places[name.place]

    def _group(self, name: RolloutName, task_id: str, harness: str, version: int) -> _Group:
        found = self._groups.get(name.group_id)
        if found is None:
            places = [_Place() for _ in range(self._group_size)]
            found = self._groups[name.group_id] = _Group(name.number, task_id, harness, version, places)
            self.next_number = max(self.next_number, name.number + 1)
        return found

    def _shuffled(self, lap: int) -> tuple[int, ...]:
        return tuple(self._dice(0, lap).permutation(len(self._tasks)).tolist())

    def _mixed(self, step: int) -> tuple[int, ...]:
        """The harnesses of a step's groups: systematic sampling, so each has its weight's number, rounded up or
        down, in every step, and its weight on average."""
        dice = self._dice(1, step)
        points = (np.arange(self._groups_per_step) + dice.random()) / self._groups_per_step
        picked = np.searchsorted(np.cumsum(self._weights)[:-1], points, side="right")
        return tuple(dice.permutation(picked).tolist())

    def _dice(self, purpose: int, number: int) -> np.random.Generator:
        # SeedSequence takes no negative numbers; the mask keeps all seeds distinct.
        return np.random.default_rng([self._seed & (2**64 - 1), purpose, number])
