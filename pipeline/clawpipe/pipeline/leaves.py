"""The calls of one role in a rollout's tree -> the leaves that the conversation kept. Pure; a part of `segments`.

A leaf is the end of a delivered completion that no other delivered call goes beyond. In each segment the longest
one is kept: the others are answers that the harness threw away.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from clawpipe.pipeline.records import Role
from clawpipe.pipeline.tree import Placed, PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The calls of a role that settling did not cut, and the leaves that are kept of them."""

    role: Role
    calls: tuple[Placed, ...]
    valid_ids: frozenset[str]  # of those whose completion the harness had
    kept: tuple[Placed, ...]  # the leaves that are kept, by order of arrival
    num_leaves: int  # dead ones included


def leaves_of(tree: PrefixTree, role: Role, delivered: Collection[str], cut: Collection[str]) -> Leaves:
    """The leaves of a role. `delivered` and `cut` are the ids of the calls which the manifest marks so."""
    calls = tuple(p for p in tree.calls if p.call.role is role and p.call.call_id not in cut)
    valid = _delivered(tree, calls, delivered)
    if role is Role.COMPACTION:
        leaves = kept = _distinct(valid)
    else:
        leaves = _leaves(tree, valid)
        compactions = [p.call.index for p in tree.calls if p.call.role is Role.COMPACTION and role is Role.MAIN]
        kept = _live(tree, valid, leaves, compactions)
    return Leaves(role, calls, frozenset(p.call.call_id for p in valid), tuple(kept), len(leaves))


def _delivered(tree: PrefixTree, calls: Sequence[Placed], delivered: Collection[str]) -> list[Placed]:
    """The calls whose completion the harness had: marked so, or taken into another call's prompt whole."""
    prompts = sorted(p.prompt_node for p in calls)

    def is_adopted(p: Placed) -> bool:
        own = p.prompt_node == p.end_node  # its own prompt is no adoption
        return _num_within(tree, p.end_node, prompts) > own

    return [p for p in calls if p.call.call_id in delivered or is_adopted(p)]


def _num_within(tree: PrefixTree, node: int, ascending: Sequence[int]) -> int:
    """How many of the nodes lie in the subtree of `node`, itself included."""
    return bisect_left(ascending, int(tree.end[node])) - bisect_left(ascending, node)


def _distinct(calls: Iterable[Placed]) -> list[Placed]:
    """One call for each end, by order of arrival."""
    # Of equal calls the latest is the one that the harness went on with.
    return sorted({p.end_node: p for p in calls}.values(), key=lambda p: p.arrival)


def _leaves(tree: PrefixTree, calls: Sequence[Placed]) -> list[Placed]:
    """One call for each end that no other call goes beyond, by order of arrival."""
    found = _distinct(calls)
    ends = sorted(p.end_node for p in found)
    return [p for p in found if _num_within(tree, p.end_node, ends) == 1]


def _live(
    tree: PrefixTree, valid: Sequence[Placed], leaves: Sequence[Placed], compactions: Sequence[int]
) -> list[Placed]:
    """The longest leaf of each segment. `compactions`: the indices, ascending, of the calls that cut segments.

    A leaf from before a compaction is dead all the same when the conversation went on from its own prompt with
    another answer: then that compaction did not end it.
    """
    topmost = _topmost(tree, {p.prompt_node for p in valid})
    best: dict[tuple[int, int], Placed] = {}
    for leaf in leaves:
        top = topmost[bisect_right(topmost, leaf.end_node) - 1]
        segment = top, bisect_left(compactions, leaf.call.index)
        best[segment] = max(best.get(segment, leaf), leaf, key=lambda p: (tree.depth[p.end_node], p.call.index))
    found = []
    epochs: dict[int, list[tuple[int, Placed]]] = {}
    for (top, epoch), leaf in best.items():
        epochs.setdefault(top, []).append((epoch, leaf))
    for (top, epoch), leaf in sorted(best.items(), key=lambda item: item[1].arrival):
        later = [p for after, p in epochs[top] if after > epoch]
        below = [p for p in later if tree.is_within(p.end_node, leaf.prompt_node)]
        if not (below and _was_retried(tree, leaf, below, valid, compactions)):
            found.append(leaf)
    return found


def _was_retried(
    tree: PrefixTree,
    leaf: Placed,
    below: Sequence[Placed],
    valid: Sequence[Placed],
    compactions: Sequence[int],
) -> bool:
    """Whether one of the leaves `below` its prompt lives on from another answer to that prompt.

    That answer is to the same prompt, or to a longer one before the next compaction. After a compaction a longer
    prompt may be the new history: the conversation's opening and the summary.
    """
    epoch = bisect_left(compactions, leaf.call.index)
    return any(
        p.end_node > leaf.prompt_node
        and tree.is_within(p.prompt_node, leaf.prompt_node)
        and (p.prompt_node == leaf.prompt_node or bisect_left(compactions, p.call.index) == epoch)
        and any(tree.is_within(other.end_node, p.end_node) for other in below)
        for p in valid
    )


def _topmost(tree: PrefixTree, nodes: Iterable[int]) -> list[int]:
    """Those of the nodes that have none of them above, ascending."""
    found: list[int] = []
    for node in sorted(nodes):
        if not found or node >= tree.end[found[-1]]:
            found.append(node)
    return found
