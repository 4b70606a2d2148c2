from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawpipe.pipeline.forest import Forest
from clawpipe.pipeline.packing import Branch, Trainable, pack
from clawpipe.pipeline.records import floats, ints


def branch(tokens, entries=(), logprobs=None, version=0):
    m = len(entries)
    return Branch(
        tokens=np.array(tokens, np.int32),
        entries=np.array(entries, np.int32),
        logprobs=np.array(logprobs if logprobs is not None else [-0.5] * m, np.float32),
        versions=np.full(m, version, np.int32),
    )


def ends(forest: Forest) -> np.ndarray:
    return np.frombuffer(forest.end, "<i8")


def ancestors_by_end(forest: Forest, i: int) -> list[int]:
    end = ends(forest)
    return [j for j in range(i + 1) if end[j] > i]


def ancestors_by_parent(forest: Forest, i: int) -> list[int]:
    parent, chain = ints(forest.parent), []
    while i >= 0:
        chain.append(i)
        i = int(parent[i])
    return chain[::-1]


small_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@st.composite
def groups(draw):
    rollouts = []
    for index in range(draw(st.integers(1, 5))):
        branches = []
        for _ in range(draw(st.integers(1, 4))):
            tokens = draw(small_tokens)
            entries = sorted(draw(st.sets(st.integers(1, 9).filter(lambda e: e < 9)))) if len(tokens) > 1 else []
            entries = [e for e in entries if e < len(tokens)]
            logprobs = draw(st.lists(st.floats(-5, 0, width=32), min_size=len(entries), max_size=len(entries)))
            branches.append(branch(tokens, entries, logprobs, draw(st.integers(0, 3))))
        rollouts.append(Trainable(rollout_index=index, branches=tuple(branches)))
    return rollouts


@given(groups(), st.integers(1, 40), st.integers(1, 4))
def test_a_token_sees_exactly_its_own_path(rollouts, budget, align):
    for forest in pack(rollouts, max(budget, align), align):
        position = ints(forest.position)
        for i in range(len(position)):
            seen = ancestors_by_end(forest, i)
            assert seen == ancestors_by_parent(forest, i)
            assert [position[j] for j in seen] == list(range(len(seen)))


@given(groups(), st.integers(1, 40), st.integers(1, 4))
def test_the_trees_hold_exactly_the_prefixes_of_the_branches_each_once(rollouts, budget, align):
    forests = pack(rollouts, max(budget, align), align)
    packed_rollouts = 0
    for forest in forests:
        tokens = ints(forest.tokens).tolist()
        spelled = [tuple(tokens[j] for j in ancestors_by_end(forest, i)) for i in range(len(tokens))]
        owners = whole_owners(rollouts, set(spelled))
        expected = {tuple(p.tokens[: n + 1].tolist()) for r in owners for p in r.branches for n in range(len(p.tokens))}
        filling = len(tokens) - len(expected)
        assert 0 <= filling < align
        assert len(tokens) % align == 0
        assert set(spelled[: len(expected)]) == expected
        packed_rollouts += len(owners)
    assert packed_rollouts >= len(rollouts)


def whole_owners(rollouts, spelled):
    return [r for r in rollouts if all(tuple(p.tokens.tolist()) in spelled for p in r.branches)]


@given(groups(), st.integers(1, 40))
def test_every_rollout_keeps_one_entry_for_each_token_it_sampled(rollouts, budget):
    found = {}
    for forest in pack(rollouts, budget):
        tokens = ints(forest.tokens).tolist()
        columns = (
            ints(forest.entry_rollout),
            ints(forest.entry_token),
            floats(forest.entry_logprob),
            ints(forest.entry_version),
            ints(forest.entry_branch),
        )
        for owner, at, logprob, version, at_branch in zip(*(c.tolist() for c in columns), strict=True):
            key = owner, tuple(tokens[j] for j in ancestors_by_end(forest, at))
            assert key not in found
            assert ints(forest.parent)[at] >= 0
            found[key] = logprob, version, at_branch
    expected = {}
    for rollout in rollouts:
        for index, p in enumerate(rollout.branches):
            for e, logprob, version in zip(p.entries.tolist(), p.logprobs.tolist(), p.versions.tolist(), strict=True):
                key = rollout.rollout_index, tuple(p.tokens[: e + 1].tolist())
                expected.setdefault(key, (logprob, version, index))
    assert found == expected


@given(groups(), st.integers(1, 40))
def test_a_rollout_lies_in_one_forest_and_only_a_lone_rollout_is_over_the_budget(rollouts, budget):
    forests = pack(rollouts, budget)
    homes = {}
    for index, forest in enumerate(forests):
        for owner in set(ints(forest.entry_rollout).tolist()):
            assert homes.setdefault(owner, index) == index
        if len(ints(forest.tokens)) > budget:
            alone = [r for r in rollouts if len(unique_prefixes([r])) == len(ints(forest.tokens))]
            assert alone
            assert len(set(ints(forest.entry_rollout).tolist())) <= 1


@given(groups(), st.integers(1, 40))
def test_a_rollout_goes_where_it_adds_the_fewest_tokens_among_the_forests_with_room(rollouts, budget):
    plain = []  # (prefixes, rollout indices) of each forest
    for rollout in rollouts:
        mine = unique_prefixes([rollout])
        room = [(len(mine - held), i) for i, (held, _) in enumerate(plain) if len(mine | held) <= budget]
        if not room:
            plain.append((set(), []))
        held, members = plain[min(room)[1] if room else -1]
        held |= mine
        members.append(rollout.rollout_index)
    forests = pack(rollouts, budget)
    assert [len(ints(forest.tokens)) for forest in forests] == [len(held) for held, _ in plain]
    with_entries = {r.rollout_index for r in rollouts if any(len(b.entries) for b in r.branches)}
    owners = [set(ints(forest.entry_rollout).tolist()) for forest in forests]
    assert owners == [set(members) & with_entries for _, members in plain]


def unique_prefixes(rollouts):
    return {tuple(p.tokens[: n + 1].tolist()) for r in rollouts for p in r.branches for n in range(len(p.tokens))}


@given(groups())
def test_with_room_for_all_there_is_one_forest_of_the_unique_tokens(rollouts):
    (forest,) = pack(rollouts, 10_000)
    assert len(ints(forest.tokens)) == len(unique_prefixes(rollouts))


def test_the_vectors_of_a_small_forest_are_as_by_hand():
    # root 7 8, then 1 2 (rollout 0) and 1 3 4 (rollout 1)
    first = Trainable(rollout_index=0, branches=(branch([7, 8, 1, 2], [2, 3], [-0.1, -0.2], 5),))
    second = Trainable(rollout_index=1, branches=(branch([7, 8, 1, 3, 4], [2, 4], [-0.3, -0.4], 6),))
    (forest,) = pack([second, first], 100, align=4)
    assert ints(forest.tokens).tolist() == [7, 8, 1, 2, 3, 4, 0, 0]
    assert ints(forest.position).tolist() == [0, 1, 2, 3, 3, 4, 0, 0]
    assert ints(forest.parent).tolist() == [-1, 0, 1, 2, 2, 4, -1, -1]
    assert ends(forest).tolist() == [6, 6, 6, 4, 6, 6, 7, 8]
    assert ints(forest.entry_rollout).tolist() == [1, 1, 0, 0]
    assert ints(forest.entry_token).tolist() == [2, 5, 2, 3]
    assert floats(forest.entry_logprob).tolist() == np.float32([-0.3, -0.4, -0.1, -0.2]).tolist()
    assert ints(forest.entry_version).tolist() == [6, 6, 5, 5]


def test_a_group_stays_together_where_it_shares_its_prefix():
    def member(index, task):
        return Trainable(rollout_index=index, branches=(branch([task] * 6 + [index], [6]),))

    forests = pack([member(0, 50), member(1, 51), member(2, 50), member(3, 51)], 8)
    homes = [sorted(set(ints(forest.entry_rollout).tolist())) for forest in forests]
    assert homes == [[0, 2], [1, 3]]


def test_an_entry_at_the_first_token_is_refused_because_nothing_predicts_it():
    with pytest.raises(ValueError, match="entry outside 1"):
        pack([Trainable(rollout_index=3, branches=(branch([1, 2], [0]),))], 10)


def test_entries_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match="do not ascend"):
        pack([Trainable(rollout_index=3, branches=(branch([1, 2, 3], [2, 1]),))], 10)


def test_a_budget_below_the_alignment_is_refused():
    with pytest.raises(ValueError, match="below align"):
        pack([], budget_tokens=3, align=4)


def test_nothing_gives_no_forest():
    assert pack([], 10) == ()
