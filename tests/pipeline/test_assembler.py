from __future__ import annotations

import time
from itertools import permutations

import msgspec
import pytest
from pipeline_scripts import Script

from clawpipe.pipeline.assembler import Arrival, Assembler
from clawpipe.pipeline.config import LeafQuantile
from clawpipe.pipeline.leaf_caps import LeafCaps
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


def assembler(close_timeout_s=10.0, leaf_cap=16, auxiliary=False):
    return Assembler(close_timeout_s=close_timeout_s, leaf_caps=LeafCaps(leaf_cap), auxiliary=auxiliary)


def two_calls():
    script = Script()
    script.call([1, 2], [3, 4])
    script.call([1, 2, 3, 4, 5], [6])
    return script


def fates(rollout):
    return {fate.call_id[-2:]: (fate.kept, dict(fate.dropped)) for fate in rollout.fates}


def content(rollout):
    return [(p.tokens.tolist(), p.entries.tolist(), p.logprobs.tolist()) for p in rollout.branches], rollout.fates


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
    greedy = msgspec.structs.replace(script.records[1], parent_tokens=5, prompt_tokens=6)
    script.records[1] = greedy
    rollout = script.closed()
    assert rollout.dropped is DropReason.MALFORMED
    assert rollout.detail == "call r-000000-0.a1.c1: takes 5 tokens from a parent that has 4"
    assert (rollout.tree_digest, rollout.leaf_cap, rollout.orphans) == ("", 0, ())


def test_a_parent_of_another_attempt_is_missing():
    dead = Script(attempt=1)
    dead.call([1, 2], [3])
    script = Script(attempt=2, records=[], texts=dict(dead.texts))
    script.call([1, 2, 3, 4], [5])
    rollout = script.closed(listed=["r-000000-0.a2.c0"])
    assert rollout.dropped is DropReason.MALFORMED
    assert "its parent r-000000-0.a1.c0 is missing" in rollout.detail
    assert rollout.orphans == (script.records[0],)


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


def attempts(*, lower_first):
    scripts = [Script(attempt=1), Script(attempt=2)]
    for script in scripts:
        script.call([1, 2], [3])
    manifests = [script.manifest(Scored(reward=script.attempt / 4)) for script in scripts]
    return scripts, manifests if lower_first else manifests[::-1]


@pytest.mark.parametrize("lower_first", [True, False])
def test_of_two_attempts_manifests_the_earlier_attempts_counts(lower_first):
    scripts, manifests = attempts(lower_first=lower_first)
    joining = assembler()
    arrivals = [joining.add(manifest, 0.0).arrival for manifest in manifests]
    assert arrivals == [Arrival.NEW, Arrival.DUPLICATE if lower_first else Arrival.NEW]
    assert joining.add(scripts[1].records[0], 0.0).rollout is None
    rollout = joining.add(scripts[0].records[0], 0.0).rollout
    assert (rollout.manifest.attempt, rollout.reward) == (1, 0.25)
    assert [dict(fate.dropped) for fate in rollout.fates] == [{}, {DropReason.LOST_ATTEMPT: 1}]


def test_another_attempts_manifest_after_the_end_changes_nothing():
    scripts, manifests = attempts(lower_first=True)
    joining = assembler()
    joining.add(scripts[0].records[0], 0.0)
    assert joining.add(manifests[0], 0.0).rollout.num_kept == 1
    verdict = joining.add(manifests[1], 0.0)
    assert (verdict.arrival, verdict.rollout) == (Arrival.DUPLICATE, None)


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


def unsound(record):
    return msgspec.structs.replace(record, logprobs=b"")


def altered(record):
    return msgspec.structs.replace(record, completion_ids=int_bytes([9] * (len(record.completion_ids) // 4)))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_record_that_contradicts_itself_drops_its_rollout_in_any_order(order):
    script, joining = two_calls(), assembler()
    records = [script.records[0], unsound(script.records[1]), script.manifest()]
    verdicts = {n: joining.add(records[n], 0.0) for n in order}
    assert verdicts[1].arrival is Arrival.UNSOUND
    assert verdicts[1].detail == "5 prompt tokens, 1 sampled tokens, 0 logprobs"
    rollout = verdicts[order[2]].rollout
    assert rollout.dropped is DropReason.MALFORMED
    assert rollout.detail == "r-000000-0.a1.c1: 5 prompt tokens, 1 sampled tokens, 0 logprobs"
    assert fates(rollout) == {"c0": (0, {DropReason.MALFORMED: 2})}
    assert [verdict.rollout for verdict in verdicts.values()].count(None) == 2


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_two_copies_of_a_call_that_differ_drop_the_rollout_in_any_order(order):
    script, joining = two_calls(), assembler()
    first, second = script.records
    records = [first, second, altered(second)]
    verdicts = {n: joining.add(records[n], 0.0) for n in order}
    earlier, later = (n for n in order if n)
    assert verdicts[earlier].arrival is Arrival.NEW
    assert verdicts[later].arrival is Arrival.CONFLICTING
    assert verdicts[later].detail == "it came before, with another content"
    rollout = joining.add(script.manifest(), 0.0).rollout
    assert rollout.dropped is DropReason.MALFORMED
    assert rollout.detail == "r-000000-0.a1.c1: it came before, with another content"
    assert fates(rollout) == {"c0": (0, {DropReason.MALFORMED: 2}), "c1": (0, {DropReason.MALFORMED: 1})}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_record_that_cannot_be_read_drops_its_rollout_in_any_order(order):
    script, joining = two_calls(), assembler()
    second = script.records[1].call_id
    steps = [
        lambda: joining.add(script.records[0], 0.0).rollout,
        lambda: joining.spoil("r-000000-0", second),
        lambda: joining.add(script.manifest(), 0.0).rollout,
    ]
    closed = [steps[n]() for n in order]
    assert closed[:2] == [None, None]
    assert closed[2].dropped is DropReason.MALFORMED
    assert closed[2].detail == "r-000000-0.a1.c1: a record of it came that cannot be read"
    assert joining.spoil("r-000000-0", second) is None


def test_a_good_copy_after_a_bad_one_is_new_and_does_not_save_the_rollout():
    script, joining = two_calls(), assembler()
    joining.add(unsound(script.records[1]), 0.0)
    assert joining.add(script.records[1], 0.0).arrival is Arrival.NEW
    joining.add(script.records[0], 0.0)
    rollout = joining.add(script.manifest(), 0.0).rollout
    assert fates(rollout) == {"c0": (0, {DropReason.MALFORMED: 2}), "c1": (0, {DropReason.MALFORMED: 1})}


def test_an_equal_copy_of_a_bad_record_is_a_duplicate():
    script, joining = two_calls(), assembler()
    first, second = script.records
    arrivals = [
        joining.add(record, 0.0).arrival
        for record in (unsound(first), unsound(first), second, altered(second), altered(second))
    ]
    assert arrivals == [
        Arrival.UNSOUND,
        Arrival.DUPLICATE,
        Arrival.NEW,
        Arrival.CONFLICTING,
        Arrival.DUPLICATE,
    ]


def test_a_bad_record_of_an_attempt_that_died_does_not_touch_the_next():
    dead = Script(attempt=1)
    dead.call([1, 2], [9])
    script, joining = Script(attempt=2), assembler()
    script.call([1, 2], [3, 4])
    assert joining.add(unsound(dead.records[0]), 0.0).arrival is Arrival.UNSOUND
    joining.spoil("r-000000-0", "r-000000-0.a1.c1")
    joining.add(script.records[0], 0.0)
    rollout = joining.add(script.manifest(), 0.0).rollout
    assert (rollout.dropped, rollout.num_kept) == (None, 2)


def test_bad_records_after_the_end_are_named_and_change_nothing():
    script, joining = two_calls(), assembler()
    for record in script.records:
        joining.add(record, 0.0)
    rollout = joining.add(script.manifest(), 0.0).rollout
    before = content(rollout)
    first, second = script.records
    late = msgspec.structs.replace(second, call_id="r-000000-0.a1.c2", index=2)
    verdicts = [joining.add(record, 0.0) for record in (altered(first), unsound(second), late, altered(late), second)]
    assert [verdict.arrival for verdict in verdicts] == [
        Arrival.CONFLICTING,
        Arrival.UNSOUND,
        Arrival.LATE,
        Arrival.CONFLICTING,
        Arrival.DUPLICATE,
    ]
    assert all(verdict.rollout is None for verdict in verdicts)
    assert (rollout.num_kept, content(rollout)) == (3, before)


def test_bad_records_of_one_rollout_leave_another_alone():
    script, joining = two_calls(), assembler()
    other = Script("r-000000-1")
    other.call([1, 2], [3, 4])
    joining.add(other.records[0], 0.0)
    joining.add(unsound(script.records[0]), 0.0)
    joining.spoil("r-000000-0", "r-000000-0.a1.c1")
    assert joining.add(other.manifest(), 0.0).rollout.num_kept == 2
    assert joining.add(script.manifest(), 0.0).rollout.dropped is DropReason.MALFORMED


def test_two_manifests_of_one_attempt_that_differ_drop_the_rollout():
    script = two_calls()
    one, other = script.manifest(Scored(reward=0.5)), script.manifest(Scored(reward=1.0))
    for first, second in ((one, other), (other, one)):
        joining = assembler()
        assert joining.add(first, 0.0).arrival is Arrival.NEW
        assert joining.add(second, 0.0).arrival is Arrival.CONFLICTING
        joining.add(script.records[0], 0.0)
        rollout = joining.add(script.records[1], 0.0).rollout
        assert rollout.dropped is DropReason.MALFORMED
        assert rollout.detail == "r-000000-0.a1.manifest: it came before, with another content"
        assert rollout.manifest == one  # whichever came first


def test_a_manifest_that_contradicts_itself_closes_nothing():
    script, joining = two_calls(), assembler()
    joining.add(script.records[0], 0.0)
    joining.add(script.records[1], 0.0)
    strange = script.manifest(listed=["r-000000-1.a1.c0"])
    verdict = joining.add(strange, 0.0)
    assert (verdict.arrival, verdict.rollout) == (Arrival.UNSOUND, None)
    assert verdict.detail == "it lists call r-000000-1.a1.c0, which is none of its attempt 1"
    assert joining.without_manifest == ("r-000000-0",)


def test_infrastructure_comes_before_what_is_wrong_with_the_records():
    script, joining = two_calls(), assembler()
    joining.add(unsound(script.records[0]), 0.0)
    joining.add(script.records[1], 0.0)
    rollout = joining.add(script.manifest(Infra(boundary="sandbox", message="no space")), 0.0).rollout
    assert rollout.dropped is DropReason.INFRA


def test_records_whose_parent_never_came_are_orphans():
    script, joining = two_calls(), assembler()
    joining.add(script.records[1], 0.0)
    joining.add(script.manifest(), 0.0)
    [rollout] = joining.expire(11.0)
    assert rollout.dropped is DropReason.INCOMPLETE
    assert rollout.orphans == (script.records[1],)


def test_a_record_whose_parent_came_and_is_bad_is_no_orphan():
    script, joining = two_calls(), assembler()
    joining.add(unsound(script.records[0]), 0.0)
    joining.add(script.records[1], 0.0)
    assert joining.add(script.manifest(), 0.0).rollout.orphans == ()


def test_skipped_rollouts_know_bad_records_too():
    script, joining = two_calls(), assembler()
    joining.skip(["r-000000-0"])
    assert joining.add(unsound(script.records[0]), 0.0).arrival is Arrival.DUPLICATE
    assert joining.spoil("r-000000-0", script.records[1].call_id) is None
    joining.caught_up()
    assert joining.add(unsound(script.records[0]), 0.0).arrival is Arrival.UNSOUND


def leafy(rollout_id, leaves):
    script = Script(rollout_id)
    for leaf in range(leaves):
        script.call([leaf], [9])
    return script


def test_a_leaf_cap_follows_what_closed_before_and_is_kept_with_the_rollout():
    caps = LeafCaps(LeafQuantile(quantile=1.0, window_rollouts=16, at_least=1, at_most=5), {"r-000040-0": 4})
    joining = Assembler(close_timeout_s=10.0, leaf_caps=caps, auxiliary=False)

    def closed(number, leaves):
        script = leafy(f"r-{number:06d}-0", leaves)
        for record in script.records:
            joining.add(record, 0.0)
        rollout = joining.add(script.manifest(), 0.0).rollout
        return rollout.leaf_cap, rollout.num_leaves, rollout.dropped

    assert closed(0, 6) == (5, 6, DropReason.OVER_BRANCHED)  # counts all the same
    for number in range(1, 16):
        assert closed(number, 2) == (5, 2, None)
    assert closed(16, 6) == (5, 6, DropReason.OVER_BRANCHED)  # the quantile is 6, the most 5
    for number in range(17, 33):
        assert closed(number, 2)[2] is None
    assert closed(33, 3) == (2, 3, DropReason.OVER_BRANCHED)
    assert closed(40, 4) == (4, 4, None)  # as decided before


def test_auxiliary_calls_have_parts_of_their_own_when_asked_for():
    script = Script()
    script.call([1, 2], [3])
    script.call([5], [6, 7], role=Role.SUBAGENT)
    for auxiliary, roles, num_kept in ((False, [Role.MAIN], 1), (True, [Role.MAIN, Role.SUBAGENT], 3)):
        joining = assembler(auxiliary=auxiliary)
        for record in script.records:
            joining.add(record, 0.0)
        rollout = joining.add(script.manifest(), 0.0).rollout
        assert ([part.role for part in rollout.parts], rollout.num_kept) == (roles, num_kept)
        assert rollout.num_tokens == sum(len(b.tokens) for part in rollout.parts for b in part.branches)


def test_a_rollout_of_sub_agents_alone_is_trained_in_groups_of_their_own():
    script = Script()
    script.call([5], [6, 7], role=Role.SUBAGENT, version=3)
    rollout = script.closed(auxiliary=True)
    assert (rollout.dropped, rollout.branches, rollout.num_kept, rollout.newest_version) == (None, (), 2, 3)


def side_calls(num_calls):
    """Every second call is a short one that shares its first tokens with the end of a long conversation."""
    script = Script()
    whole, last = [1, 2], None
    for turn in range(num_calls // 2):
        whole = [*whole, turn]
        record = script.call(whole, [turn], parent=last, shared=len(whole) - 1)
        script.call([1, 2, 1000 + turn], [5], role=Role.NUDGE, parent=record.call_id, shared=2)
        whole, last = [*whole, turn], record.call_id
    return script


def seconds_of(script):
    arrived = [*reversed(script.records), script.manifest()]
    taken = []
    for _ in range(3):
        joining, start = assembler(), time.process_time()
        closed = [joining.add(record, 0.0).rollout for record in arrived]
        taken.append(time.process_time() - start)
        assert closed[-1].num_kept == len(script.records) // 2
    return min(taken)


def test_the_time_for_a_rollout_grows_with_its_calls_and_not_with_their_square():
    assert seconds_of(side_calls(2400)) < 9 * seconds_of(side_calls(600))  # linear: 4; by the square: 16


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
