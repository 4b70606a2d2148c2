from __future__ import annotations

from dataclasses import replace

from msgspec import structs
from pipeline_scripts import Script, simple

from clawpipe.pipeline.replay import ReadyGroup, Replay


def group(number, *, versions=(0, 0), tokens=3, harness="loop"):
    rollouts = tuple(
        simple(f"r-{number:06d}-{place}", float(place), version=version, tokens=tokens)
        for place, version in enumerate(versions)
    )
    rollouts = tuple(replace(r, manifest=structs.replace(r.manifest, harness=harness)) for r in rollouts)
    return ReadyGroup(f"g-{number:06d}", number, 0, rollouts)


def replay(**limits):
    plain = {"capacity_tokens": 10**6, "capacity_rollouts": 10**6, "max_staleness": 2, "groups_per_step": 2}
    return Replay(**{**plain, **limits})


def taken(queue, version=0, awaited=()):
    return [g.number for g in queue.take(version, awaited).groups]


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
    assert [(key, r.rollout_id) for key, r in found.stale] == [
        ("g-000001", "r-000001-0"),
        ("g-000001", "r-000001-1"),
    ]


def test_a_stale_rollout_leaves_its_group_and_the_others_stay():
    queue = replay(groups_per_step=1)
    queue.put(group(1, versions=(0, 3)))
    found = queue.take(3)
    assert [r.rollout_id for r in found.groups[0].rollouts] == ["r-000001-1"]
    assert len(found.stale) == 1


def test_a_rollout_with_one_fresh_token_is_not_stale():
    script = Script("r-000001-0")
    script.call([1], [2], version=0)
    script.call([1, 2, 3], [4], version=6)
    queue = replay(groups_per_step=1)
    queue.put(ReadyGroup("g-000001", 1, 0, (script.closed(),)))
    assert taken(queue, version=8) == [1]


def test_the_stale_are_evicted_even_when_too_little_is_left_for_a_batch():
    queue = replay()
    queue.put(group(1))
    queue.put(group(2, versions=(9, 9)))
    found = queue.take(9)
    assert (len(found.groups), len(found.stale)) == (0, 2)
    assert queue.num_groups == 1


def test_full_means_by_tokens_or_by_rollouts():
    for limits in ({"capacity_tokens": 20}, {"capacity_rollouts": 4}):
        queue = replay(**limits)
        queue.put(group(1))
        assert not queue.full
        queue.put(group(2))  # 2 groups of 2 rollouts of 5 tokens
        assert queue.full
        queue.take(0)
        assert not queue.full


def test_a_queue_without_a_batch_is_never_full_lest_nothing_ever_move_again():
    queue = replay(capacity_tokens=1)
    queue.put(group(1, tokens=1000))
    assert not queue.full


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
    assert not queue.full
    queue.put(group(4, harness="slow"))
    assert queue.full
