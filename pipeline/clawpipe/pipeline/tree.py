"""The calls of one rollout -> a prefix tree by token identity. Pure.

The assembler hands over the records of a rollout in any order; `resolve` turns the deltas into calls, `build`
puts every call on the longest prefix of its input that the tree already spells. The tree depends on the
records' content alone: order, duplicates and interleaving of arrival do not show (ClawGym II, arXiv
2608.16798, section on the prefix tree). What a call sampled lies between its prompt's node and its end node;
all else on its path is context to it, tokens that the harness took over from earlier calls included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from clawpipe.pipeline.records import CallRecord, FinishReason, FloatArray, IntArray, Role, floats, ints


class MalformedRecords(ValueError):
    """The records of a rollout contradict each other or themselves. The message names the call."""


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


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """A radix tree in depth-first order, children by their first token. N nodes; node 0 is the empty root.

    Every prompt and every completion ends at a node, and no node without such an end has a single child.
    """

    parent: IntArray  # int32 [N], -1 for the root
    depth: IntArray  # int32 [N], tokens from the root to the node's end
    tokens: tuple[IntArray, ...]  # [N] arrays: what the node adds to its parent's path
    calls: tuple[Placed, ...]  # by order of arrival

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


def resolve(records: Iterable[CallRecord]) -> list[Call]:
    """The calls behind the records, parents before children; a record that comes twice counts once.

    MalformedRecords for a missing parent, a circle, lengths that disagree, version spans with gaps, or two
    records of one call that differ.
    """
    waiting = _unique(records)
    calls: dict[str, Call] = {}
    while waiting:
        before = len(waiting)
        for record in sorted(waiting.values(), key=lambda r: (r.index, r.call_id)):
            parent = None if record.parent is None else calls.get(record.parent)
            if record.parent is None or parent is not None:
                calls[record.call_id] = _call(record, parent)
                del waiting[record.call_id]
        if len(waiting) == before:
            raise MalformedRecords(_unresolved(waiting))
    return list(calls.values())


def build(calls: Iterable[Call]) -> PrefixTree:
    """The tree of the calls. Costs O(new tokens): a child starts at the end of what it shares with its parent."""
    root = _Node(np.empty(0, np.int32), None)
    placed: dict[str, tuple[Call, _Node, _Node]] = {}
    for call in _parents_first(calls):
        node, offset = root, 0
        if call.parent is not None:
            node, offset = _at_depth(placed[call.parent.call_id][2], call.parent_tokens)
        prompt = _insert(node, offset, call.delta)
        placed[call.call_id] = call, prompt, _insert(prompt, len(prompt.tokens), call.completion)
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
    problem = _problem(record, parent)
    if problem:
        raise MalformedRecords(f"call {record.call_id}: {problem}")
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


def _problem(record: CallRecord, parent: Call | None) -> str | None:
    arrays = record.prompt_delta, record.completion_ids, record.logprobs
    if any(len(data) % 4 for data in arrays):
        return "an array's bytes are no multiple of 4"
    delta, sampled, logprobs = (len(data) // 4 for data in arrays)
    if record.parent_tokens + delta != record.prompt_tokens:
        return f"prompt of {record.prompt_tokens} tokens, but {record.parent_tokens} + {delta} recorded"
    if not 0 <= record.parent_tokens <= (parent.total_tokens if parent else 0):
        return f"takes {record.parent_tokens} tokens from a parent that has fewer"
    if record.prompt_tokens < 1 or logprobs != sampled:
        return f"{record.prompt_tokens} prompt tokens, {sampled} sampled tokens, {logprobs} logprobs"
    edges = [0, *(span.end for span in record.versions)]
    starts = [span.start for span in record.versions]
    if edges[-1] != sampled or edges[:-1] != starts or any(a > b for a, b in zip(starts, edges[1:], strict=True)):
        return f"its version spans do not cover its {sampled} sampled tokens"
    if any(ids.size and ids.min() < 0 for ids in (ints(record.prompt_delta), ints(record.completion_ids))):
        return "it has negative token ids"
    return None


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


@dataclass(slots=True, eq=False)
class _Node:
    tokens: IntArray
    parent: _Node | None
    depth: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


def _at_depth(node: _Node, depth: int) -> tuple[_Node, int]:
    """The node on the path to `node` that holds the token before `depth`, and how many of its tokens are above."""
    while node.parent is not None and node.parent.depth >= depth:
        node = node.parent
    return node, depth - (node.depth - len(node.tokens))


def _insert(node: _Node, offset: int, tokens: IntArray) -> _Node:
    """Follows `tokens` from `offset` within `node`, adds what is new; returns the node at whose end they end."""
    while True:
        rest = node.tokens[offset:]
        shared = _common(rest, tokens)
        if shared < len(rest):
            node = _split(node, offset + shared)
        tokens = tokens[shared:]
        if not len(tokens):
            return node
        child = node.children.get(int(tokens[0]))
        if child is None:
            child = _Node(tokens, node, node.depth + len(tokens))
            node.children[int(tokens[0])] = child
            return child
        node, offset = child, 0


def _common(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split(node: _Node, at: int) -> _Node:
    """Cuts the node after `at` tokens; returns the upper part. The lower part stays the same object: ends at it
    stay ends at it."""
    above = node.parent
    assert above is not None, "the root has no tokens to split"
    assert 0 < at < len(node.tokens)
    upper = _Node(node.tokens[:at], above, node.depth - len(node.tokens) + at)
    above.children[int(node.tokens[0])] = upper
    node.tokens, node.parent = node.tokens[at:], upper
    upper.children[int(node.tokens[0])] = node
    return upper


def _freeze(root: _Node, placed: Sequence[tuple[Call, _Node, _Node]]) -> PrefixTree:
    nodes: list[_Node] = []
    number: dict[int, int] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        number[id(node)] = len(nodes)
        nodes.append(node)
        stack += [node.children[first] for first in sorted(node.children, reverse=True)]
    calls = [Placed(call, number[id(prompt)], number[id(end)]) for call, prompt, end in placed]
    return PrefixTree(
        parent=np.array([number[id(n.parent)] if n.parent else -1 for n in nodes], np.int32),
        depth=np.array([n.depth for n in nodes], np.int32),
        tokens=tuple(n.tokens for n in nodes),
        calls=tuple(sorted(calls, key=lambda p: (p.call.index, p.call.call_id))),
    )
