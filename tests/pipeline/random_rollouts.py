"""Rollouts as harnesses make them, drawn at random: turns, retries, compactions, sub-agents that talk in between,
answers of which only a part lives on, calls that are cut or never delivered, attempts that died.

The alphabet is small, so that coincidences are common: equal prompts, equal completions, tokens that one role
sampled and another one was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import msgspec
from hypothesis import strategies as st
from pipeline_scripts import Script

from clawpipe.pipeline.records import (
    CallRecord,
    FinishReason,
    Infra,
    Role,
    RolloutManifest,
    VersionSpan,
    float_bytes,
    int_bytes,
)

SUMMARIZE = 7  # what a harness adds to a conversation that it has summed up


def texts(*lengths):
    """Texts of these lengths, each length as often; one draw each, where a list takes one for every token."""
    longest = max(lengths)
    return st.sampled_from(
        [list(text) for n in lengths for text in product((3, 4, 5), repeat=n) for _ in range(3 ** (longest - n))]
    )


tokens = texts(1, 2, 3)
completions = texts(0, 1, 2, 3)
hints = st.sampled_from(["longest", "longest", "none", "any"])
versions = st.integers(0, 3)
cuts = st.none() | st.integers(0, 8)
ends = st.sampled_from(["reached", "reached", "reached", "reached", "lost", "cut"])
heads = st.sampled_from([1, 1, 4])
asides = st.sampled_from([Role.TITLE, Role.NUDGE, Role.MEMORY])
one_in = {n: st.sampled_from(range(n)) for n in (3, 4, 10)}


@dataclass
class Conversation:
    """What one agent of a harness has on its side."""

    role: Role
    history: list[int]
    last_prompt: list[int]


@dataclass
class RandomRollout:
    """All records of a rollout in the order in which they were written, attempts that died first."""

    script: Script  # the attempt that the manifest tells of
    manifest: RolloutManifest
    dead: Script | None = None
    undelivered: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    leaf_cap: int = 16

    @property
    def calls(self):
        return [*(self.dead.records if self.dead else []), *self.script.records]

    @property
    def records(self):
        return [*self.calls, self.manifest]


@st.composite
def rollouts(draw, place=0, max_calls=8):
    """A rollout of a group; now and then with an attempt that died before."""
    rollout_id = f"r-000000-{place}"
    dead = None
    if _one_in(draw, 4):
        dead, _, _ = draw(_attempts(rollout_id, 1, 3))
    script, undelivered, cut = draw(_attempts(rollout_id, 2 if dead else 1, max_calls))
    listed = [record.call_id for record in script.records]
    if _one_in(draw, 10):
        listed.pop()
    outcome = Infra(boundary="sandbox", message="no space") if _one_in(draw, 10) else None
    manifest = script.manifest(outcome, undelivered=undelivered, cut=cut, listed=listed)
    return RandomRollout(script, manifest, dead, undelivered, cut, leaf_cap=1 if _one_in(draw, 3) else 16)


def _one_in(draw, n):
    return draw(one_in[n]) == n - 1


@st.composite
def _attempts(draw, rollout_id, attempt, max_calls):
    script = Script(rollout_id, attempt)
    talks = [Conversation(Role.MAIN, [1], [1])]
    undelivered, cut = set(), set()
    for _ in range(draw(st.integers(1, max_calls))):
        fate = draw(ends)
        record = _STEPS[draw(steps)](draw, script, talks, fate == "reached")
        if fate == "lost":
            undelivered.add(record.call_id)
        elif fate == "cut":
            cut.add(record.call_id)
    return script, undelivered, cut


def _call(draw, script, prompt, role):
    """A call whose delta may be written against any earlier call, and take fewer tokens of it than it could."""
    hint = draw(hints)
    parent = draw(st.sampled_from([None, *script.texts])) if hint == "any" else {"none": None}.get(hint, hint)
    return script.call(prompt, draw(completions), role=role, version=draw(versions), parent=parent, shared=draw(cuts))


def _turn(draw, script, talks, reached):
    talk = draw(st.sampled_from([talks[0], *talks]))
    prompt = talk.history + draw(tokens)
    record = _call(draw, script, prompt, talk.role)
    talk.last_prompt = prompt
    if reached:
        talk.history = script.whole(record.call_id)
    return record


def _retry(draw, script, talks, reached):
    return _retry_of(draw, script, draw(st.sampled_from([talks[0], *talks])), reached)


def _retry_of(draw, script, talk, reached):
    record = _call(draw, script, talk.last_prompt, talk.role)
    if reached:
        talk.history = script.whole(record.call_id)
    return record


def _partial(draw, script, talks, reached):
    """A turn of which the harness keeps the beginning, and the next turn."""
    talk = draw(st.sampled_from([talks[0], *talks]))
    record = _turn(draw, script, [talk], False)
    prompt, completion = script.texts[record.call_id]
    talk.history = prompt + completion[: draw(st.integers(0, len(completion)))]
    return _turn(draw, script, [talk], reached)


def _compact(draw, script, talks, reached):
    talk = talks[0]
    record = _call(draw, script, [*talk.history, SUMMARIZE], Role.COMPACTION)
    if reached:
        head = talk.history[: draw(heads)]
        talk.history = head + script.texts[record.call_id][1]
    return record


def _delegate(draw, script, talks, reached):
    """A sub-agent; its system prompt may be that of the main conversation."""
    start = draw(st.sampled_from([[2], [1], talks[0].last_prompt]))
    talks.append(Conversation(Role.SUBAGENT, list(start), list(start)))
    return _turn(draw, script, talks[-1:], reached)


def _fork(draw, script, talks, reached):
    """A sub-agent that is given the main conversation's own prompt."""
    prompt = talks[0].last_prompt
    talks.append(Conversation(Role.SUBAGENT, list(prompt), list(prompt)))
    return _retry_of(draw, script, talks[-1], reached)


def _title(draw, script, talks, reached):
    return _call(draw, script, [*talks[0].history, 6], draw(asides))


_STEPS = {
    "compact": _compact,
    "delegate": _delegate,
    "fork": _fork,
    "partial": _partial,
    "retry": _retry,
    "title": _title,
    "retry again": _retry,
    "turn": _turn,
    "turn again": _turn,
}
steps = st.sampled_from(sorted(_STEPS))


@st.composite
def damaged(draw, record):
    """A record that is not what was written; it may contradict itself, or its parent, or nothing."""
    if isinstance(record, RolloutManifest):
        changes = [
            {"calls": record.calls + record.calls[:1]},
            {"calls": record.calls[:-1]},
            {"attempt": draw(st.integers(-1, 3))},
            {"harness": "another"},
        ]
    else:
        changes = _call_changes(draw, record)
    return msgspec.structs.replace(record, **draw(st.sampled_from(changes)))


def _call_changes(draw, record: CallRecord):
    fewer = draw(st.integers(0, 9))
    return [
        {"prompt_delta": record.prompt_delta[:fewer]},
        {"completion_ids": record.completion_ids[:fewer]},
        {"completion_ids": int_bytes([-4] * (len(record.completion_ids) // 4))},
        {"completion_ids": int_bytes([4] * (len(record.completion_ids) // 4))},
        {"logprobs": float_bytes([float("nan")] * (len(record.logprobs) // 4))},
        {"logprobs": record.logprobs[4:]},
        {"parent": f"{record.rollout_id}.a{record.attempt}.c{draw(st.integers(0, 9))}"},
        {"parent": None},
        {"parent_tokens": draw(st.integers(-2, 2**40))},
        {"prompt_tokens": draw(st.integers(-2, 9))},
        {"versions": (VersionSpan(version=draw(st.integers(-1, 2**40)), start=0, end=draw(st.integers(0, 4))),)},
        {"index": draw(st.integers(-1, 9))},
        {"call_id": f"{record.rollout_id}.a{record.attempt}.c{draw(st.integers(0, 9))}"},
        {"finish_reason": FinishReason.LENGTH},
        {"role": Role.MAIN},
    ]
