"""The rows of a run's books - rollouts, calls, batches, updates - and the sums over them. Pure data.

`ledger` keeps them, `ledger_file` stores them, `report` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from clawpipe.pipeline.records import StreamCursor

TRAINED = "trained"  # how a rollout ends of which at least one token was trained


class RolloutState(StrEnum):
    """Where a rollout is."""

    IN_FLIGHT = "in_flight"  # requested or running
    QUEUED = "queued"  # settled; waits for its group, or its group for the learner
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"  # its request was taken back before it ran


class Row(Struct, kw_only=True):
    """A rollout. sampled = open + kept + the sum of dropped.

    A call that came when its rollout was over, or that nobody asked for, has a row of its own (`is_stray`).
    """

    rollout_id: str
    group_id: str
    task_id: str = ""
    harness: str = ""
    state: RolloutState = RolloutState.IN_FLIGHT
    reason: str = ""  # of a dropped rollout, or why a trained one has no loss entries
    detail: str = ""
    outcome: str = ""  # scored, timed_out, agent_failed, infra, verifier_infra; empty: no manifest yet
    reward: float | None = None
    attempt: int = 0
    version: int = 0
    admitted_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    num_aborted: int = 0
    calls: int = 0
    roles: dict[str, int] = {}
    prompt_tokens: int = 0  # of all calls
    reused_tokens: int = 0  # of these, the ones that an earlier call's tokens begin with
    broken: dict[str, int] = {}  # calls with an earlier turn that could not be grafted, by reason
    malformed: int = 0  # calls in which the model tried to call a tool and failed
    sampled: int = 0
    open: int = 0  # tokens of a rollout without a manifest
    kept: int = 0  # trainable tokens; they are where the rollout is, those in `set_aside` left out
    set_aside: dict[str, int] = {}  # reason -> kept tokens that are not trained as things stand
    dropped: dict[str, int] = {}
    updates: list[int] = []  # that trained it; while it waits to be trained again it is queued or leased
    last_sequence: int = 0  # of its records, when it settled
    num_leaves: int = 0
    leaf_cap: int = 0  # by which it was judged; 0: it was not
    tree: str = ""  # digest of its tree; empty: none was built

    @property
    def is_stray(self) -> bool:
        """Whether this is a call that belongs to no open rollout; `group_id` is the rollout that it names."""
        return "@" in self.rollout_id


class CallRow(Struct, frozen=True, kw_only=True):
    """A call and what became of its tokens."""

    call_id: str
    rollout_id: str
    role: str
    sampled: int
    kept: int
    dropped: dict[str, int]


class BatchRow(Struct, frozen=True, kw_only=True):
    """A leased batch; `updates` is None until the learner has stepped on it."""

    batch_id: str
    version: int
    rollouts: tuple[str, ...]  # in the order of the batch
    updates: int | None = None
    digest: str = ""  # of its body


class UpdateRow(Struct, frozen=True, kw_only=True):
    """One update, as it was trained."""

    updates: int  # its number, from 1
    version: int  # of the batch at the lease
    stepped_s: float
    reward_mean: float
    num_rollouts: int
    num_groups: int
    num_entries: int
    staleness_mean: float
    staleness_max: int
    groups_without_spread: int
    masked: dict[str, int]
    metrics: dict[str, float]
    rewards: dict[str, tuple[float, ...]] = {}  # of its rollouts, by harness


class Standing(Struct, frozen=True, kw_only=True):
    """The learner's last checkpoint, as it was told to the service: where a restarted service reads on."""

    cursor: StreamCursor = StreamCursor()
    updates: int = 0
    written: bool = False  # by the learner that runs now; else it started from it


class Changes(Struct, frozen=True, kw_only=True):
    """What has changed since the last hand-over, for the file."""

    rows: tuple[Row, ...]
    removed_rows: tuple[str, ...]
    calls: tuple[CallRow, ...]
    batches: tuple[BatchRow, ...]
    removed_batches: tuple[str, ...]
    updates: tuple[UpdateRow, ...]
    removed_updates_above: int | None
    standing: Standing | None


class Sums(Struct, kw_only=True):
    """Sums over the rollouts that ended alike."""

    rollouts: int = 0
    num_settled: int = 0  # of them with a manifest
    sampled: int = 0
    calls: int = 0
    run_s: float = 0.0  # of the settled ones
    reward_sum: float = 0.0
    num_graded: int = 0

    def add(self, row: Row) -> None:
        """Counts one more rollout."""
        self.rollouts += 1
        self.sampled += row.sampled
        self.calls += row.calls
        if row.outcome:
            self.num_settled, self.run_s = self.num_settled + 1, self.run_s + row.ended_s - row.started_s
        if row.reward is not None:
            self.reward_sum, self.num_graded = self.reward_sum + row.reward, self.num_graded + 1


class Totals(Struct, kw_only=True):
    """Sums over rollouts, and over the tokens of strays."""

    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)  # of dropped rollouts
    calls: int = 0
    num_aborted: int = 0
    roles: Counter[str] = msgspec.field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    broken: Counter[str] = msgspec.field(default_factory=Counter)
    malformed: int = 0
    tokens: Counter[str] = msgspec.field(default_factory=Counter)  # sampled, in_flight, queued, leased, trained
    dropped: Counter[str] = msgspec.field(default_factory=Counter)  # tokens
    reward_sum: float = 0.0
    num_graded: int = 0
    run_s: float = 0.0  # wall clock of settled rollouts, summed
    ends: dict[str, Sums] = {}  # by `end_of`, of the rollouts that have ended

    def add(self, row: Row) -> None:
        """Counts one more rollout."""
        if row.outcome:
            self.outcomes[row.outcome] += 1
            self.run_s += row.ended_s - row.started_s
        if row.state is RolloutState.DROPPED and not row.is_stray:
            self.reasons[row.reason] += 1
        if end := end_of(row):
            self.ends.setdefault(end, Sums()).add(row)
        self.calls += row.calls
        self.num_aborted += row.num_aborted
        self.roles.update(row.roles)
        self.prompt_tokens += row.prompt_tokens
        self.reused_tokens += row.reused_tokens
        self.broken.update(row.broken)
        self.malformed += row.malformed
        self.tokens.update(bucket_tokens(row))
        self.dropped.update(dropped_tokens(row))
        if row.reward is not None:
            self.reward_sum, self.num_graded = self.reward_sum + row.reward, self.num_graded + 1


def end_of(row: Row) -> str:
    """How the rollout ended: TRAINED, or the reason why nothing of it was; empty while it has not, and for a
    request that was taken back or a stray."""
    if row.is_stray:
        return ""
    if row.state is RolloutState.DROPPED:
        return row.reason
    if row.state is not RolloutState.TRAINED:
        return ""
    return TRAINED if row.kept > sum(row.set_aside.values()) else most_of(row.set_aside)


def most_of(set_aside: Mapping[str, int]) -> str:
    """The reason that holds for most of the tokens; empty without any."""
    return max(set_aside, key=lambda reason: (set_aside[reason], reason), default="")


def copy_id(call_id: str, sequence: int) -> str:
    """The name in the books of a record that has not its call's place there: a second copy, or a stray."""
    return f"{call_id}@{sequence}"


def bucket_tokens(row: Row) -> dict[str, int]:
    """The row's tokens by where they are; what is dropped is in `dropped_tokens`.

    Tokens that were trained count as trained also while they wait to be trained again.
    """
    state = RolloutState.TRAINED if row.updates else row.state
    found = {"sampled": row.sampled, "in_flight": row.open}
    return added(found, {state.value: row.kept - sum(row.set_aside.values())})


def dropped_tokens(row: Row) -> dict[str, int]:
    """The row's tokens that are not trained, by reason."""
    return added(row.dropped, row.set_aside)


def added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """The sum of two tables of counts."""
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
