"""A rollout's tree -> the branches that are trained on, and a reason for every token that is not. Pure.

After ClawGym II (arXiv 2608.16798, section on trajectory filtering): segments are delimited by compaction, in
each the leaf with the longest valid continuation is kept; auxiliary calls are left out of the loss; a rollout
with more leaves than a threshold is dropped whole. Ours: what a segment is follows from the tree (the calls
below one topmost prompt, cut at recorded compactions), so that neither order of arrival nor interleaved
sub-agents matter; and where only a part of a completion lives on in later prompts, that part is trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import Role
from clawpipe.pipeline.tree import Placed, PrefixTree


class DropReason(StrEnum):
    """Why a sampled token is not trained."""

    # by segments
    AUXILIARY_SUBAGENT = "auxiliary_subagent"
    AUXILIARY_COMPACTION = "auxiliary_compaction"
    AUXILIARY_TITLE = "auxiliary_title"
    AUXILIARY_NUDGE = "auxiliary_nudge"
    AUXILIARY_MEMORY = "auxiliary_memory"
    AUXILIARY_UNKNOWN = "auxiliary_unknown"
    CUT = "cut"  # settling ended the call
    UNDELIVERED = "undelivered"  # the harness never got it, so nothing that was graded came from it
    DEAD_LEAF = "dead_leaf"  # the conversation went on without it
    NOT_ADOPTED = "not_adopted"  # the rest of a completion of which the harness kept a part
    DUPLICATE = "duplicate"  # another call sampled the same tokens at the same place
    OVER_BRANCHED = "over_branched"
    # by the assembler
    MALFORMED = "malformed"  # the records contradict themselves
    LOST_ATTEMPT = "lost_attempt"  # of a delivery of the request that died
    UNLISTED = "unlisted"  # not in the manifest
    INCOMPLETE = "incomplete"  # a call of the manifest never came
    LATE = "late"  # its rollout or its place in the group was over already
    UNADMITTED = "unadmitted"  # nobody asked for the rollout
    INFRA = "infra"
    VERIFIER_INFRA = "verifier_infra"
    LOST = "lost"  # the request is gone and no manifest came
    # by the groups, the replay queue and the batches
    NO_TOKENS = "no_tokens"  # nothing of the rollout can be trained
    STALE = "stale"  # over max_staleness when it was taken
    SINGLE = "single"  # the only graded rollout of its group: no baseline
    SMALL_GROUP = "small_group"  # fewer usable rollouts than min_group
    ZERO_SPREAD = "zero_spread"  # all rollouts of the group have the same reward
    REFUSED = "refused"  # the learner refused the batch
    NO_STEP = "no_step"  # the learner made no optimizer step on the batch


@dataclass(frozen=True, slots=True)
class CallFate:
    """What became of the tokens that a call sampled: sampled = kept + dropped."""

    call_id: str
    role: Role
    sampled: int
    kept: int
    dropped: Mapping[DropReason, int]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The kept branches of the calls of one role, which are trained in groups of that role."""

    role: Role
    branches: tuple[Branch, ...]

    @property
    def num_kept(self) -> int:
        """Trainable tokens."""
        return sum(len(branch.entries) for branch in self.branches)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The kept branches of a rollout; every kept token has its entry on exactly one of them."""

    parts: tuple[Part, ...]  # main first; none without branches
    fates: tuple[CallFate, ...]  # of every call of the tree
    num_leaves: int  # of the main conversation, dead ones included

    @property
    def num_kept(self) -> int:
        """Trainable tokens."""
        return sum(part.num_kept for part in self.parts)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Those of the main conversation."""
        return branches_of(self.parts, Role.MAIN)


def branches_of(parts: Iterable[Part], role: Role) -> tuple[Branch, ...]:
    """The branches of a role."""
    return next((part.branches for part in parts if part.role is role), ())


def select(tree: PrefixTree, *, leaf_cap: int, delivered: Collection[str], cut: Collection[str] = ()) -> Selection:
    """Keeps the live branches of the main conversation.

    `delivered` and `cut` are the ids of the calls which the manifest marks so. A call that a later prompt
    extends was delivered, whatever its mark.
    """
    main = [p for p in tree.calls if p.call.role is Role.MAIN and p.call.call_id not in cut]
    valid = _delivered(tree, main, delivered)
    leaves = _leaves(tree, valid)
    if len(leaves) > leaf_cap:
        return Selection((), tuple(_over_branched(p, cut) for p in tree.calls), len(leaves))
    kept = _live(tree, valid, leaves)
    on_path = {node for leaf in kept for node in tree.ancestors(leaf.end_node)}
    owners = _owners(tree, main, on_path, delivered)
    valid_ids = {p.call.call_id for p in valid}
    fates = [_fate(tree, p, owners, on_path, cut, valid_ids) for p in tree.calls]
    branches = tuple(_branches(tree, kept, owners))
    parts = (Part(Role.MAIN, branches),) if branches else ()
    return Selection(parts, tuple(fates), len(leaves))


def dropped_whole(sampled: Iterable[tuple[str, Role, int]], reason: DropReason) -> tuple[CallFate, ...]:
    """The fates of calls (id, role, sampled tokens) that are all dropped for one reason."""
    return tuple(
        CallFate(call_id, role, tokens, 0, {reason: tokens} if tokens else {}) for call_id, role, tokens in sampled
    )


def _delivered(tree: PrefixTree, main: Sequence[Placed], delivered: Collection[str]) -> list[Placed]:
    """The calls whose completion the harness had: marked so, or taken into another call's prompt whole."""
    inside_prompts = {(node, p.call.call_id) for p in main for node in tree.ancestors(p.prompt_node)}
    adopters: dict[int, set[str]] = {}
    for node, call_id in inside_prompts:
        adopters.setdefault(node, set()).add(call_id)
    return [p for p in main if p.call.call_id in delivered or adopters.get(p.end_node, set()) - {p.call.call_id}]


def _leaves(tree: PrefixTree, calls: Sequence[Placed]) -> list[Placed]:
    """One call for each end that no other call goes beyond, by order of arrival."""
    inner = {node for p in calls for node in tree.ancestors(p.end_node)[1:]}
    ends: dict[int, Placed] = {}
    for p in calls:
        if p.end_node not in inner:
            ends[p.end_node] = p  # of equal calls the latest is the one that the harness went on with
    return sorted(ends.values(), key=_arrival)


def _live(tree: PrefixTree, valid: Sequence[Placed], leaves: Sequence[Placed]) -> list[Placed]:
    """The longest leaf of each segment.

    A leaf from before a compaction is dead all the same when the conversation went on from its own prompt
    with something else: then that compaction did not end it.
    """
    prompts = {p.prompt_node for p in valid}
    compactions = sorted(p.call.index for p in tree.calls if p.call.role is Role.COMPACTION)
    best: dict[tuple[int, int], Placed] = {}
    for leaf in leaves:
        topmost = [node for node in tree.ancestors(leaf.end_node) if node in prompts][-1]
        segment = topmost, bisect_left(compactions, leaf.call.index)
        best[segment] = max(best.get(segment, leaf), leaf, key=lambda p: (tree.depth[p.end_node], p.call.index))
    return [
        leaf
        for (topmost, epoch), leaf in sorted(best.items(), key=lambda item: _arrival(item[1]))
        if not any(
            leaf.prompt_node in tree.ancestors(later.end_node)
            for (other, after), later in best.items()
            if other == topmost and after > epoch
        )
    ]


def _owners(
    tree: PrefixTree, main: Sequence[Placed], on_path: Collection[int], delivered: Collection[str]
) -> dict[int, Placed]:
    """Which call's sample counts at each sampled node of the kept branches.

    Several calls may have sampled the same tokens there: one whose completion lives on whole comes first,
    then one that was delivered, then the earliest.
    """
    order = sorted(main, key=lambda p: (p.end_node not in on_path, p.call.call_id not in delivered, *_arrival(p)))
    owners: dict[int, Placed] = {}
    for p in order:
        for node in _sampled_nodes(tree, p):
            if node in on_path:
                owners.setdefault(node, p)
    return owners


def _sampled_nodes(tree: PrefixTree, p: Placed) -> list[int]:
    """The nodes between the call's prompt and its end, which spell its completion, top down."""
    chain = tree.ancestors(p.end_node)
    return chain[: chain.index(p.prompt_node)][::-1]


def _branches(tree: PrefixTree, kept: Sequence[Placed], owners: Mapping[int, Placed]) -> Iterable[Branch]:
    """The kept branches; a node that two of them share has its entries on the first."""
    done: set[int] = set()
    for leaf in kept:
        nodes = [n for n in reversed(tree.ancestors(leaf.end_node)) if n in owners and n not in done]
        done.update(nodes)
        if not nodes:
            continue
        spans = [(owners[n].call, int(tree.depth[n]) - len(tree.tokens[n]), int(tree.depth[n])) for n in nodes]
        yield Branch(
            tokens=tree.spell(leaf.end_node),
            entries=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
            logprobs=np.concatenate([c.logprobs[a - c.prompt_tokens : b - c.prompt_tokens] for c, a, b in spans]),
            versions=np.concatenate([c.versions[a - c.prompt_tokens : b - c.prompt_tokens] for c, a, b in spans]),
        )


def _fate(
    tree: PrefixTree,
    p: Placed,
    owners: Mapping[int, Placed],
    on_path: Collection[int],
    cut: Collection[str],
    valid_ids: Collection[str],
) -> CallFate:
    whole = _reason_for_all(p, cut)
    if whole is not None:
        return _all_dropped(p, whole)
    nodes = _sampled_nodes(tree, p)
    owned = [n for n in nodes if owners.get(n) is p]
    dropped: Counter[DropReason] = Counter()
    for node in nodes:
        if owners.get(node) is p:
            continue
        if node in on_path:
            reason = DropReason.DUPLICATE
        elif owned:
            reason = DropReason.NOT_ADOPTED
        else:
            reason = DropReason.DEAD_LEAF if p.call.call_id in valid_ids else DropReason.UNDELIVERED
        dropped[reason] += len(tree.tokens[node])
    sampled = len(p.call.completion)
    return CallFate(p.call.call_id, p.call.role, sampled, sampled - dropped.total(), dict(dropped))


def _over_branched(p: Placed, cut: Collection[str]) -> CallFate:
    return _all_dropped(p, _reason_for_all(p, cut) or DropReason.OVER_BRANCHED)


def _reason_for_all(p: Placed, cut: Collection[str]) -> DropReason | None:
    if p.call.role is not Role.MAIN:
        return DropReason(f"auxiliary_{p.call.role.value}")
    return DropReason.CUT if p.call.call_id in cut else None


def _all_dropped(p: Placed, reason: DropReason) -> CallFate:
    [fate] = dropped_whole([(p.call.call_id, p.call.role, len(p.call.completion))], reason)
    return fate


def _arrival(p: Placed) -> tuple[int, str]:
    return p.call.index, p.call.call_id
