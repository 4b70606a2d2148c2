from __future__ import annotations

import msgspec
import numpy as np
import pytest
from pipeline_scripts import Script

from clawpipe.pipeline.records import (
    AgentFailed,
    CallEntry,
    Infra,
    Scored,
    TimedOut,
    VersionSpan,
    float_bytes,
    int_bytes,
)
from clawpipe.pipeline.soundness import problem


def second_call():
    script = Script()
    script.call([1, 2], [3])
    return script.call([1, 2, 3, 4], [5, 6])


def span(start, end, version=0):
    return VersionSpan(version=version, start=start, end=end)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"versions": (span(0, 1, 2**31 - 1), span(1, 2, 3))},
        {"versions": (span(0, 0), span(0, 2))},
        {"logprobs": float_bytes([0.0, 1e-7])},  # a float32 log-softmax rounds
        {"logprobs": float_bytes([-0.0, -9999.0])},
        {"completion_ids": b"", "logprobs": b"", "versions": ()},
        {"prompt_delta": b"", "prompt_tokens": 3},
        {"parent": None, "parent_tokens": 0, "prompt_delta": int_bytes([9]), "prompt_tokens": 1},
    ],
)
def test_a_record_that_the_proxy_may_write_is_sound(changes):
    assert problem(msgspec.structs.replace(second_call(), **changes)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attempt": 0}, "its attempt is 0, and attempts count from 1"),
        ({"attempt": 2}, "its id is r-000000-0.a1.c1, but its attempt and index make it r-000000-0.a2.c1"),
        ({"index": 2}, "its id is r-000000-0.a1.c1, but its attempt and index make it r-000000-0.a1.c2"),
        (
            {"index": -1, "call_id": "r-000000-0.a1.c-1"},
            "its id is r-000000-0.a1.c-1, but its attempt and index make it r-000000-0.a1.c-1",
        ),
        ({"completion_ids": b"\0\0\0"}, "an array's bytes are no multiple of 4"),
        ({"prompt_tokens": 3}, "prompt of 3 tokens, but 3 + 1 recorded"),
        ({"prompt_delta": b""}, "prompt of 4 tokens, but 3 + 0 recorded"),
        ({"logprobs": float_bytes([-1.0])}, "4 prompt tokens, 2 sampled tokens, 1 logprobs"),
        (
            {"parent": None, "parent_tokens": 0, "prompt_delta": b"", "prompt_tokens": 0},
            "0 prompt tokens, 2 sampled tokens, 2 logprobs",
        ),
        ({"versions": ()}, "its version spans do not cover its 2 sampled tokens"),
        ({"versions": (span(0, 3),)}, "its version spans do not cover its 2 sampled tokens"),
        ({"versions": (span(0, 1), span(0, 2))}, "its version spans do not cover its 2 sampled tokens"),
        ({"versions": (span(0, 3), span(3, 2))}, "its version spans do not cover its 2 sampled tokens"),
        ({"versions": (span(0, 2, -1),)}, "it has a weight version outside 0..2147483647"),
        ({"versions": (span(0, 2, 2**31),)}, "it has a weight version outside 0..2147483647"),
        ({"parent": None}, "takes 3 tokens from a parent and names none"),
        ({"parent_tokens": -1, "prompt_tokens": 0}, "0 prompt tokens, 2 sampled tokens, 2 logprobs"),
        (
            {"parent_tokens": -1, "prompt_tokens": 1, "prompt_delta": int_bytes([1, 2])},
            "takes -1 tokens from its parent",
        ),
        ({"parent": "r-000000-0.a1.c1"}, "it is its own parent"),
        ({"prompt_delta": int_bytes([-1])}, "it has negative token ids"),
        ({"completion_ids": int_bytes([5, -6])}, "it has negative token ids"),
        ({"logprobs": float_bytes([-1.0, np.nan])}, "it has a logprob that is not finite or above 0"),
        ({"logprobs": float_bytes([np.inf, -1.0])}, "it has a logprob that is not finite or above 0"),
        ({"logprobs": float_bytes([-np.inf, -1.0])}, "it has a logprob that is not finite or above 0"),
        ({"logprobs": float_bytes([0.01, -1.0])}, "it has a logprob that is not finite or above 0"),
    ],
)
def test_a_record_that_contradicts_itself_is_told_so(changes, message):
    assert problem(msgspec.structs.replace(second_call(), **changes)) == message


def listing(*call_ids, attempt=1):
    entries = tuple(CallEntry(call_id=call_id, delivered=True) for call_id in call_ids)
    return msgspec.structs.replace(Script(attempt=attempt).manifest(), calls=entries)


@pytest.mark.parametrize(
    "manifest",
    [
        listing(),
        listing("r-000000-0.a1.c0", "r-000000-0.a1.c12"),
        listing("r-000000-0.a3.c7", attempt=3),
        Script().manifest(Infra(boundary="sandbox", message="no space")),
        Script().manifest(Scored(reward=-1e30)),
    ],
)
def test_a_manifest_of_its_own_calls_is_sound(manifest):
    assert problem(manifest) is None


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (listing("r-000000-0.a1.c0", "r-000000-0.a1.c1", "r-000000-0.a1.c0"), "it lists call r-000000-0.a1.c0 twice"),
        (listing("r-000000-0.a2.c0"), "it lists call r-000000-0.a2.c0, which is none of its attempt 1"),
        (listing("r-000000-1.a1.c0"), "it lists call r-000000-1.a1.c0, which is none of its attempt 1"),
        (listing("7"), "it lists call 7, which is none of its attempt 1"),
        (listing(attempt=0), "its attempt is 0, and attempts count from 1"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_told_so(manifest, message):
    assert problem(manifest) == message


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (Script().manifest(Scored(reward=np.nan)), "its reward is nan"),
        (Script().manifest(TimedOut(reward=-np.inf)), "its reward is -inf"),
        (Script().manifest(AgentFailed(reward=1.1e30, message="")), "its reward is 1.1e+30"),
        (msgspec.structs.replace(Script().manifest(), started_s=np.nan), "its times are 0.0, nan, 3.0"),
        (msgspec.structs.replace(Script().manifest(), ended_s=np.inf), "its times are 0.0, 1.0, inf"),
        (msgspec.structs.replace(Script().manifest(), admitted_s=-np.inf), "its times are -inf, 1.0, 3.0"),
    ],
)
def test_a_manifest_with_numbers_that_no_sum_can_take_is_told_so(manifest, message):
    assert problem(manifest) == message
