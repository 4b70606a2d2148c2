from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from pipeline_scripts import Script, own, simple

from clawpipe.pipeline.batches import CHUNK_BYTES, Batches, Recipe
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.records import floats, ints
from clawpipe.pipeline.replay import ReadyGroup


def group(number, rewards, *, version=0, tokens=3, harness="agentloop"):
    rollouts = tuple(
        simple(f"r-{number:06d}-{place}", reward, version=version, tokens=tokens, harness=harness)
        for place, reward in enumerate(rewards)
    )
    return ReadyGroup(f"g-{number:06d}", number, 0, rollouts)


def recipe(**changes):
    plain = {"advantage_eps": 0.0, "pack_tokens": 10_000, "align": 1, "max_staleness": 2}
    return Recipe(**{**plain, **changes})


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
    assert built.unused == {"r-000000-0": "zero_spread", "r-000000-1": "zero_spread", "r-000001-0": "single"}
    assert {int(r) for f in batch.forests for r in ints(f.entry_rollout)} == {3, 4}
    assert built.reward_mean == 0.6


def test_staleness_is_that_of_the_tokens_which_the_learner_will_not_mask():
    built = recipe(max_staleness=2).build(
        "b", 5, [group(0, [0, 1], version=5), group(1, [0, 1], version=3), group(2, [0, 1], version=2)]
    )
    assert built.staleness_mean == 1.0  # six tokens of 0, six of 2; those of 3 are over
    assert built.staleness_max == 2
    assert built.masked == {"r-000002-0": 3, "r-000002-1": 3}
    assert built.num_entries == 18


def test_a_token_from_the_future_is_a_crash_that_names_the_rollout():
    with pytest.raises(AssertionError, match="rollout r-000000-0 has tokens of a version after 3"):
        recipe().build("b", 3, [group(0, [0, 1], version=4)])


def test_the_same_groups_give_the_same_bytes():
    first, again = (recipe().build("b", 1, [group(0, [0, 1]), group(1, [1, 0])]) for _ in range(2))
    assert first.body == again.body
    assert first.digest == again.digest == hashlib.blake2b(first.body).hexdigest()


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


def test_a_learner_that_starts_anew_gets_back_what_its_checkpoint_does_not_hold():
    batches = served(1, 2, 3)
    batches.start(recipe().build("b4", 0, [group(4, [0, 1])]))
    assert [b.batch_id for b in batches.rewind(1)] == ["b2", "b3", "b4"]
    assert batches.lease is None
    assert [b.batch_id for b in batches.commit(9)] == ["b1"]


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
