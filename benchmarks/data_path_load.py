"""The load of the data path's benchmark: rollouts as the proxy records them, made from a seed.

Every rollout is one growing conversation with what agents do on the side: a title first, a turn that is tried
again because its answer never arrived (every 20th call), a sub-agent of three calls (every 30 calls). A third of
what a call adds is sampled, as in agents that read more than they write. Rollouts of a group share their first prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from clawpipe.pipeline.records import (
    CallEntry,
    CallRecord,
    FinishReason,
    FloatArray,
    IntArray,
    Role,
    RolloutManifest,
    RolloutRequest,
    Scored,
    VersionSpan,
    float_bytes,
    int_bytes,
)

VOCABULARY = 151_936  # Qwen3's
SAMPLED_SHARE = 1 / 3
RETRY_EVERY, SUBAGENT_EVERY, SUBAGENT_CALLS = 20, 30, 3
SIDE_PROMPT_TOKENS = 400  # of a title and of a sub-agent
REQUESTED = {"max_tokens": 8192, "stream": True, "temperature": 1.0, "tool_choice": "auto"}
START_S = 1_790_000_000.0


@dataclass(frozen=True, slots=True)
class Load:
    """How much there is. `tokens` are the new tokens of one rollout: prompt deltas and samples of all its calls."""

    rollouts: int = 256
    calls: int = 60  # of each rollout
    tokens: int = 65_536
    first_prompt: int = 8192  # tokens; a group shares them
    group_size: int = 8
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens of all rollouts: those that a tree per rollout holds once."""
        return self.rollouts * self.tokens

    @property
    def num_calls(self) -> int:
        """Calls of all rollouts."""
        return self.rollouts * self.calls

    def longer(self, factor: int, rollouts: int) -> Load:
        """Fewer rollouts with `factor` times as many calls and tokens."""
        return replace(self, rollouts=rollouts, calls=factor * self.calls, tokens=factor * self.tokens)

    def requests(self) -> list[RolloutRequest]:
        """Requests for the rollouts, named as the scheduler names them."""
        return [
            RolloutRequest(
                rollout_id=f"r-{number // self.group_size:06d}-{number % self.group_size}",
                group_id=f"g-{number // self.group_size:06d}",
                task_id="filing/0",
                harness="agentloop",
            )
            for number in range(self.rollouts)
        ]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one rollout leaves in the stream."""

    calls: tuple[CallRecord, ...]
    manifest: RolloutManifest

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(len(call.completion_ids) // 4 for call in self.calls)


def conversations(load: Load, requests: Iterable[RolloutRequest]) -> Iterator[Conversation]:
    """One conversation per request, the same for the same load and request."""
    for request in requests:
        group, place = (int(part) for part in request.rollout_id.split("-")[1:3])
        shared = np.random.default_rng([load.seed, group]).integers(0, VOCABULARY, load.first_prompt, np.int32)
        yield _Author(load, request, shared, np.random.default_rng([load.seed, group, place + 1])).write()


class _Author:
    """Writes one conversation; `_take` hands out its tokens in the amounts that were drawn for its calls."""

    def __init__(self, load: Load, request: RolloutRequest, shared: IntArray, rng: np.random.Generator) -> None:
        self._request = request
        self._shared = shared
        self._rng = rng
        self._kinds = [_role(index) for index in range(load.calls)]
        self._sizes = _sizes(load, self._kinds, rng)
        self._ids = rng.integers(0, VOCABULARY, load.tokens, np.int32)
        self._logprobs = (-rng.exponential(0.5, load.tokens)).astype(np.float32)
        self._used = 0
        self._calls: list[CallRecord] = []
        self._newest: dict[Role, CallRecord] = {}  # by role, the call that the next one goes on from

    def write(self) -> Conversation:
        """The whole of it."""
        for index, role in enumerate(self._kinds):
            self._call(index, role)
        return Conversation(tuple(self._calls), self._manifest())

    def _call(self, index: int, role: Role) -> None:
        delta, sampled = self._sizes[index]
        parent = self._newest.get(role) if role is Role.MAIN or self._kinds[index - 1] is role else None
        shared = 0 if parent is None else parent.prompt_tokens
        if parent is not None and not _is_retry(index):
            shared += len(parent.completion_ids) // 4
        first = role is Role.MAIN and parent is None
        prompt = self._shared if first else self._take(delta)[0]
        ids, logprobs = self._take(sampled)
        record = CallRecord(
            rollout_id=self._request.rollout_id,
            attempt=1,
            call_id=f"{self._request.rollout_id}.a1.c{index}",
            index=index,
            parent=None if parent is None else parent.call_id,
            parent_tokens=shared,
            prompt_delta=int_bytes(prompt),
            prompt_tokens=shared + len(prompt),
            completion_ids=int_bytes(ids),
            logprobs=float_bytes(logprobs),
            versions=_versions(index, sampled),
            finish_reason=FinishReason.STOP,
            role=role,
            harness=self._request.harness,
            digest=self._rng.bytes(32).hex(),
            requested=REQUESTED,
            started_s=START_S + 7.25 * index,
            ended_s=START_S + 7.25 * index + 5.5,
        )
        self._calls.append(record)
        self._newest[role] = record

    def _take(self, size: int) -> tuple[IntArray, FloatArray]:
        start = self._used
        self._used += size
        return self._ids[start : self._used], self._logprobs[start : self._used]

    def _manifest(self) -> RolloutManifest:
        request = self._request
        return RolloutManifest(
            rollout_id=request.rollout_id,
            attempt=1,
            group_id=request.group_id,
            task_id=request.task_id,
            harness=request.harness,
            calls=tuple(
                CallEntry(call_id=call.call_id, delivered=not _is_retry(call.index + 1)) for call in self._calls
            ),
            outcome=Scored(reward=float(self._rng.integers(0, 11)) / 10, checks={"files": 1.0, "summary": 0.5}),
            version=request.version,
            admitted_s=request.admitted_s,
            started_s=START_S,
            ended_s=START_S + 500.0,
        )


def _role(index: int) -> Role:
    if index == 0:
        return Role.TITLE
    place = index % SUBAGENT_EVERY - SUBAGENT_EVERY // 3
    return Role.SUBAGENT if 0 <= place < SUBAGENT_CALLS else Role.MAIN


def _is_retry(index: int) -> bool:
    """Whether this call repeats the prompt of the one before it."""
    return index % RETRY_EVERY == RETRY_EVERY - 1


def _sizes(load: Load, kinds: list[Role], rng: np.random.Generator) -> list[tuple[int, int]]:
    """(prompt delta, sampled) tokens of each call, `load.tokens` in all."""
    fixed = [_fixed_delta(load, kinds, index) for index in range(load.calls)]
    left = load.tokens - sum(size for size in fixed if size is not None)
    sampled = 1 + rng.multinomial(int(SAMPLED_SHARE * left) - load.calls, _shares(load.calls, rng))
    free = [index for index, size in enumerate(fixed) if size is None]
    deltas = np.array([size or 0 for size in fixed])
    deltas[free] = 1 + rng.multinomial(left - sampled.sum() - len(free), _shares(len(free), rng))
    return list(zip(deltas.tolist(), sampled.tolist(), strict=True))


def _fixed_delta(load: Load, kinds: list[Role], index: int) -> int | None:
    """The prompt delta of a call whose prompt has a given length; None for one that goes on."""
    if _is_retry(index):
        return 0
    if kinds[index] is Role.MAIN:
        return load.first_prompt if Role.MAIN not in kinds[:index] else None
    return SIDE_PROMPT_TOKENS if kinds[index - 1] is not kinds[index] else None


def _shares(number: int, rng: np.random.Generator) -> list[float]:
    """What part each of them gets: most calls are short, some are long."""
    drawn = rng.gamma(2.0, size=number)
    return list(drawn / drawn.sum())


def _versions(index: int, sampled: int) -> tuple[VersionSpan, ...]:
    """Every tenth call sees new weights while it runs."""
    version = index // 10
    if index % 10 != 9 or sampled < 2:
        return (VersionSpan(version=version, start=0, end=sampled),)
    half = sampled // 2
    return (
        VersionSpan(version=version, start=0, end=half),
        VersionSpan(version=version + 1, start=half, end=sampled),
    )
