"""Rollouts written by hand or drawn at random: call records with deltas, manifests, closed rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from clawpipe.pipeline import entries
from clawpipe.pipeline.closing import close
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.records import (
    CallEntry,
    CallRecord,
    FinishReason,
    Role,
    RolloutManifest,
    Scored,
    VersionSpan,
    encode,
    float_bytes,
    int_bytes,
)


def entry(sequence, record):
    """The record as the stream gives it."""
    kind = "call" if isinstance(record, CallRecord) else "manifest"
    name = record.call_id if isinstance(record, CallRecord) else f"{record.rollout_id}.a{record.attempt}.manifest"
    return entries.read(sequence, f"clawpipe.records.{kind}.{record.rollout_id}", name, encode(record))


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass
class Script:
    """One attempt of a rollout. Every sampled token has a logprob of its own: -(its number + 1) / 1024."""

    rollout_id: str = "r-000000-0"
    attempt: int = 1
    harness: str = "agentloop"
    task_id: str = "filing/0"
    records: list[CallRecord] = field(default_factory=list)
    texts: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    numbered: int = 0

    def call(self, prompt, completion, *, role=Role.MAIN, version=0, parent="longest", shared=None):
        """A call; its prompt is encoded against the parent, by default the call that it shares most with."""
        index = len(self.records)
        call_id = f"{self.rollout_id}.a{self.attempt}.c{index}"
        if parent == "longest":
            best = max(self.texts, key=lambda c: common(self.whole(c), prompt), default=None)
            parent = best if best and common(self.whole(best), prompt) else None
        most = common(self.whole(parent), prompt) if parent else 0
        shared = most if shared is None else min(shared, most)
        logprobs = [-(self.numbered + k + 1) / 1024 for k in range(len(completion))]
        self.numbered += len(completion)
        spans = (VersionSpan(version=version, start=0, end=len(completion)),) if completion else ()
        record = CallRecord(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            call_id=call_id,
            index=index,
            parent=parent,
            parent_tokens=shared,
            prompt_delta=int_bytes(prompt[shared:]),
            prompt_tokens=len(prompt),
            completion_ids=int_bytes(completion),
            logprobs=float_bytes(logprobs),
            versions=spans,
            finish_reason=FinishReason.STOP,
            role=role,
            harness=self.harness,
            digest="",
        )
        self.records.append(record)
        self.texts[call_id] = list(prompt), list(completion)
        return record

    def whole(self, call_id):
        prompt, completion = self.texts[call_id]
        return prompt + completion

    def manifest(self, outcome=None, *, undelivered=(), cut=(), listed=None, version=0, aborted=0):
        ids = [r.call_id for r in self.records] if listed is None else listed
        number, place = self.rollout_id.split("-")[1:3]
        return RolloutManifest(
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            group_id=f"g-{number}",
            task_id=self.task_id,
            harness=self.harness,
            calls=tuple(
                CallEntry(
                    call_id=call_id,
                    delivered=call_id not in undelivered and call_id not in cut,
                    cut=call_id in cut,
                )
                for call_id in ids
            ),
            outcome=Scored(reward=float(int(place) % 2)) if outcome is None else outcome,
            version=version,
            started_s=1.0,
            ended_s=3.0,
            num_aborted=aborted,
        )

    def closed(self, outcome=None, *, leaf_cap=16, auxiliary=False, **manifest):
        return close(self.manifest(outcome, **manifest), self.records, leaf_cap, auxiliary=auxiliary)


def own(rollout_id):
    """The first of a hundred tokens that no other place of a group of ten samples."""
    return 100 * (1 + int(rollout_id.removeprefix("r-").replace("-", "")) % 10_000_000)


def simple(rollout_id, reward, *, version=0, tokens=3, harness="agentloop", prompt=(1, 2)):
    """A closed rollout of one call: a prompt, then `tokens` sampled tokens that are its own."""
    script = Script(rollout_id, harness=harness)
    script.call(list(prompt), [own(rollout_id) + k for k in range(tokens)], version=version)
    return script.closed(Scored(reward=reward), version=version)


token_lists = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def scripts(draw, max_calls=7, roles=(Role.MAIN,)):
    """A rollout over an alphabet of three tokens: retries, forks, adoptions and coincidences are common."""
    script = Script()
    for _ in range(draw(st.integers(1, max_calls))):
        earlier = draw(st.sampled_from([[], *(p + c for p, c in script.texts.values())]))
        kept = earlier[: draw(st.integers(0, len(earlier)))]
        prompt = kept + draw(token_lists)
        if not prompt:
            prompt = [draw(st.integers(0, 2))]
        parent = draw(st.sampled_from([None, "longest", *script.texts]))
        script.call(
            prompt,
            draw(token_lists),
            role=draw(st.sampled_from(roles)),
            version=draw(st.integers(0, 3)),
            parent=parent,
            shared=draw(st.none() | st.integers(0, 6)),
        )
    return script


def configuration(**tables):
    """A small configuration: 2 groups of 2 per step, and what `tables` replaces."""
    plain = {
        "model": {"tiny": {}},
        "harness": [{"kind": "agentloop"}],
        "tasks": [{"kind": "filing"}],
        "schedule": {"groups_per_step": 2, "group_size": 2, "max_staleness": 2},
        "run": {"updates": 3, "drain_timeout_s": 5.0},
        "observe": {"status_interval_s": 0.05},
    }
    for name, values in tables.items():
        plain[name] = {**plain.get(name, {}), **values} if isinstance(values, dict) else values
    return msgspec.convert(plain, Config)


def two_turns(request, attempt=1, *, version=0, reward=None):
    """What an ordinary rollout leaves in the stream: two calls and a manifest. The reward is the place's parity."""
    script = Script(request.rollout_id, attempt, request.harness, request.task_id)
    t = own(request.rollout_id)
    script.call([1, 2, t], [t + 1, t + 2], version=version)
    script.call([1, 2, t, t + 1, t + 2, 3], [t + 3], version=version)
    outcome = None if reward is None else Scored(reward=reward)
    return [*script.records, script.manifest(outcome, version=request.version)]
