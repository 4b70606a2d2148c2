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
from clawpipe.pipeline.segments import DropReason


class RolloutState(StrEnum):
    """Where a rollout is."""

    IN_FLIGHT = "in_flight"  # requested or running
    QUEUED = "queued"  # settled; waits for its group, or its group for the learner
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"  # its request was taken back before it ran


class Row(Struct, kw_only=True):
    """A rollout. sampled = open + kept + the sum of dropped."""

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
    kept: int = 0  # trainable tokens; they are where the rollout is, or dropped for `unused`
    unused: str = ""
    masked: int = 0  # of the kept tokens, those over max_staleness at the lease: the learner leaves them out
    dropped: dict[str, int] = {}
    update: int | None = None  # that trained it
    last_sequence: int = 0  # of its records, when it settled


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


class Totals(Struct, kw_only=True):
    """Sums over rollouts."""

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

    def add(self, row: Row) -> None:
        """Counts one more rollout."""
        if row.outcome:
            self.outcomes[row.outcome] += 1
            self.run_s += row.ended_s - row.started_s
        if row.state is RolloutState.DROPPED:
            self.reasons[row.reason] += 1
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


def bucket_tokens(row: Row) -> dict[str, int]:
    """The row's tokens by where they are; what is dropped is in `dropped_tokens`."""
    found = {"sampled": row.sampled, "in_flight": row.open}
    if not row.unused:
        found[row.state.value] = found.get(row.state.value, 0) + row.kept - row.masked
    return found


def dropped_tokens(row: Row) -> dict[str, int]:
    """The row's tokens that are not trained, by reason."""
    found = dict(row.dropped)
    if row.unused and row.kept:
        found = added(found, {row.unused: row.kept})
    elif row.masked:
        found = added(found, {DropReason.STALE.value: row.masked})
    return found


def added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """The sum of two tables of counts."""
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
