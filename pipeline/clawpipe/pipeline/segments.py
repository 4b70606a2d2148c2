"""A rollout's tree -> the branches that are trained on, and a reason for every token that is not. Pure.

After ClawGym II (arXiv 2608.16798, section on trajectory filtering): segments are delimited by compaction, in
each the leaf with the longest valid continuation is kept; auxiliary calls are left out of the loss; a rollout
with more leaves than a threshold is dropped whole. Ours: what a segment is follows from the tree (the calls
below one topmost prompt, cut at recorded compactions), so that neither order of arrival nor interleaved
sub-agents matter; and where only a part of a completion lives on in later prompts, that part is trained. With
`auxiliary`, the calls of sub-agents and compactions are no longer left out: each of the two roles gets a part of
its own. A sub-agent's segment is all that is below one topmost prompt; every compaction is a leaf of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from clawpipe.pipeline.leaves import Leaves, leaves_of
from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import Role
from clawpipe.pipeline.tree import Placed, PrefixTree

# Of which calls are trained ever, in the order in which they take a token that several of them sampled.
TRAINED_ROLES = Role.MAIN, Role.SUBAGENT, Role.COMPACTION


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
    QUARANTINED = "quarantined"  # of a record that was set aside
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


def select(
    tree: PrefixTree, *, leaf_cap: int, delivered: Collection[str], cut: Collection[str] = (), auxiliary: bool = False
) -> Selection:
    """Keeps the live branches of the main conversation and, with `auxiliary`, of sub-agents and compactions.

    `delivered` and `cut` are the ids of the calls which the manifest marks so. A call that a later prompt of its
    role extends was delivered, whatever its mark. Of the roles that sampled the same token at the same place, the
    first one trains it: main, then sub-agents, then compactions.
    """
    roles = TRAINED_ROLES if auxiliary else TRAINED_ROLES[:1]
    found = [leaves_of(tree, role, delivered, cut) for role in roles]
    num_leaves = found[0].num_leaves
    if num_leaves > leaf_cap:
        return Selection((), tuple(_over_branched(p, roles, cut) for p in tree.calls), num_leaves)
    owners: dict[int, Placed] = {}
    for each in found:
        _take(owners, tree, each, delivered)
    parts = [Part(each.role, tuple(_branches(tree, each, owners))) for each in found]
    valid_ids = {call_id for each in found for call_id in each.valid_ids}
    fates = tuple(_fate(tree, p, _reason_for_all(p, roles, cut), owners, valid_ids) for p in tree.calls)
    return Selection(tuple(part for part in parts if part.branches), fates, num_leaves)


def dropped_whole(sampled: Iterable[tuple[str, Role, int]], reason: DropReason) -> tuple[CallFate, ...]:
    """The fates of calls (id, role, sampled tokens) that are all dropped for one reason."""
    return tuple(
        CallFate(call_id, role, tokens, 0, {reason: tokens} if tokens else {}) for call_id, role, tokens in sampled
    )


def _take(owners: dict[int, Placed], tree: PrefixTree, leaves: Leaves, delivered: Collection[str]) -> None:
    """Notes whose sample counts at each sampled node of the kept branches, where no earlier role has it.

    Several calls may have sampled the same tokens there: one whose completion lives on whole comes first,
    then one that was delivered, then the earliest.
    """
    on_path = _on_path(tree, leaves.kept)

    def rank(p: Placed) -> tuple[bool, bool, int, str]:
        return p.end_node not in on_path, p.call.call_id not in delivered, *p.arrival

    for p in sorted(leaves.calls, key=rank):
        for node in _sampled_nodes(tree, p):
            if node in on_path:
                owners.setdefault(node, p)


def _on_path(tree: PrefixTree, leaves: Iterable[Placed]) -> set[int]:
    """The nodes on the paths to the leaves, the root left out."""
    found: set[int] = set()
    for leaf in leaves:
        node = leaf.end_node
        while node and node not in found:
            found.add(node)
            node = int(tree.parent[node])
    return found


def _sampled_nodes(tree: PrefixTree, p: Placed) -> list[int]:
    """The nodes between the call's prompt and its end, which spell its completion, top down."""
    nodes = []
    node = p.end_node
    while node != p.prompt_node:
        nodes.append(node)
        node = int(tree.parent[node])
    return nodes[::-1]


def _branches(tree: PrefixTree, leaves: Leaves, owners: Mapping[int, Placed]) -> Iterator[Branch]:
    """The kept branches; a node that two of them share has its entries on the first."""
    done: set[int] = set()
    for leaf in leaves.kept:
        path = reversed(tree.ancestors(leaf.end_node))
        nodes = [n for n in path if n in owners and owners[n].call.role is leaves.role and n not in done]
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
    whole: DropReason | None,
    owners: Mapping[int, Placed],
    valid_ids: Collection[str],
) -> CallFate:
    if whole is not None:
        return _all_dropped(p, whole)
    nodes = _sampled_nodes(tree, p)
    owned = any(owners.get(n) is p for n in nodes)
    dropped: Counter[DropReason] = Counter()
    for node in nodes:
        if owners.get(node) is p:
            continue
        if node in owners:
            reason = DropReason.DUPLICATE
        elif owned:
            reason = DropReason.NOT_ADOPTED
        else:
            reason = DropReason.DEAD_LEAF if p.call.call_id in valid_ids else DropReason.UNDELIVERED
        dropped[reason] += len(tree.tokens[node])
    sampled = len(p.call.completion)
    return CallFate(p.call.call_id, p.call.role, sampled, sampled - dropped.total(), dict(dropped))


def _over_branched(p: Placed, roles: Collection[Role], cut: Collection[str]) -> CallFate:
    return _all_dropped(p, _reason_for_all(p, roles, cut) or DropReason.OVER_BRANCHED)


def _reason_for_all(p: Placed, roles: Collection[Role], cut: Collection[str]) -> DropReason | None:
    if p.call.role not in roles:
        return DropReason(f"auxiliary_{p.call.role.value}")
    return DropReason.CUT if p.call.call_id in cut else None


def _all_dropped(p: Placed, reason: DropReason) -> CallFate:
    [fate] = dropped_whole([(p.call.call_id, p.call.role, len(p.call.completion))], reason)
    return fate
