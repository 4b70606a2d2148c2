"""The calls of one rollout -> a prefix tree by token identity. Pure.

The assembler hands over the records of a rollout in any order; `resolve` turns the deltas into calls, `build`
puts every call on the longest prefix of its input that the tree already spells. The tree depends on the
records' content alone: order, duplicates and interleaving of arrival do not show (ClawGym II, arXiv
2608.16798, section on the prefix tree). What a call sampled lies between its prompt's node and its end node;
all else on its path is context to it, tokens that the harness took over from earlier calls included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np

from clawpipe.pipeline.radix import Node, at_depth, insert
from clawpipe.pipeline.records import CallRecord, FinishReason, FloatArray, IntArray, Role, floats, ints

ADDRESS_BYTES = 16


class MalformedRecords(ValueError):
    """The records of a rollout contradict each other. The message names the call."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call. Its prompt is the first `parent_tokens` tokens of its parent's prompt + completion, then
    `delta`. The arrays are views of the record's bytes."""

    call_id: str
    index: int  # order of arrival
    role: Role
    finish_reason: FinishReason
    parent: Call | None
    parent_tokens: int
    delta: IntArray  # int32 [P - parent_tokens]
    completion: IntArray  # int32 [C]
    logprobs: FloatArray  # float32 [C]
    versions: IntArray  # int32 [C], the weight version that sampled each token

    @property
    def prompt_tokens(self) -> int:
        """P."""
        return self.parent_tokens + len(self.delta)

    @property
    def total_tokens(self) -> int:
        """P + C."""
        return self.prompt_tokens + len(self.completion)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A call in the tree: the path to `prompt_node` spells its prompt, on to `end_node` its completion."""

    call: Call
    prompt_node: int
    end_node: int

    @property
    def arrival(self) -> tuple[int, str]:
        """Orders the calls of a rollout as they arrived."""
        return self.call.index, self.call.call_id


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """A radix tree in depth-first order, children by their first token. N nodes; node 0 is the empty root.

    Every prompt and every completion ends at a node, and no node without such an end has a single child.
    """

    parent: IntArray  # int32 [N], -1 for the root
    end: IntArray  # int32 [N], the nodes of a node's subtree, itself included, are node..end - 1
    depth: IntArray  # int32 [N], tokens from the root to the node's end
    tokens: tuple[IntArray, ...]  # [N] arrays: what the node adds to its parent's path
    calls: tuple[Placed, ...]  # by order of arrival

    def is_within(self, node: int, above: int) -> bool:
        """Whether the node lies in the subtree of `above`, itself included."""
        return above <= node < int(self.end[above])

    def ancestors(self, node: int) -> list[int]:
        """The node, its parent, and so on up to the root."""
        chain = []
        while node >= 0:
            chain.append(node)
            node = int(self.parent[node])
        return chain

    def spell(self, node: int) -> IntArray:
        """All tokens from the root to the node's end, int32 [depth]."""
        return np.concatenate([self.tokens[each] for each in reversed(self.ancestors(node))])

    def addresses(self) -> tuple[bytes, ...]:
        """[N]: a digest of the tokens on each node's path, whatever nodes the path is cut into."""
        hashers = [blake2b(digest_size=ADDRESS_BYTES)]
        for above, tokens in zip(self.parent[1:].tolist(), self.tokens[1:], strict=True):
            hasher = hashers[above].copy()
            hasher.update(tokens.data)
            hashers.append(hasher)
        return tuple(hasher.digest() for hasher in hashers)

    def digest(self) -> str:
        """Equal exactly for trees of the same calls with the same tokens, logprobs and versions. O(unique tokens)."""
        addresses = self.addresses()
        whole = blake2b(digest_size=ADDRESS_BYTES)
        for placed in self.calls:
            call = placed.call
            ends = addresses[placed.prompt_node], addresses[placed.end_node]
            sizes = call.prompt_tokens, len(call.completion)
            whole.update(msgspec.msgpack.encode((call.call_id, call.index, call.role, call.finish_reason, sizes, ends)))
            whole.update(call.logprobs.data)
            whole.update(call.versions.data)
        return whole.hexdigest()


def resolve(records: Iterable[CallRecord]) -> list[Call]:
    """The calls behind the records, parents before children; a record that comes twice counts once.

    The records are sound each (`soundness.problem`). MalformedRecords for a missing parent or one that is too
    short, a circle, or two records of one call that differ.
    """
    unique = _unique(records)
    children: dict[str | None, list[CallRecord]] = {}
    # The calls that fork from one parent from top to bottom: each then cuts only what is left below the one before.
    for record in sorted(unique.values(), key=lambda r: (r.parent_tokens, r.index, r.call_id)):
        children.setdefault(record.parent, []).append(record)
    calls: dict[str, Call] = {}
    ready = deque(children.get(None, ()))
    while ready:
        record = ready.popleft()
        calls[record.call_id] = _call(record, None if record.parent is None else calls[record.parent])
        ready.extend(children.get(record.call_id, ()))
    if len(calls) < len(unique):
        raise MalformedRecords(_unresolved({k: r for k, r in sorted(unique.items()) if k not in calls}))
    return list(calls.values())


def build(calls: Iterable[Call]) -> PrefixTree:
    """The tree of the calls. Costs O(new tokens): a child starts at the end of what it shares with its parent."""
    root = Node(np.empty(0, np.int32), None)
    placed: dict[str, tuple[Call, Node, Node]] = {}
    for call in _parents_first(calls):
        node, offset = root, 0
        if call.parent is not None:
            node, offset = at_depth(placed[call.parent.call_id][2], call.parent_tokens)
        prompt = insert(node, offset, call.delta)
        placed[call.call_id] = call, prompt, insert(prompt, len(prompt.tokens), call.completion)
    return _freeze(root, list(placed.values()))


def _unique(records: Iterable[CallRecord]) -> dict[str, CallRecord]:
    found: dict[str, CallRecord] = {}
    for record in records:
        if found.setdefault(record.call_id, record) != record:
            raise MalformedRecords(f"call {record.call_id}: came twice with different content")
    return found


def _unresolved(waiting: dict[str, CallRecord]) -> str:
    for record in waiting.values():
        if record.parent not in waiting:
            return f"call {record.call_id}: its parent {record.parent} is missing"
    return f"call {min(waiting)}: it is its own ancestor"


def _call(record: CallRecord, parent: Call | None) -> Call:
    wrong = _too_short(parent, record.parent_tokens)
    if wrong:
        raise MalformedRecords(f"call {record.call_id}: {wrong}")
    spans = record.versions
    return Call(
        call_id=record.call_id,
        index=record.index,
        role=record.role,
        finish_reason=record.finish_reason,
        parent=parent,
        parent_tokens=record.parent_tokens,
        delta=ints(record.prompt_delta),
        completion=ints(record.completion_ids),
        logprobs=floats(record.logprobs),
        versions=np.repeat(
            np.array([span.version for span in spans], np.int32), [span.end - span.start for span in spans]
        ),
    )


def _too_short(parent: Call | None, parent_tokens: int) -> str | None:
    if parent is None or parent_tokens <= parent.total_tokens:
        return None
    return f"takes {parent_tokens} tokens from a parent that has {parent.total_tokens}"


def _parents_first(calls: Iterable[Call]) -> Iterator[Call]:
    seen: set[str] = set()
    for call in calls:
        chain = []
        above: Call | None = call
        while above is not None and above.call_id not in seen:
            seen.add(above.call_id)
            chain.append(above)
            above = above.parent
        yield from reversed(chain)


def _freeze(root: Node, placed: Sequence[tuple[Call, Node, Node]]) -> PrefixTree:
    nodes: list[Node] = []
    number: dict[int, int] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        number[id(node)] = len(nodes)
        nodes.append(node)
        stack += [node.children[first] for first in sorted(node.children, reverse=True)]
    parent = [number[id(n.parent)] if n.parent else -1 for n in nodes]
    calls = [Placed(call, number[id(prompt)], number[id(end)]) for call, prompt, end in placed]
    return PrefixTree(
        parent=np.array(parent, np.int32),
        end=np.array(_subtree_ends(parent), np.int32),
        depth=np.array([n.depth for n in nodes], np.int32),
        tokens=tuple(n.tokens for n in nodes),
        calls=tuple(sorted(calls, key=lambda p: p.arrival)),
    )


def _subtree_ends(parent: Sequence[int]) -> list[int]:
    """From parents in depth-first order."""
    ends = list(range(1, len(parent) + 1))
    for node in range(len(parent) - 1, 0, -1):
        ends[parent[node]] = max(ends[parent[node]], ends[node])
    return ends
