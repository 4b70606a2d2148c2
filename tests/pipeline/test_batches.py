from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pipeline_scripts import Script, own, simple

from clawpipe.pipeline.batches import CHUNK_BYTES, Batches, Recipe
from clawpipe.pipeline.credit import grpo, ppo
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import Role, Scored, floats, ints
from clawpipe.pipeline.replay import ReadyGroup, Replay
from clawpipe.pipeline.segments import DropReason, Part


def group(number, rewards, *, version=0, tokens=3, harness="agentloop"):
    rollouts = tuple(
        simple(f"r-{number:06d}-{place}", reward, version=version, tokens=tokens, harness=harness)
        for place, reward in enumerate(rewards)
    )
    return ReadyGroup(f"g-{number:06d}", number, 0, rollouts)


def recipe(**changes):
    plain = {"credit": partial(grpo, eps=0.0), "pack_tokens": 10_000, "align": 1, "max_staleness": 2}
    return Recipe(**{**plain, **changes})


def with_part(rollout, role, first, *, tokens=2, version=0):
    """The rollout with kept tokens `first`, `first` + 1 ... of calls of another role too, after a prompt of one."""
    branch = Branch(
        tokens=np.array([7, *range(first, first + tokens)], np.int32),
        entries=np.arange(1, tokens + 1, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=np.full(tokens, version, np.int32),
    )
    return replace(rollout, parts=(*rollout.parts, Part(role, (branch,))))


def decoded(built):
    return msgspec.msgpack.decode(built.body, type=Batch)


def test_a_batch_holds_every_rollout_with_its_advantage_and_its_own_samples():
    batch = decoded(recipe().build("b", 1, [group(0, [1, 1, 0, 0]), group(1, [2.0, 0.0], harness="x")]))
    assert [row.advantage for row in batch.rollouts] == [1, 1, -1, -1, 1, -1]
    assert [row.num_trainable for row in batch.rollouts] == [3] * 6
    assert [row.harness for row in batch.rollouts] == ["agentloop"] * 4 + ["x"] * 2
    assert batch.version == 1
    [forest] = batch.forests
    tokens = ints(forest.tokens)
    for index, row in enumerate(batch.rollouts):
        mine = ints(forest.entry_rollout) == index
        start = own(row.rollout_id)
        assert tokens[ints(forest.entry_token)[mine]].tolist() == [start, start + 1, start + 2]
        assert floats(forest.entry_logprob)[mine].tolist() == [-1 / 1024, -2 / 1024, -3 / 1024]
    assert len(tokens) == 2 + 6 * 3  # the prompt that all share is there once


def test_groups_without_spread_are_rows_without_entries():
    built = recipe().build("b", 0, [group(0, [0.5, 0.5]), group(1, [1.0]), group(2, [0, 1])])
    batch = decoded(built)
    assert [row.num_trainable for row in batch.rollouts] == [0, 0, 0, 3, 3]
    assert [row.advantage for row in batch.rollouts] == [0, 0, 0, -1, 1]
    assert built.set_aside == {
        "r-000000-0": {DropReason.ZERO_SPREAD: 3},
        "r-000000-1": {DropReason.ZERO_SPREAD: 3},
        "r-000001-0": {DropReason.SINGLE: 3},
    }
    assert built.groups_without_spread == 2
    assert {int(r) for f in batch.forests for r in ints(f.entry_rollout)} == {3, 4}
    assert built.reward_mean == 0.6


def test_staleness_is_that_of_the_tokens_which_the_learner_will_not_mask():
    built = recipe(max_staleness=2).build(
        "b", 5, [group(0, [0, 1], version=5), group(1, [0, 1], version=3), group(2, [0, 1], version=2)]
    )
    assert built.staleness_mean == 1.0  # six tokens of 0, six of 2; those of 3 are over
    assert built.staleness_max == 2
    assert built.set_aside == {name: {DropReason.STALE: 3} for name in ("r-000002-0", "r-000002-1")}
    assert built.num_entries == 18


def test_a_token_from_the_future_is_a_crash_that_names_the_rollout():
    with pytest.raises(AssertionError, match="rollout r-000000-0 has tokens of a version after 3"):
        recipe().build("b", 3, [group(0, [0, 1], version=4)])


def test_every_role_is_credited_among_the_rollouts_that_have_a_part_of_it():
    first, second, third = group(0, [1.0, 0.0, 0.5]).rollouts
    first = with_part(with_part(first, Role.SUBAGENT, 50), Role.COMPACTION, 60, tokens=4)
    second = with_part(second, Role.SUBAGENT, 70, tokens=5)
    built = recipe().build("b", 0, [ReadyGroup("g-000000", 0, 0, (first, second, third)), group(1, [0, 1])])
    rows = decoded(built).rollouts
    found = [(row.rollout_id[-3:], row.role, round(row.advantage, 4), row.num_trainable) for row in rows]
    # Of all three: mean 0.5, population deviation 0.4082. Of the two with sub-agents: mean 0.5, deviation 0.5.
    assert found == [
        ("0-0", "main", 1.2247, 3),
        ("0-1", "main", -1.2247, 3),
        ("0-2", "main", 0.0, 3),
        ("0-0", "subagent", 1.0, 2),
        ("0-1", "subagent", -1.0, 5),
        ("0-0", "compaction", 0.0, 0),
        ("1-0", "main", -1.0, 3),
        ("1-1", "main", 1.0, 3),
    ]
    assert [row.group_id for row in rows] == ["g-000000"] * 6 + ["g-000001"] * 2
    assert built.set_aside == {"r-000000-0": {DropReason.SINGLE: 4}}
    assert built.rollout_ids == ("r-000000-0", "r-000000-1", "r-000000-2", "r-000001-0", "r-000001-1")
    assert (built.num_entries, built.reward_mean, built.groups_without_spread) == (22, 0.5, 0)
    assert sum(rollout.num_kept for each in built.groups for rollout in each.rollouts) == 22 + 4


def test_the_entries_of_a_role_are_those_of_its_row():
    first, second = group(0, [1.0, 0.0]).rollouts
    pair = with_part(first, Role.SUBAGENT, 50), with_part(second, Role.SUBAGENT, 50)
    [forest] = decoded(recipe().build("b", 0, [ReadyGroup("g-000000", 0, 0, pair)])).forests
    tokens = ints(forest.tokens)[ints(forest.entry_token)]
    by_row = [tokens[ints(forest.entry_rollout) == row].tolist() for row in range(4)]
    assert by_row == [[100, 101, 102], [200, 201, 202], [50, 51], [50, 51]]


def test_tokens_set_aside_are_counted_by_reason_over_all_roles_of_a_rollout():
    first, second = group(0, [1.0, 0.0], version=2).rollouts
    first = with_part(with_part(first, Role.SUBAGENT, 50, version=2), Role.COMPACTION, 60, version=1)
    second = with_part(second, Role.SUBAGENT, 70, tokens=4, version=3)
    built = recipe().build("b", 5, [ReadyGroup("g-000000", 0, 0, (first, second))])
    assert built.set_aside == {
        "r-000000-0": {DropReason.STALE: 5, DropReason.SINGLE: 2},
        "r-000000-1": {DropReason.STALE: 3},
    }
    assert (built.staleness_mean, built.staleness_max) == (2.0, 2)  # of the four tokens that are not over


def test_a_return_is_that_of_every_token_on_every_kept_branch_and_a_shared_token_counts_once():
    script = Script("r-000000-0")
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5])
    script.call([9], [10], role=Role.COMPACTION)
    script.call([1, 2, 3, 8], [6, 7])
    rollout = script.closed(Scored(reward=0.25))
    assert [branch.tokens.tolist() for branch in rollout.branches] == [[1, 2, 3, 4, 5], [1, 2, 3, 8, 6, 7]]
    built = recipe(credit=ppo).build("b", 0, [ReadyGroup("g-000000", 0, 0, (rollout,))])
    [row] = decoded(built).rollouts
    [forest] = decoded(built).forests
    tokens = ints(forest.tokens)[ints(forest.entry_token)].tolist()
    returns = [decoded(built).rollouts[index].advantage for index in ints(forest.entry_rollout)]
    assert dict(zip(tokens, returns, strict=True)) == {3: 0.25, 5: 0.25, 6: 0.25, 7: 0.25}
    assert len(tokens) == row.num_trainable == 4
    assert built.set_aside == {}


def test_returns_are_trained_whatever_the_spread_of_their_group():
    built = recipe(credit=ppo).build("b", 0, [group(0, [0.5, 0.5]), group(1, [0.0])])
    assert [(row.advantage, row.num_trainable) for row in decoded(built).rollouts] == [(0.5, 3), (0.5, 3), (0.0, 3)]
    assert (built.set_aside, built.groups_without_spread) == ({}, 0)


def sample():
    """A batch of several harnesses, roles and forests."""
    groups = [group(0, [1, 1, 0, 0.3]), group(1, [0.1, 0.7], harness="x"), group(2, [0.5, 0.5])]
    first, *others = groups[0].rollouts
    parts = tuple(with_part(rollout, Role.SUBAGENT, 50 + 10 * n) for n, rollout in enumerate(others))
    groups[0] = replace(groups[0], rollouts=(with_part(first, Role.COMPACTION, 90), *parts))
    return recipe(pack_tokens=16).build("b-000007", 1, groups)


def test_the_same_groups_give_the_same_bytes():
    built, again = sample(), sample()
    assert built.body == again.body
    assert built.digest == again.digest == hashlib.blake2b(built.body).hexdigest()
    assert built.digest != recipe(pack_tokens=16).build("b-000007", 1, built.groups[::-1]).digest
    assert built.digest == recipe(pack_tokens=16).build("b-000007", 1, built.groups).digest


def test_another_process_with_another_hash_seed_makes_the_same_bytes():
    folder = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, "-c", "import test_batches; print(test_batches.sample().digest)"],
        env=os.environ | {"PYTHONHASHSEED": "4000000007", "PYTHONPATH": f"{folder}:{folder.parents[1] / 'pipeline'}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.strip() == sample().digest


def test_forests_keep_the_alignment():
    batch = decoded(recipe(align=8).build("b", 0, [group(0, [0, 1])]))
    assert [len(ints(forest.tokens)) for forest in batch.forests] == [8]


def test_a_long_body_is_served_in_parts_that_join_to_the_whole():
    rng = np.random.default_rng(0)
    groups = []
    for place in range(2):
        script = Script(f"r-000000-{place}")
        script.call([1], rng.integers(0, 1000, 30_000).tolist())
        groups.append(script.closed())
    built = recipe(pack_tokens=100_000).build("b", 0, [ReadyGroup("g-000000", 0, 0, tuple(groups))])
    assert len(built.body) > 2 * CHUNK_BYTES
    batches = Batches()
    batches.start(built)
    parts = [batches.chunk("b", index) for index in range(built.ready.num_chunks)]
    assert b"".join(parts) == built.body
    assert max(map(len, parts)) == CHUNK_BYTES
    assert batches.chunk("b", built.ready.num_chunks) == b""
    assert batches.chunk("other", 0) == b""


def served(*numbers):
    """Batches with these updates trained, in order."""
    batches = Batches()
    for number in numbers:
        built = recipe().build(f"b{number}", 0, [group(number, [0, 1])])
        batches.start(built)
        batches.trained(batches.end(f"b{number}"), number)
    return batches


def test_a_learner_that_starts_anew_gets_back_what_its_checkpoint_does_not_hold_newest_first():
    batches = served(1, 2, 3)
    batches.start(recipe().build("b4", 0, [group(4, [0, 1])]))
    assert [b.batch_id for b in batches.rewind(1)] == ["b4", "b3", "b2"]
    assert batches.lease is None
    assert [b.batch_id for b in batches.commit(9)] == ["b1"]


def reused():
    """Batches in which group 0 was trained at updates 1 and 2, when a rollout was stale, and is leased once more;
    and the queue, which is empty."""
    batches, queue = Batches(), Replay(capacity_tokens=1, capacity_rollouts=1, max_staleness=9, groups_per_step=1)
    whole = group(0, [0, 1, 0.5])
    for updates, each in enumerate((whole, replace(whole, rollouts=whole.rollouts[1:], uses=1)), start=1):
        batches.start(recipe().build(f"b{updates}", 0, [each]))
        batches.trained(batches.end(f"b{updates}"), updates)
    batches.start(recipe().build("b3", 0, [replace(whole, rollouts=whole.rollouts[1:], uses=2)]))
    return batches, queue


def undo(batches, queue, updates):
    """As the flow does: uses and rollouts of what is queued then."""
    for batch in batches.rewind(updates):
        for each in batch.groups:
            queue.remove(each.group_id)
            queue.put(each)
    return [(each.uses, len(each.rollouts)) for each in queue.groups]


@pytest.mark.parametrize(("updates", "expected"), [(0, (0, 3)), (1, (1, 2)), (2, (2, 2))])
def test_a_group_of_several_lost_batches_is_as_it_was_before_the_first_of_them(updates, expected):
    batches, queue = reused()
    batches.commit(updates)
    assert undo(batches, queue, updates) == [expected]
    assert batches.uncommitted == 0


def test_a_checkpoint_keeps_the_later_uses_of_a_group_that_it_does_not_hold():
    batches, queue = reused()
    assert [b.batch_id for b in batches.commit(1)] == ["b1"]
    assert batches.uncommitted == 1
    assert undo(batches, queue, 1) == [(1, 2)]
    assert batches.commit(9) == []


def test_a_batch_of_an_earlier_process_is_trained_or_out_as_it_was_then():
    batches = Batches()
    batches.restore(recipe().build("b1", 0, [group(1, [0, 1])]), 1)
    batches.restore(recipe().build("b2", 0, [group(1, [0, 1])]), None)
    assert batches.lease.batch_id == "b2"
    assert batches.end("b1") is None
    assert [b.batch_id for b in batches.rewind(0)] == ["b2", "b1"]


def test_a_commit_lets_go_of_what_the_checkpoint_holds_and_no_more():
    batches = served(1, 2, 3)
    assert [b.batch_id for b in batches.commit(2)] == ["b1", "b2"]
    assert batches.uncommitted == 1
    assert [b.batch_id for b in batches.rewind(0)] == ["b3"]


def test_hearing_twice_of_a_step_is_hearing_once():
    assert served(1).end("b1") is None


def test_a_step_on_a_batch_that_nobody_leased_is_a_crash():
    with pytest.raises(AssertionError, match="without a lease"):
        Batches().end("b1")


def test_two_leases_at_a_time_are_a_crash():
    batches = Batches()
    batches.start(recipe().build("b1", 0, [group(0, [0, 1])]))
    with pytest.raises(AssertionError, match="while one is out"):
        batches.start(recipe().build("b2", 0, [group(1, [0, 1])]))
