"""A radix tree of token sequences while it grows: its nodes are cut where sequences end or fork. Pure.

Numbered and read it is a `tree.PrefixTree`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clawpipe.pipeline.records import IntArray


@dataclass(slots=True, eq=False)
class Node:
    """Some tokens below a parent; the path from the root to a node's end spells a prefix.

    `jump` is a node further up, at a distance that grows with the level: the way up a path of n nodes takes
    O(log n) steps (skew-binary jump pointers; Myers 1983).
    """

    tokens: IntArray  # int32, what the node adds to its parent's path
    parent: Node | None
    depth: int = 0  # tokens from the root to the node's end
    level: int = 0  # nodes above, when the jump was set
    jump: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)

    def hang(self, parent: Node) -> None:
        """Takes its place below `parent`."""
        far = parent.jump
        even = far is not None and far.jump is not None and parent.level - far.level == far.level - far.jump.level
        self.parent, self.level = parent, parent.level + 1
        self.jump = far.jump if even and far is not None else parent


def at_depth(node: Node, depth: int) -> tuple[Node, int]:
    """The node on the path to `node` that holds the token before `depth`, and how many of its tokens are above."""
    while node.parent is not None and node.parent.depth >= depth:
        node = node.jump if node.jump is not None and node.jump.depth >= depth else node.parent
    return node, depth - (node.depth - len(node.tokens))


def insert(node: Node, offset: int, tokens: IntArray) -> Node:
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
            return _grow(node, tokens)
        node, offset = child, 0


def _grow(node: Node, tokens: IntArray) -> Node:
    child = Node(tokens, node, node.depth + len(tokens))
    child.hang(node)
    node.children[int(tokens[0])] = child
    return child


def _common(a: IntArray, b: IntArray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _split(node: Node, at: int) -> Node:
    """Cuts the node after `at` tokens; returns the upper part. The lower part stays the same object: ends at it
    stay ends at it."""
    above = node.parent
    assert above is not None, "the root has no tokens to split"
    assert 0 < at < len(node.tokens)
    upper = Node(node.tokens[:at], above, node.depth - len(node.tokens) + at)
    upper.hang(above)
    above.children[int(node.tokens[0])] = upper
    node.tokens = node.tokens[at:]
    node.hang(upper)
    upper.children[int(node.tokens[0])] = node
    return upper
