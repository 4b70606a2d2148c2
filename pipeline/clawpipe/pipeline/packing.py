"""Selected branches -> packed forests: every unique token once, in depth-first order. Pure.

Takes the branches that `segments` kept (or supervised sequences) and gives the learner's microbatches. What
rollouts have in common - system prompt, tools, task prompt, a shared history - is laid down once per forest,
so rollouts of one group should be given next to each other. Compute is shared, loss entries are not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clawpipe.pipeline.forest import Forest
from clawpipe.pipeline.records import FloatArray, IntArray, float_bytes, int_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence from root to leaf: n tokens, m of them with a loss entry.

    Supervised training gives logprob 0 and version 0.
    """

    tokens: IntArray  # int32 [n], not negative
    entries: IntArray  # int32 [m], ascending indices into tokens, never 0: nothing predicts a first token
    logprobs: FloatArray  # float32 [m], log mu as recorded at sampling
    versions: IntArray  # int32 [m]


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """The kept branches of one rollout. A token with an entry on several of them is trained once."""

    rollout_index: int  # index into Batch.rollouts
    branches: tuple[Branch, ...]


def pack(rollouts: Iterable[Trainable], budget_tokens: int, align: int = 1) -> tuple[Forest, ...]:
    """Forests of at most `budget_tokens` unique tokens each, their lengths multiples of `align`.

    A rollout is never split, and so no branch is: what a correction takes the mean of over a branch is in one
    forest. A rollout that is over the budget alone gets a forest of its own. Otherwise it goes where it adds the
    fewest tokens among the forests with room for it. Filling up to `align` is done with trees of a single token
    that no entry and no other token refers to. ValueError for an entry at index 0, lengths that disagree, or a
    budget below `align`.
    """
    limit = budget_tokens // align * align
    if limit < 1:
        raise ValueError(f"budget_tokens = {budget_tokens} is below align = {align}; raise the budget")
    given = [rollout for rollout in rollouts if rollout.branches]
    keys = [[_checked_key(branch, rollout.rollout_index) for branch in rollout.branches] for rollout in given]
    order = _Order([key for each in keys for key in each])
    bins: list[_Bin] = []
    start = 0
    for rollout in given:
        ranked = order.ranked(range(start, start + len(rollout.branches)))
        _choose(bins, ranked, limit).add(rollout, ranked)
        start += len(rollout.branches)
    return tuple(_forest(each.rollouts, align) for each in bins)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranked:
    """A branch by its rank among all branches."""

    rank: int
    num_tokens: int
    shared: list[int]  # by rank, tokens that it shares with that branch; at -1, with none: 0


class _Order:
    """All branches in the order of their token sequences: what two share is the least that neighbours between
    them do, so sequences are compared once, however many forests they are tried in."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """`keys` are branches as big-endian bytes, which sort as token sequences do."""
        by_rank = sorted(range(len(keys)), key=keys.__getitem__)
        neighbours = pairwise(by_rank)
        self._shared = np.array([shared_prefix(keys[a], keys[b]) for a, b in neighbours], np.int64)
        self._rank = {index: rank for rank, index in enumerate(by_rank)}
        self._num_tokens = [len(key) // 4 for key in keys]

    def ranked(self, indices: Iterable[int]) -> list[_Ranked]:
        """These branches, in ascending order."""
        return sorted(map(self._ranked, indices), key=lambda each: each.rank)

    def _ranked(self, index: int) -> _Ranked:
        rank, num_tokens = self._rank[index], self._num_tokens[index]
        below = np.minimum.accumulate(self._shared[:rank][::-1])[::-1].tolist()
        above = np.minimum.accumulate(self._shared[rank:]).tolist()
        return _Ranked(rank, num_tokens, [*below, num_tokens, *above, 0])


@dataclass(slots=True, eq=False)
class _Bin:
    """A forest that is being filled."""

    ranks: list[int] = field(default_factory=list)  # of its branches, ascending
    rollouts: list[Trainable] = field(default_factory=list)
    num_tokens: int = 0

    def cost(self, branches: Sequence[_Ranked]) -> int:
        """How many unique tokens these branches, in ascending order, would add.

        What a branch shares with any other it shares with the next below or above it.
        """
        added, before = 0, -1
        for each in branches:
            at = bisect_left(self.ranks, each.rank)
            below = max(before, self.ranks[at - 1] if at else -1)
            above = self.ranks[at] if at < len(self.ranks) else -1
            added += each.num_tokens - max(each.shared[below], each.shared[above])
            before = each.rank
        return added

    def add(self, rollout: Trainable, branches: Sequence[_Ranked]) -> None:
        self.num_tokens += self.cost(branches)
        for each in branches:
            insort(self.ranks, each.rank)
        self.rollouts.append(rollout)


def _choose(bins: list[_Bin], branches: Sequence[_Ranked], limit: int) -> _Bin:
    costs = ((each.cost(branches), each) for each in bins if each.num_tokens <= limit)
    fitting = [(cost, each) for cost, each in costs if each.num_tokens + cost <= limit]
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    bins.append(_Bin())
    return bins[-1]


def _checked_key(branch: Branch, rollout_index: int) -> bytes:
    n, m = len(branch.tokens), len(branch.entries)
    if not len(branch.logprobs) == len(branch.versions) == m:
        raise ValueError(f"rollout {rollout_index}: a branch's entries, logprobs and versions differ in number")
    if n == 0 or (m and (branch.entries[0] < 1 or branch.entries[-1] >= n)):
        raise ValueError(f"rollout {rollout_index}: a branch of {n} tokens has an entry outside 1..{n - 1}")
    if np.any(np.diff(branch.entries) < 1):
        raise ValueError(f"rollout {rollout_index}: the entries of a branch do not ascend")
    return branch.tokens.astype(">i4").tobytes()


def shared_prefix(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two sequences of 4-byte tokens."""
    n = min(len(a), len(b)) // 4
    if a[: 4 * n] == b[: 4 * n]:
        return n
    return int(np.argmax(np.frombuffer(a, "<i4", n) != np.frombuffer(b, "<i4", n)))


def _forest(rollouts: Sequence[Trainable], align: int) -> Forest:
    branches = [branch for rollout in rollouts for branch in rollout.branches]
    layout = _lay_out([branch.tokens for branch in branches], align)
    where = iter(layout.where)
    entries = [_entries(rollout, [next(where) for _ in rollout.branches]) for rollout in rollouts]
    token, logprob, version, branch = (np.concatenate(column) for column in zip(*entries, strict=True))
    owner = np.repeat([r.rollout_index for r in rollouts], [len(e[0]) for e in entries])
    return Forest(
        tokens=int_bytes(layout.tokens),
        position=int_bytes(layout.position),
        parent=int_bytes(layout.parent),
        end=np.ascontiguousarray(layout.end, dtype="<i8").tobytes(),
        entry_token=int_bytes(token),
        entry_logprob=float_bytes(logprob),
        entry_version=int_bytes(version),
        entry_rollout=int_bytes(owner),
        entry_branch=int_bytes(branch),
    )


def _entries(rollout: Trainable, where: Sequence[IntArray]) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    """The rollout's entries in packed order (token, logprob, version, branch); the first branch that names a token
    keeps it."""
    tokens = np.concatenate([at[branch.entries] for at, branch in zip(where, rollout.branches, strict=True)])
    unique, first = np.unique(tokens, return_index=True)
    logprobs = np.concatenate([branch.logprobs for branch in rollout.branches])
    versions = np.concatenate([branch.versions for branch in rollout.branches])
    owners = np.repeat(np.arange(len(where), dtype=np.int32), [len(branch.entries) for branch in rollout.branches])
    return unique.astype(np.int32), logprobs[first], versions[first], owners[first]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """T packed tokens; `where` holds, for each branch as given, the packed index of each of its tokens."""

    tokens: IntArray  # int32 [T]
    position: IntArray  # int32 [T]
    parent: IntArray  # int32 [T]
    end: npt.NDArray[np.int64]  # int64 [T]
    where: list[IntArray]


def _lay_out(branches: Sequence[IntArray], align: int) -> _Layout:
    """Sorted branches visit the radix tree depth first: each adds what it does not share with the one before."""
    keys = [tokens.astype(">i4").tobytes() for tokens in branches]
    where: list[IntArray] = [np.empty(0, np.int32)] * len(branches)
    pieces: list[tuple[IntArray, int, int]] = []  # new tokens, depth of the first, packed index of its parent
    closings: list[tuple[IntArray, int]] = []  # these tokens' subtrees end here
    size, open_key, open_at = 0, b"", np.empty(0, np.int32)
    for i in sorted(range(len(branches)), key=keys.__getitem__):
        shared = shared_prefix(open_key, keys[i])
        closings.append((open_at[shared:], size))
        pieces.append((branches[i][shared:], shared, int(open_at[shared - 1]) if shared else -1))
        added = np.arange(size, size + len(branches[i]) - shared, dtype=np.int32)
        where[i] = np.concatenate([open_at[:shared], added])
        size, open_key, open_at = size + len(added), keys[i], where[i]
    closings.append((open_at, size))
    pieces += [(np.zeros(1, np.int32), 0, -1)] * (-size % align)
    return _assemble(pieces, closings, where)


def _assemble(
    pieces: Sequence[tuple[IntArray, int, int]],
    closings: Sequence[tuple[IntArray, int]],
    where: list[IntArray],
) -> _Layout:
    total = sum(len(tokens) for tokens, _, _ in pieces)
    parent = np.arange(-1, total - 1, dtype=np.int32)
    end = np.arange(1, total + 1, dtype=np.int64)
    start = 0
    for tokens, _, above in pieces:
        if len(tokens):
            parent[start] = above
        start += len(tokens)
    for indices, at in closings:
        end[indices] = at
    position = [np.arange(depth, depth + len(tokens), dtype=np.int32) for tokens, depth, _ in pieces]
    return _Layout(
        tokens=np.concatenate([tokens for tokens, _, _ in pieces]),
        position=np.concatenate(position),
        parent=parent,
        end=end,
        where=where,
    )
