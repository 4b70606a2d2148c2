"""What a run holds between the record stream and the learner: the room's parts, and who has which rollout.

No I/O. `intake` puts rollouts in, `leases` hands them to the learner; both tell the ledger, and `check` proves
that what is booked is what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from clawpipe.pipeline.admission import Admission
from clawpipe.pipeline.assembler import Assembler
from clawpipe.pipeline.batches import Batches, Recipe
from clawpipe.pipeline.books import RolloutState
from clawpipe.pipeline.config import Config, PpoConfig
from clawpipe.pipeline.credit import grpo, ppo
from clawpipe.pipeline.cursor import Spans
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.records import StreamCursor
from clawpipe.pipeline.replay import ReadyGroup, Replay
from clawpipe.pipeline.scheduler import Scheduler
from clawpipe.pipeline.throttle import ESS, allowed_staleness


class Holdings:
    """See the module."""

    def __init__(self, config: Config, tasks: Iterable[str], ledger: Ledger, leaf_caps: Mapping[str, int]) -> None:
        """`leaf_caps`: by rollout id, what an earlier process decided."""
        self.leaf_caps = LeafCaps(config.replay.leaf_cap, leaf_caps)
        self.assembler = make_assembler(config, self.leaf_caps)
        self.scheduler = _make_scheduler(config, tasks)
        self.admission = Admission(
            max_staleness=config.schedule.max_staleness,
            rollouts_per_step=config.schedule.groups_per_step * config.schedule.group_size,
        )
        self.replay = _make_replay(config, self.scheduler.shares)
        self.max_staleness = config.schedule.max_staleness  # at most
        self.auto_throttle = config.correction.auto_throttle
        self.recipe = make_recipe(config)
        self.batches = Batches()
        self.spans = Spans()
        self.ledger = ledger
        self.building: tuple[ReadyGroup, ...] = ()  # ordered as a batch
        self.version = 0  # the learner's
        self.updates = 0
        self.catching_up = False  # reading again what an earlier process had read

    @property
    def leased(self) -> tuple[ReadyGroup, ...]:
        """The groups that are with the learner."""
        return self.batches.lease.groups if self.batches.lease else ()

    @property
    def groups(self) -> tuple[ReadyGroup, ...]:
        """All complete groups that are to be trained, or trained again."""
        return (*self.replay.groups, *self.building, *self.leased)

    def end(self, group_id: str) -> None:
        """The group is done for good."""
        self.spans.set_over(group_id, True)
        self.admission.release_all(group_id)

    def follow_ess(self) -> None:
        """Admits and takes as much staleness as the updates in the books allow."""
        if self.auto_throttle is None:
            return
        rows = (self.ledger.updates[number] for number in sorted(self.ledger.updates))
        ess = [row.metrics[ESS] for row in rows if ESS in row.metrics]
        allowed = allowed_staleness(ess, self.auto_throttle, self.max_staleness)
        self.admission.limit_staleness(allowed)
        self.replay.limit_staleness(allowed)

    def cursor(self) -> StreamCursor:
        """The cursor of a checkpoint taken now."""
        uses = {group.group_id: group.uses for group in self.groups if group.uses}
        return msgspec.structs.replace(self.spans.cursor(), uses=uses)

    def check(self) -> None:
        """The conservation law; AssertionError with the first rollout that breaks it."""
        self.ledger.check(dict(self._held()))

    def _held(self) -> Iterable[tuple[str, tuple[RolloutState, int]]]:
        """Every settled rollout that somebody here holds, with its state and trainable tokens."""
        groups = (*self.replay.groups, *self.building)
        for rollout in (*self.scheduler.waiting, *(rollout for group in groups for rollout in group.rollouts)):
            yield rollout.rollout_id, (RolloutState.QUEUED, rollout.num_kept)
        for rollout in (rollout for group in self.leased for rollout in group.rollouts):
            yield rollout.rollout_id, (RolloutState.LEASED, rollout.num_kept)


def make_assembler(config: Config, leaf_caps: LeafCaps) -> Assembler:
    """The assembler of a run."""
    return Assembler(
        close_timeout_s=config.replay.close_timeout_s,
        leaf_caps=leaf_caps,
        auxiliary=config.replay.auxiliary == "own_group",
    )


def make_recipe(config: Config) -> Recipe:
    """What a run's batches are made by."""
    algorithm = config.algorithm
    return Recipe(
        credit=ppo if isinstance(algorithm, PpoConfig) else partial(grpo, eps=algorithm.advantage_eps),
        pack_tokens=config.learner.pack_tokens,
        align=config.learner.parallel.tensor,
        max_staleness=config.schedule.max_staleness,
    )


def _make_scheduler(config: Config, tasks: Iterable[str]) -> Scheduler:
    return Scheduler(
        tasks=tuple(tasks),
        harnesses=[(harness.name, harness.weight) for harness in config.harness],
        groups_per_step=config.schedule.groups_per_step,
        group_size=config.schedule.group_size,
        seed=config.run.seed,
        refill=config.schedule.refill,
    )


def _make_replay(config: Config, shares: Mapping[str, int]) -> Replay:
    replay = config.replay
    return Replay(
        capacity_tokens=replay.capacity_tokens,
        capacity_rollouts=replay.capacity_rollouts,
        max_staleness=config.schedule.max_staleness,
        groups_per_step=config.schedule.groups_per_step,
        min_group=config.schedule.min_group,
        window_groups=replay.window_groups if replay.sampling == "windowed" else None,
        shares=shares,
    )
