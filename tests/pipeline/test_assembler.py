from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, scripts

from clawpipe.pipeline.assembler import Arrival, Assembler
from clawpipe.pipeline.records import (
    AgentFailed,
    CallRecord,
    Infra,
    Role,
    Scored,
    TimedOut,
    VerifierInfra,
    int_bytes,
)
from clawpipe.pipeline.segments import DropReason


def assembler(close_timeout_s=10.0, leaf_cap=16):
    return Assembler(close_timeout_s=close_timeout_s, leaf_cap=leaf_cap)


def two_calls():
    script = Script()
    script.call([1, 2], [3, 4])
    script.call([1, 2, 3, 4, 5], [6])
    return script


def fates(rollout):
    return {fate.call_id[-2:]: (fate.kept, dict(fate.dropped)) for fate in rollout.fates}


def content(rollout):
    return [(p.tokens.tolist(), p.entries.tolist(), p.logprobs.tolist()) for p in rollout.branches], rollout.fates


@given(scripts(roles=(Role.MAIN, Role.COMPACTION)), st.randoms(use_true_random=False))
def test_any_order_and_duplication_closes_the_rollout_once_with_the_same_content(script, random):
    manifest = script.manifest()
    records = [*script.records, manifest, *random.choices([*script.records, manifest], k=3)]
    random.shuffle(records)
    joining = assembler()
    closed = [rollout for record in records for rollout in [joining.add(record, 0.0).rollout] if rollout]
    assert len(closed) == 1
    assert content(closed[0]) == content(script.closed())


def test_a_rollout_closes_with_the_last_of_its_calls():
    script, joining = two_calls(), assembler()
    first, second = script.records
    assert joining.add(script.manifest(), 0.0).arrival is Arrival.NEW
    assert joining.add(second, 0.0).arrival is Arrival.NEW
    verdict = joining.add(first, 0.0)
    arrival, rollout = verdict.arrival, verdict.rollout
    assert arrival is Arrival.NEW
    assert rollout.num_kept == 3
    assert joining.add(first, 0.0).arrival is Arrival.DUPLICATE


def test_the_calls_of_an_attempt_that_died_are_dropped_by_name():
    dead = Script(attempt=1)
    dead.call([1, 2], [9, 9])
    script, joining = Script(attempt=2), assembler()
    script.call([1, 2], [3, 4])
    joining.add(dead.records[0], 0.0)
    joining.add(script.records[0], 0.0)
    rollout = joining.add(script.manifest(), 0.0).rollout
    assert {f.call_id: dict(f.dropped) for f in rollout.fates} == {
        "r-000000-0.a1.c0": {DropReason.LOST_ATTEMPT: 2},
        "r-000000-0.a2.c0": {},
    }
    assert [p.tokens.tolist() for p in rollout.branches] == [[1, 2, 3, 4]]


def test_a_call_that_the_manifest_does_not_list_is_dropped_by_name():
    script, joining = two_calls(), assembler()
    for record in script.records:
        joining.add(record, 0.0)
    rollout = joining.add(script.manifest(listed=[script.records[0].call_id]), 0.0).rollout
    assert fates(rollout) == {"c0": (2, {}), "c1": (0, {DropReason.UNLISTED: 1})}


def test_a_manifest_that_waits_too_long_is_dropped_as_incomplete():
    script, joining = two_calls(), assembler(close_timeout_s=10.0)
    joining.add(script.records[0], 0.0)
    joining.add(script.manifest(), 5.0)
    assert joining.expire(15.0) == []
    [rollout] = joining.expire(15.1)
    assert rollout.dropped is DropReason.INCOMPLETE
    assert rollout.detail == "1 of 2 calls never came, r-000000-0.a1.c1 for one"
    assert fates(rollout) == {"c0": (0, {DropReason.INCOMPLETE: 2})}
    assert joining.add(script.records[1], 16.0).arrival is Arrival.LATE
    assert joining.add(script.records[1], 16.0).arrival is Arrival.DUPLICATE


def test_calls_without_a_manifest_never_expire():
    script, joining = two_calls(), assembler(close_timeout_s=1.0)
    joining.add(script.records[0], 0.0)
    assert joining.expire(1e9) == []
    assert joining.without_manifest == ("r-000000-0",)


@pytest.mark.parametrize(
    ("outcome", "reason", "detail"),
    [
        (Infra(boundary="sandbox", message="no space"), DropReason.INFRA, "sandbox: no space"),
        (VerifierInfra(message="killed"), DropReason.VERIFIER_INFRA, "killed"),
        (Scored(reward=float("nan")), DropReason.MALFORMED, "its reward is nan"),
    ],
)
def test_what_was_not_graded_trains_nothing(outcome, reason, detail):
    rollout = two_calls().closed(outcome)
    assert (rollout.dropped, rollout.detail, rollout.branches) == (reason, detail, ())
    assert fates(rollout) == {"c0": (0, {reason: 2}), "c1": (0, {reason: 1})}


@pytest.mark.parametrize("outcome", [TimedOut(reward=0.25), AgentFailed(reward=0.25, message="exit 1")])
def test_what_timed_out_or_failed_by_itself_is_graded_and_trained(outcome):
    rollout = two_calls().closed(outcome)
    assert (rollout.dropped, rollout.reward, rollout.num_kept) == (None, 0.25, 3)


def test_records_that_contradict_each_other_drop_the_rollout_with_what_is_wrong():
    script = two_calls()
    script.records[1] = msgspec.structs.replace(script.records[1], logprobs=b"")
    rollout = script.closed()
    assert rollout.dropped is DropReason.MALFORMED
    assert "c1: 5 prompt tokens, 1 sampled tokens, 0 logprobs" in rollout.detail


def test_a_parent_of_another_attempt_is_missing():
    dead = Script(attempt=1)
    dead.call([1, 2], [3])
    script = Script(attempt=2, records=[], texts=dict(dead.texts))
    script.call([1, 2, 3, 4], [5])
    rollout = script.closed(listed=["r-000000-0.a2.c0"])
    assert rollout.dropped is DropReason.MALFORMED
    assert "its parent r-000000-0.a1.c0 is missing" in rollout.detail


def test_a_rollout_of_nothing_but_auxiliary_calls_has_nothing_to_train():
    script = Script()
    script.call([1], [2, 3], role=Role.TITLE)
    rollout = script.closed()
    assert rollout.dropped is DropReason.NO_TOKENS
    assert fates(rollout) == {"c0": (0, {DropReason.AUXILIARY_TITLE: 2})}


def test_a_rollout_without_calls_has_nothing_to_train():
    assert Script().closed().dropped is DropReason.NO_TOKENS


def test_a_rollout_over_the_leaf_cap_is_dropped_whole():
    script = Script()
    for leaf in range(3):
        script.call([leaf], [9])
    assert script.closed(leaf_cap=3).dropped is None
    assert script.closed(leaf_cap=2).dropped is DropReason.OVER_BRANCHED


def test_the_first_manifest_of_a_rollout_counts():
    script, joining = two_calls(), assembler()
    joining.add(script.manifest(Scored(reward=0.5)), 0.0)
    again = msgspec.structs.replace(script.manifest(Scored(reward=1.0)), attempt=2)
    assert joining.add(again, 0.0).arrival is Arrival.DUPLICATE
    joining.add(script.records[0], 0.0)
    rollout = joining.add(script.records[1], 0.0).rollout
    assert rollout.reward == 0.5


def test_a_rollout_given_up_names_the_calls_that_came_of_it():
    script, joining = two_calls(), assembler()
    joining.add(script.records[0], 0.0)
    [fate] = joining.abandon("r-000000-0", DropReason.LOST)
    assert (fate.call_id, dict(fate.dropped)) == (script.records[0].call_id, {DropReason.LOST: 2})
    assert joining.add(script.records[1], 0.0).arrival is Arrival.LATE


def test_skipped_rollouts_are_not_closed_again():
    script, joining = two_calls(), assembler()
    joining.skip(["r-000000-0"])
    for record in (*script.records, script.manifest()):
        assert joining.add(record, 0.0).arrival is Arrival.DUPLICATE
    joining.caught_up()
    assert joining.add(script.records[0], 0.0).arrival is Arrival.LATE
    assert joining.add(script.records[0], 0.0).arrival is Arrival.DUPLICATE


def test_the_newest_version_is_that_of_a_trained_token():
    script = Script()
    script.call([1, 2], [3], version=4)
    script.call([1, 2, 3, 9], [5], version=6)
    script.call([8], [7], version=9, role=Role.TITLE)
    assert script.closed().newest_version == 6


def test_a_rollouts_bytes_are_never_copied_into_python_numbers():
    record = Script().call([1], [2])
    big = msgspec.structs.replace(record, prompt_delta=int_bytes(range(100_000)), prompt_tokens=100_000)
    rollout = Script(records=[big]).closed()
    assert isinstance(big, CallRecord)
    assert rollout.branches[0].tokens.nbytes == 4 * 100_001
