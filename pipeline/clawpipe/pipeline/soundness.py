"""What can be said about one record alone: whether it contradicts itself. Pure.

Who reads the stream sets such a record aside (`records.Flaw.UNSOUND`). What takes the parent's record to tell is
for `tree.resolve`.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

from clawpipe.pipeline.records import CallRecord, IntArray, RolloutManifest, VersionSpan, floats, ints

MAX_LOGPROB = 1e-3  # of a sampled token: 0 and the rounding of a float32 log-softmax
MAX_VERSION = 2**31 - 1  # versions are kept as int32
MAX_REWARD = 1e30  # its square is a float64 and itself a float32, so no mean and no deviation overflows


def problem(record: CallRecord | RolloutManifest) -> str | None:
    """What is wrong with the record, for a person; None when nothing is."""
    if record.attempt < 1:
        return f"its attempt is {record.attempt}, and attempts count from 1"
    return _of_call(record) if isinstance(record, CallRecord) else _of_manifest(record)


def _of_call(record: CallRecord) -> str | None:
    expected = f"{record.rollout_id}.a{record.attempt}.c{record.index}"
    if record.index < 0 or record.call_id != expected:
        return f"its id is {record.call_id}, but its attempt and index make it {expected}"
    return _of_arrays(record) or _of_parent(record) or _of_values(record)


def _of_arrays(record: CallRecord) -> str | None:
    arrays = record.prompt_delta, record.completion_ids, record.logprobs
    if any(len(data) % 4 for data in arrays):
        return "an array's bytes are no multiple of 4"
    delta, sampled, logprobs = (len(data) // 4 for data in arrays)
    if record.parent_tokens + delta != record.prompt_tokens:
        return f"prompt of {record.prompt_tokens} tokens, but {record.parent_tokens} + {delta} recorded"
    if record.prompt_tokens < 1 or logprobs != sampled:
        return f"{record.prompt_tokens} prompt tokens, {sampled} sampled tokens, {logprobs} logprobs"
    return None if _cover(record.versions, sampled) else f"its version spans do not cover its {sampled} sampled tokens"


def _cover(spans: tuple[VersionSpan, ...], sampled: int) -> bool:
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    return edges[-1] == sampled and edges[:-1] == starts and all(a <= b for a, b in pairwise(edges))


def _of_parent(record: CallRecord) -> str | None:
    if record.parent is None and record.parent_tokens:
        return f"takes {record.parent_tokens} tokens from a parent and names none"
    if record.parent_tokens < 0:
        return f"takes {record.parent_tokens} tokens from its parent"
    return "it is its own parent" if record.parent == record.call_id else None


def _of_values(record: CallRecord) -> str | None:
    if _has_negative(ints(record.prompt_delta)) or _has_negative(ints(record.completion_ids)):
        return "it has negative token ids"
    if any(not 0 <= span.version <= MAX_VERSION for span in record.versions):
        return f"it has a weight version outside 0..{MAX_VERSION}"
    logprobs = floats(record.logprobs)
    if logprobs.size and not -math.inf < logprobs.min() <= logprobs.max() <= MAX_LOGPROB:  # false for NaN
        return "it has a logprob that is not finite or above 0"
    return None


def _has_negative(ids: IntArray) -> bool:
    return ids.size > 0 and bool(ids.min() < 0)


def _of_manifest(manifest: RolloutManifest) -> str | None:
    return _of_listed(manifest) or _of_numbers(manifest)


def _of_numbers(manifest: RolloutManifest) -> str | None:
    times = manifest.admitted_s, manifest.started_s, manifest.ended_s
    if not all(map(math.isfinite, times)):
        return f"its times are {', '.join(map(str, times))}"
    reward = getattr(manifest.outcome, "reward", 0.0)
    return None if abs(reward) <= MAX_REWARD else f"its reward is {reward}"  # false for NaN


def _of_listed(manifest: RolloutManifest) -> str | None:
    listed = Counter(entry.call_id for entry in manifest.calls)
    twice = [call_id for call_id, times in listed.items() if times > 1]
    if twice:
        return f"it lists call {twice[0]} twice"
    prefix = f"{manifest.rollout_id}.a{manifest.attempt}.c"
    strange = [c for c in listed if not (c.startswith(prefix) and c.removeprefix(prefix).isdecimal())]
    return f"it lists call {strange[0]}, which is none of its attempt {manifest.attempt}" if strange else None
