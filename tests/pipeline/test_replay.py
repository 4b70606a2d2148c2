from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pipeline_scripts import Script, simple

from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import Role
from clawpipe.pipeline.replay import ReadyGroup, Replay
from clawpipe.pipeline.segments import DropReason, Part


@cache
def group(number, *, versions=(0, 0), tokens=3, harness="loop", uses=0):
    rollouts = tuple(
        simple(f"r-{number:06d}-{place}", float(place), version=version, tokens=tokens)
        for place, version in enumerate(versions)
    )
    rollouts = tuple(replace(r, manifest=structs.replace(r.manifest, harness=harness)) for r in rollouts)
    return ReadyGroup(f"g-{number:06d}", number, 0, rollouts, uses)


def replay(**limits):
    plain = {"capacity_tokens": 10**6, "capacity_rollouts": 10**6, "max_staleness": 2, "groups_per_step": 2}
    return Replay(**{**plain, **limits})


def taken(queue, version=0, awaited=(), head=None):
    return [g.number for g in queue.take(version, awaited, head).groups]


def test_the_oldest_groups_by_admission_are_taken_first_whenever_they_came():
    queue = replay()
    for number in (5, 2, 9, 1):
        queue.put(group(number))
    assert taken(queue) == [1, 2]
    assert taken(queue) == [5, 9]
    assert taken(queue) == []


def test_too_few_groups_give_nothing_and_stay():
    queue = replay()
    queue.put(group(1))
    assert taken(queue) == []
    assert queue.num_groups == 1


def test_time_in_the_queue_counts_as_staleness():
    queue = replay(groups_per_step=1)
    queue.put(group(1, versions=(5, 5)))
    queue.put(group(2, versions=(6, 7)))
    found = queue.take(8)  # 5 is three behind, 6 two
    assert [g.number for g in found.groups] == [2]
    assert [(key, r.rollout_id, reason) for key, r, reason in found.dropped] == [
        ("g-000001", "r-000001-0", DropReason.STALE),
        ("g-000001", "r-000001-1", DropReason.STALE),
    ]


def test_a_stale_rollout_leaves_its_group_and_the_others_stay():
    queue = replay(groups_per_step=1)
    queue.put(group(1, versions=(0, 3)))
    found = queue.take(3)
    assert [r.rollout_id for r in found.groups[0].rollouts] == ["r-000001-1"]
    assert [(r.rollout_id, reason) for _, r, reason in found.dropped] == [("r-000001-0", DropReason.STALE)]


def test_a_group_that_staleness_leaves_too_small_goes_whole_and_says_why():
    queue = replay(groups_per_step=1, min_group=2)
    queue.put(group(1, versions=(0, 3, 0, 4)))
    queue.put(group(2, versions=(0, 3, 0)))
    found = queue.take(4)
    assert [[r.rollout_id for r in g.rollouts] for g in found.groups] == [["r-000001-1", "r-000001-3"]]
    assert [(r.rollout_id, reason) for _, r, reason in found.dropped] == [
        ("r-000001-0", DropReason.STALE),
        ("r-000001-2", DropReason.STALE),
        ("r-000002-0", DropReason.STALE),
        ("r-000002-2", DropReason.STALE),
        ("r-000002-1", DropReason.SMALL_GROUP),
    ]
    assert (queue.num_groups, queue.num_rollouts, queue.num_tokens) == (0, 0, 0)


def test_a_rollout_with_one_fresh_token_is_not_stale():
    script = Script("r-000001-0")
    script.call([1], [2], version=0)
    script.call([1, 2, 3], [4], version=6)
    queue = replay(groups_per_step=1)
    queue.put(ReadyGroup("g-000001", 1, 0, (script.closed(),)))
    assert taken(queue, version=8) == [1]


def test_a_rollout_of_a_version_that_the_learner_has_not_made_leaves_its_group():
    queue = replay(groups_per_step=1)
    queue.put(group(1, versions=(4, 3, 2**31 - 1)))
    found = queue.take(3)
    assert [r.rollout_id for r in found.groups[0].rollouts] == ["r-000001-1"]
    assert [(r.rollout_id, reason) for _, r, reason in found.dropped] == [
        ("r-000001-0", DropReason.MALFORMED),
        ("r-000001-2", DropReason.MALFORMED),
    ]


def test_the_stale_are_evicted_even_when_too_little_is_left_for_a_batch():
    queue = replay()
    queue.put(group(1))
    queue.put(group(2, versions=(9, 9)))
    found = queue.take(9)
    assert (len(found.groups), len(found.dropped)) == (0, 2)
    assert queue.num_groups == 1


def test_full_means_by_tokens_or_by_rollouts():
    for limits in ({"capacity_tokens": 20}, {"capacity_rollouts": 4}):
        queue = replay(**limits)
        queue.put(group(1))
        assert not queue.full()
        queue.put(group(2))  # 2 groups of 2 rollouts of 5 tokens
        assert queue.full()
        queue.take(0)
        assert not queue.full()


def test_a_queue_without_a_batch_is_never_full_lest_nothing_ever_move_again():
    queue = replay(capacity_tokens=1)
    queue.put(group(1, tokens=1000))
    assert not queue.full()


def test_every_batch_has_each_harness_share_even_of_one_that_is_slow():
    queue = replay(shares={"quick": 1, "slow": 1})
    for number in (1, 2, 3):
        queue.put(group(number, harness="quick"))
    assert taken(queue, awaited={"quick", "slow"}) == []
    queue.put(group(4, harness="slow"))
    assert taken(queue, awaited={"quick", "slow"}) == [1, 4]
    assert [g.number for g in queue.groups] == [2, 3]


def test_a_share_of_which_nothing_runs_any_more_is_filled_with_the_oldest_others():
    queue = replay(shares={"quick": 1, "slow": 1})
    for number in (1, 2, 3):
        queue.put(group(number, harness="quick"))
    assert taken(queue, awaited={"quick"}) == [1, 2]


def test_what_no_share_asks_for_goes_by_age():
    queue = replay(groups_per_step=3, shares={"a": 1, "b": 1, "c": 0})
    for number, harness in enumerate("aaccb"):
        queue.put(group(number, harness=harness))
    assert taken(queue) == [0, 1, 4]


def test_a_queue_that_waits_for_a_share_is_never_full():
    queue = replay(capacity_rollouts=4, shares={"quick": 1, "slow": 1})
    for number in (1, 2, 3):
        queue.put(group(number, harness="quick"))
    assert not queue.full()
    queue.put(group(4, harness="slow"))
    assert queue.full()


def test_what_was_trained_fewest_times_is_taken_first_and_then_the_oldest():
    queue = replay()
    for number, uses in ((1, 2), (2, 1), (3, 1), (4, 0), (5, 2)):
        queue.put(group(number, uses=uses))
    assert [g.number for g in queue.groups] == [4, 2, 3, 1, 5]
    assert taken(queue) == [4, 2]
    queue.put(group(6))
    assert taken(queue) == [6, 3]
    assert taken(queue) == [1, 5]


def test_a_share_takes_its_groups_by_uses_too():
    queue = replay(groups_per_step=3, shares={"slow": 1, "quick": 1})
    queue.put(group(1, harness="slow", uses=1))
    queue.put(group(2, harness="quick"))
    queue.put(group(3, harness="quick"))
    queue.put(group(4, harness="slow"))
    assert taken(queue) == [2, 3, 4]
    assert [g.number for g in queue.groups] == [1]


def test_nothing_that_is_a_window_ahead_of_the_oldest_running_group_is_taken():
    queue = replay(window_groups=3)
    for number in (5, 7, 8):
        queue.put(group(number))
    assert taken(queue, head=4) == []  # 4, which runs, 5 and 6 are within reach
    assert taken(queue, head=5) == [5, 7]  # 5, 6 and 7 are


def test_a_window_opens_when_its_head_is_done_and_wholly_when_nothing_runs():
    queue = replay(window_groups=2)
    for number in (3, 4, 30, 90):
        queue.put(group(number))
    assert taken(queue, head=2) == []
    assert taken(queue, head=7) == [3, 4]
    assert taken(queue, head=7) == []
    assert taken(queue) == [30, 90]


def test_a_lone_old_group_does_not_hold_the_window_back_for_good():
    # 1 to 63 are trained or dropped, and nothing that runs can come before 64: 0 gets its company from there.
    queue = replay(window_groups=64)
    queue.put(group(0))
    queue.put(group(100))
    assert taken(queue, head=64) == [0, 100]


def test_without_a_window_the_oldest_are_taken_however_long_another_runs():
    queue = replay()
    queue.put(group(500))
    queue.put(group(600))
    assert taken(queue, head=0) == [500, 600]


def test_a_queue_that_waits_for_the_head_of_its_window_is_never_full():
    queue = replay(capacity_rollouts=2, window_groups=2)
    for number in (3, 4, 5):
        queue.put(group(number))
    assert not queue.ready(head=2)
    assert not queue.full(head=2)
    assert queue.ready(head=3)
    assert queue.full(head=3)
    assert queue.full()


def test_a_share_that_lies_beyond_the_window_is_waited_for():
    queue = replay(window_groups=4, shares={"a": 1, "b": 1})
    for number, harness in ((1, "a"), (2, "a"), (7, "b")):
        queue.put(group(number, harness=harness))
    assert taken(queue, awaited={"a"}, head=0) == []  # 0 is of harness a, but when it is done, 7 is within reach
    assert taken(queue, awaited={"a"}, head=4) == [1, 7]


def test_a_group_cannot_be_queued_twice():
    queue = replay()
    queue.put(group(1))
    with pytest.raises(AssertionError, match="g-000001 is in the queue already"):
        queue.put(group(1, uses=1))
    assert queue.remove("g-000001").uses == 0
    assert queue.remove("g-000001") is None
    queue.put(group(1, uses=1))


def test_a_take_does_not_look_at_every_token_again():
    # A put reads every version once; if a take did so too, it would last as long as all the puts together.
    token = np.zeros(20_000, np.int32)
    branches = (Branch(tokens=token, entries=token, logprobs=np.zeros(20_000, np.float32), versions=token),) * 8
    rollouts = tuple(replace(r, parts=(Part(Role.MAIN, branches),)) for r in group(0).rollouts * 4)
    queue = replay(groups_per_step=8)
    began_s = time.perf_counter()
    for number in range(500):
        queue.put(ReadyGroup(f"g-{number:06d}", number, 0, rollouts))
    put_s = time.perf_counter() - began_s
    assert [g.number for g in queue.take(2).groups] == list(range(8))
    take_s = time.perf_counter() - began_s - put_s
    assert take_s < put_s / 5


HARNESSES = ("a", "b", "c")


windows = st.integers(3, 8)


@st.composite
def queues(draw):
    """A queue of up to twelve groups and the limits of it."""
    step = draw(st.integers(1, 3))
    shares = dict(zip(HARNESSES, draw(st.sampled_from([(0, 0, 0), (1, 0, 0), (1, step - 1, 0)])), strict=True))
    limits = {
        "capacity_rollouts": draw(st.integers(1, 12)),
        "max_staleness": draw(st.integers(0, 3)),
        "groups_per_step": step,
        "min_group": draw(st.integers(1, 3)),
        "window_groups": draw(st.none() | windows),
        "shares": shares,
    }
    numbers = draw(st.lists(st.integers(0, 20), max_size=12, unique=True))
    return limits, [
        group(
            number,
            versions=tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))),
            harness=draw(st.sampled_from(HARNESSES)),
            uses=draw(st.integers(0, 2)),
        )
        for number in numbers
    ]


def reference_evictions(limits, groups, version):
    """What stays (id -> rollout ids) and what goes (rollout id -> reason), group by group."""
    stays, goes = {}, {}
    for each in groups:
        newest = {r.rollout_id: max(int(v) for b in r.branches for v in b.versions) for r in each.rollouts}
        fresh = [name for name in newest if 0 <= version - newest[name] <= limits["max_staleness"]]
        goes |= {name: DropReason.MALFORMED for name in newest if newest[name] > version}
        goes |= {name: DropReason.STALE for name in newest if version - newest[name] > limits["max_staleness"]}
        if len(fresh) >= limits["min_group"]:
            stays[each.group_id] = fresh
        else:
            goes |= dict.fromkeys(fresh, DropReason.SMALL_GROUP)
    return stays, goes


def reference_batch(limits, groups, awaited, head):
    """The numbers of the batch, each harness's list on its own."""
    window = limits["window_groups"]
    reach = [g for g in groups if window is None or head is None or g.number - head < window]
    line = sorted(reach, key=lambda g: (g.uses, g.number))
    to_come = set(awaited) | {g.harness for g in groups if g not in reach}
    picked = []
    for harness, share in limits["shares"].items():
        mine = [g for g in line if g.harness == harness]
        if len(mine) < share and harness in to_come:
            return []
        picked += mine[:share]
    rest = [g for g in line if g not in picked]
    picked += rest[: limits["groups_per_step"] - len(picked)]
    return sorted(g.number for g in picked) if len(picked) == limits["groups_per_step"] else []


@given(queues(), st.integers(2, 7), st.sets(st.sampled_from(HARNESSES)), st.none() | st.integers(0, 20))
def test_a_take_is_what_a_plain_reading_of_the_rules_gives(drawn, version, awaited, head):
    limits, groups = drawn
    queue = replay(**limits)
    for each in groups:
        queue.put(each)
    stays, goes = reference_evictions(limits, groups, version)
    left = [g for g in groups if g.group_id in stays]
    expected = reference_batch(limits, left, awaited, head)
    found = queue.take(version, awaited, head)
    assert {r.rollout_id: reason for _, r, reason in found.dropped} == goes
    assert len(found.dropped) == len(goes)
    assert sorted(g.number for g in found.groups) == expected
    held = (*found.groups, *queue.groups)
    assert {g.group_id: [r.rollout_id for r in g.rollouts] for g in held} == stays
    assert len(held) == len(stays)
    assert queue.num_rollouts == sum(len(g.rollouts) for g in queue.groups)
    assert queue.num_tokens == sum(g.num_tokens for g in queue.groups)


@given(queues(), st.sets(st.sampled_from(HARNESSES)), st.none() | st.integers(0, 20))
def test_a_queue_is_full_only_when_it_has_a_batch_whatever_is_awaited(drawn, awaited, head):
    limits, groups = drawn
    queue = replay(**limits | {"max_staleness": 4, "min_group": 1})
    for each in groups:
        queue.put(each)
        if queue.full(head):
            assert queue.num_rollouts >= limits["capacity_rollouts"]
            assert queue.ready(head)
    if queue.full(head):
        assert taken(queue, 4, awaited, head)


@given(queues())
def test_when_nothing_runs_any_more_every_batch_that_can_be_made_is_made(drawn):
    limits, groups = drawn
    queue = replay(**limits | {"max_staleness": 4, "min_group": 1})
    for each in groups:
        queue.put(each)
    step = limits["groups_per_step"]
    batches = [taken(queue, 4) for _ in range(len(groups) // step)]
    assert [len(batch) for batch in batches] == [step] * (len(groups) // step)
    assert queue.num_groups == len(groups) % step


PICKS = {"newest": lambda dice, numbers: max(numbers), "any": lambda dice, numbers: dice.choice(sorted(numbers))}


@given(queues(), windows, st.integers(1, 3), st.sampled_from(sorted(PICKS)), st.integers(0, 10**6))
def test_every_run_goes_on_as_long_as_open_groups_are_completed(drawn, window, max_uses, pick, seed):
    """Scheduler, assembler and learner in small, with credits for two steps: groups are completed in any order or
    the newest first, a quarter of them empty, none while the queue is full; trained groups come back for more,
    without credits."""
    limits, _ = drawn
    step = limits["groups_per_step"]
    queue = replay(**limits | {"min_group": 1, "window_groups": window})
    dice, running, next_number, version = Random(seed), {}, 0, 0
    for _ in range(400):
        while len(running) + sum(not g.uses for g in queue.groups) < 2 * step:
            running[next_number] = dice.choice(HARNESSES)
            next_number += 1
        head = min(running, default=None)
        batch = queue.take(version, set(running.values()), head).groups
        if batch:
            assert head is None or max(g.number for g in batch) < head + window
            version += 1
            for each in batch:
                if each.uses + 1 < max_uses:
                    queue.put(replace(each, uses=each.uses + 1))
        elif running:  # else staleness has emptied the queue, and there is room for new groups
            assert not queue.full(head)
            done = PICKS[pick](dice, running)
            harness = running.pop(done)
            if dice.random() < 0.75:
                queue.put(group(done, versions=(version,), harness=harness))
        if version == 6:
            return
    raise AssertionError(f"{version} batches of {next_number} groups")
