"""Batches: what is refused, how forests are cut and dealt out."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from clawpipe.learner import batch as batches
from clawpipe.learner.batch import empty_forest, flops, minibatches, restrict, share
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.forest import Batch, Forest
from clawpipe.pipeline.records import float_bytes, floats, int_bytes, ints

replace = msgspec.structs.replace


def load(batch: Batch, version: int = 0):
    return batches.load(batch, vocab_size=64, version=version)


def spoil(batch: Batch, field: str, change, index: int = 0) -> Batch:
    """The batch with one array of its first forest changed."""
    first: Forest = batch.forests[0]
    kind = {"end": "<i8", "entry_logprob": "<f4"}.get(field, "<i4")
    values = np.frombuffer(getattr(first, field), kind).copy()
    values = change(values)
    return replace(batch, forests=(replace(first, **{field: values.astype(kind).tobytes()}), *batch.forests[1:]))


def put(index: int, value: float):
    def change(values):
        values[index] = value
        return values

    return change


def test_a_good_batch_becomes_tensors(make_batch):
    batch = make_batch()
    first, second = load(batch)
    assert first.tokens_T.tolist() == ints(batch.forests[0].tokens).tolist()
    assert first.entry_logprob_E.tolist() == floats(batch.forests[0].entry_logprob).tolist()
    assert second.entry_rollout_E.tolist() == [3] * 4 + [4] * 6
    assert (first.end_T.dtype, first.tokens_T.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize(
    ("field", "change", "reason"),
    [
        ("tokens", put(3, 64), "token ids outside 0..63"),
        ("tokens", put(3, -1), "token ids outside 0..63"),
        ("position", lambda v: v[:-1], "lengths disagree"),
        ("entry_version", lambda v: v[:-1], "lengths disagree"),
        ("parent", put(2, 2), "parents that are not earlier tokens"),
        ("parent", put(7, 4), "positions that are not depths"),
        ("position", put(4, 9), "positions that are not depths"),
        ("end", put(0, 5), "subtree ends out of order"),
        ("end", put(6, 99), "subtree ends out of order"),
        ("end", put(8, 15), "subtree"),
        ("entry_token", put(0, 0), "at a root"),
        ("entry_token", put(0, 400), "outside the forest"),
        ("entry_token", put(1, 6), "two loss entries of one rollout"),
        ("entry_logprob", put(0, np.nan), "not finite"),
        ("entry_logprob", put(0, -np.inf), "not finite"),
        ("entry_logprob", put(0, 0.5), "above 0"),
        ("entry_version", put(0, 1), "versions outside 0..0"),
        ("entry_version", put(0, -1), "versions outside 0..0"),
        ("entry_rollout", put(0, 6), "does not have"),
        ("entry_branch", lambda v: np.array([0, 1]), "lengths disagree"),
        ("entry_branch", lambda v: np.array([-1] + 14 * [0]), "branches that are negative"),
        ("entry_rollout", put(0, 1), "num_trainable"),
    ],
)
def test_a_broken_rule_refuses_the_batch_whole(make_batch, field, change, reason):
    with pytest.raises(LearnerError, match=reason) as error:
        load(spoil(make_batch(), field, change))
    assert "b1" in str(error.value)
    assert "r0" in str(error.value)


def test_entries_without_a_branch_are_of_branch_0_and_segments_tell_rollouts_and_branches_apart(make_batch):
    first, second = load(make_batch())
    assert first.entry_branch_E.tolist() == [0] * 15
    assert second.segments().tolist() == [0] * 4 + [1] * 6
    branches = [0] * 3 + [2] * 2 + [0] * 3 + [1, 0] + [1] * 5
    forest = load(spoil(make_batch(), "entry_branch", lambda _: np.array(branches)))[0]
    assert forest.segments().tolist() == [0] * 3 + [1] * 2 + [2] * 3 + [4, 3] + [4] * 5
    part = restrict(forest, torch.tensor([True, False, True, False, False, False]))
    assert part.segments().tolist() == [0] * 3 + [1] * 2 + [3, 2] + [3] * 5
    assert restrict(forest, torch.zeros(6, dtype=torch.bool)).segments().tolist() == []


def test_bytes_that_are_no_whole_numbers_are_refused(make_batch):
    batch = make_batch()
    short = replace(batch.forests[0], tokens=batch.forests[0].tokens[:-1])
    with pytest.raises(LearnerError, match="not whole numbers"):
        load(replace(batch, forests=(short,)))


def test_a_refusal_names_the_rollouts_concerned(make_batch):
    with pytest.raises(LearnerError, match=r"\(rollouts r1\)"):
        load(spoil(make_batch(), "entry_logprob", put(6, np.nan)))


def test_an_advantage_that_is_not_finite_is_refused(make_batch):
    batch = make_batch()
    rows = (replace(batch.rollouts[0], advantage=float("nan")), *batch.rollouts[1:])
    with pytest.raises(LearnerError, match="reward or advantage not finite"):
        load(replace(batch, rollouts=rows))


def test_garbage_is_not_a_batch():
    with pytest.raises(LearnerError, match="cannot be read"):
        batches.decode(b"\xc1garbage")


def test_overlapping_subtrees_are_refused():
    # Token 2 is a child of token 0, but lies in the subtree of its sibling 1.
    forest = Forest(
        tokens=int_bytes([1, 2, 3]),
        position=int_bytes([0, 1, 1]),
        parent=int_bytes([-1, 0, 0]),
        end=np.array([3, 3, 3], "<i8").tobytes(),
        entry_token=b"",
        entry_logprob=float_bytes([]),
        entry_version=b"",
        entry_rollout=b"",
    )
    with pytest.raises(LearnerError, match="subtrees that overlap"):
        load(Batch(batch_id="b", version=0, rollouts=(), forests=(forest,)))


def paths(forest) -> set[tuple[int, float, tuple[int, ...]]]:
    """Each entry as (rollout, log mu, its whole path of token ids)."""
    found = set()
    parent = forest.parent_T.tolist()
    for token, logprob, rollout in zip(
        forest.entry_token_E.tolist(),
        forest.entry_logprob_E.tolist(),
        forest.entry_rollout_E.tolist(),
        strict=True,
    ):
        path, at = [], token
        while at >= 0:
            path.append(forest.tokens_T[at].item())
            at = parent[at]
        found.add((rollout, logprob, tuple(reversed(path))))
    return found


def test_a_restricted_forest_keeps_the_paths_of_its_rollouts_and_nothing_else(make_batch):
    forest = load(make_batch())[0]
    keep = torch.tensor([True, False, True, False, False, False])
    part = restrict(forest, keep)
    assert paths(part) == {path for path in paths(forest) if path[0] in (0, 2)}
    assert part.num_tokens == 6 + 5 + 7
    assert part.end_T.tolist() == [18] * 6 + [11] * 5 + [18] * 7
    assert part.position_T.tolist() == [*range(6), *range(6, 11), *range(6, 13)]
    # The rest of the batch's rules hold for a part too.
    visible = [int(((part.end_T > i) & (torch.arange(18) <= i)).sum()) for i in range(18)]
    assert visible == (part.position_T + 1).tolist()


def test_minibatches_split_by_whole_rollouts(make_batch):
    batch = make_batch()
    forests = load(batch)
    first, second = minibatches(batch.rollouts, forests, 2)
    assert (first.num_rows, second.num_rows) == (3, 3)
    assert (first.num_entries, second.num_entries) == (15, 10)
    assert set(first.forests[0].entry_rollout_E.tolist()) == {0, 1, 2}
    assert set(second.forests[0].entry_rollout_E.tolist()) == {3, 4}
    thirds = list(minibatches(batch.rollouts, forests, 3))
    assert [part.num_entries for part in thirds] == [8, 11, 6]
    merged = set().union(*(paths(forest) for part in thirds for forest in part.forests))
    assert merged == paths(forests[0]) | paths(forests[1])


def test_a_rollout_whose_roles_are_rows_of_their_own_is_cut_between_its_roles_and_never_within_one(make_batch):
    batch = make_batch()
    # Rows 2 and 3 become two roles of one rollout; the entries of each stay together, and |B| counts both.
    second = replace(batch.rollouts[3], rollout_id="r2", role="subagent")
    batch = replace(batch, rollouts=(*batch.rollouts[:3], second, *batch.rollouts[4:]))
    first, last = minibatches(batch.rollouts, load(batch), 2)
    assert (first.num_rows, last.num_rows) == (3, 3)
    entries = [
        [torch.cat([f.entry_rollout_E for f in part.forests]).tolist().count(row) for part in (first, last)]
        for row in (2, 3)
    ]
    assert entries == [[7, 0], [0, 4]]


def test_a_refusal_names_a_rollout_once_whatever_the_number_of_its_rows(make_batch):
    batch = make_batch()
    rows = [replace(row, rollout_id="r0", advantage=float("nan")) for row in batch.rollouts[:2]]
    with pytest.raises(LearnerError, match=r"\(rollouts r0\)"):
        load(replace(batch, rollouts=(*rows, *batch.rollouts[2:])))


def by_tokens(forest) -> float:
    return float(forest.num_tokens)


def test_each_rank_gets_equally_many_forests_and_each_entry_goes_to_one(make_batch):
    forests = [*load(make_batch()), *load(make_batch(seed=1)), load(make_batch(seed=2))[0]]
    dealt = [share(forests, rank=rank, size=2, cost=by_tokens) for rank in range(2)]
    assert [len(mine) for mine in dealt] == [3, 3]
    assert sum(forest.num_entries for mine in dealt for forest in mine) == 15 * 3 + 10 * 2
    assert [forest.num_entries for forest in dealt[0] + dealt[1]].count(0) == 1
    loads = [sum(map(by_tokens, mine)) for mine in dealt]
    assert abs(loads[0] - loads[1]) <= max(map(by_tokens, forests))


def test_one_forest_is_split_over_two_ranks_by_rollouts(make_batch):
    forest = load(make_batch())[0]
    dealt = [share([forest], rank=rank, size=2, cost=by_tokens) for rank in range(2)]
    assert [len(mine) for mine in dealt] == [1, 1]
    assert paths(dealt[0][0]) | paths(dealt[1][0]) == paths(forest)
    assert not paths(dealt[0][0]) & paths(dealt[1][0])


def test_a_rank_without_work_computes_an_empty_forest(make_forest):
    forest = load_one(make_forest([1, 2], {0: [3]}, {0: [-1.0]}))
    dealt = [share([forest], rank=rank, size=2, cost=by_tokens) for rank in range(2)]
    assert sorted(mine[0].num_entries for mine in dealt) == [0, 1]
    assert empty_forest().num_tokens == 2


def load_one(forest: Forest):
    from clawpipe.pipeline.forest import RolloutRow

    count = len(ints(forest.entry_token))
    row = RolloutRow(rollout_id="r0", group_id="g", harness="h", reward=0.0, advantage=1.0, num_trainable=count)
    return load(Batch(batch_id="b", version=0, rollouts=(row,), forests=(forest,)))[0]


def test_cost_counts_tokens_and_visible_pairs(make_forest):
    # A chain of 3 and a fork: tokens 0,1 shared, tails [2], [3]: pairs 1 + 2 + 3 + 3 = 9.
    forest = make_forest([1, 2], {0: [3], 1: [4]}, {0: [-1.0], 1: [-1.0]})
    tensors = batches._tensors(Batch(batch_id="b", version=0, rollouts=(), forests=()), 0, forest)
    assert flops(params_per_token=10, attention_width=3)(tensors) == 2 * 10 * 4 + 4 * 3 * 9
