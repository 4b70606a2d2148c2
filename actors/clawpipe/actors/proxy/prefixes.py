"""All token sequences of one rollout as a radix tree: which call shares how much of a new prompt.

Used for the delta encoding of call records. It compares tokens and nothing else, so a delta is right whatever
the harness did to its history, and it holds every shared prefix once.
"""

from __future__ import annotations

import numpy as np

from clawpipe.pipeline.records import IntArray


class _Node:
    __slots__ = ("call", "children", "tokens")

    def __init__(self, tokens: IntArray, call: int) -> None:
        self.tokens = tokens
        self.call = call  # a call whose tokens run through this node
        self.children: dict[int, _Node] = {}


class PrefixIndex:
    """A radix tree of the rollout's calls, each as its prompt followed by its completion."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32), -1)

    def longest(self, ids: IntArray) -> tuple[int | None, int]:
        """(call, shared): a call that shares the most tokens from the start with `ids`, and how many.

        (None, 0) when no call shares any.
        """
        node, shared = self._root, 0
        while shared < len(ids) and (child := node.children.get(int(ids[shared]))):
            step = _common(child.tokens, ids[shared:])
            node, shared = child, shared + step
            if step < len(child.tokens):
                break
        return (node.call, shared) if shared else (None, 0)

    def insert(self, ids: IntArray, call: int) -> None:
        """Adds a call's tokens."""
        node, start = self._root, 0
        while start < len(ids):
            child = node.children.get(int(ids[start]))
            if child is None:
                node.children[int(ids[start])] = _Node(ids[start:].copy(), call)
                return
            step = _common(child.tokens, ids[start:])
            if step < len(child.tokens):
                child = _split(node, child, step)
            node, start = child, start + step


def _common(left: IntArray, right: IntArray) -> int:
    """How many tokens the two share from their start."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    return int(differ.argmax()) if differ.any() else length


def _split(parent: _Node, node: _Node, at: int) -> _Node:
    """Cuts `node` in two; returns the upper half, which takes its place below `parent`."""
    upper = _Node(node.tokens[:at], node.call)
    node.tokens = node.tokens[at:]
    upper.children[int(node.tokens[0])] = node
    parent.children[int(upper.tokens[0])] = upper
    return upper
