"""Core attention over a packed prefix tree, described by one vector and without a dense mask.

The tokens of a forest lie in depth-first order; with end[j] the end of token j's subtree, token i sees token j
exactly when j <= i < end[j] (`pipeline/forest.py`). The plan cuts the tokens into blocks of whole nodes; a block
attends to the keys that all its rows see without a mask, to the rest with a small one, and the partial
results are joined by their log-sum-exp. The gradients of the parts follow exactly from the joined output and
log-sum-exp (FlashAttention-2, arXiv 2307.08691, section 3.1.2).

Shapes: T packed tokens, N query heads, G key-value heads, D head dimension, K keys of a block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_BLOCK_TOKENS = 256
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(Struct, frozen=True, kw_only=True):
    """One call of the kernel: queries [start, stop) against `keys`."""

    start: int
    stop: int
    keys: slice | Tensor  # a contiguous range, or int64 [K]
    causal: bool  # the square of one node
    mask: Tensor | None  # [1, 1, stop - start, K], 0 or -inf, when neither causal nor fully visible
    first: bool  # the block's first call; the second one is joined to it


def node_starts(end_T: Tensor) -> list[int]:
    """First tokens of the tree's nodes, and T. Nodes are maximal runs of equal `end`."""
    changes = (end_T[1:] != end_T[:-1]).nonzero()[:, 0] + 1
    return [0, *changes.tolist(), len(end_T)]


def plan(end_T: Tensor, dtype: torch.dtype = torch.float32, block_tokens: int = _BLOCK_TOKENS) -> list[Block]:
    """Cuts a forest into kernel calls; small nodes are merged up to `block_tokens` tokens.

    Args:
        end_T: int64 [T] on the CPU.
        dtype: of the masks, the same as the queries'.
    """
    cuts = node_starts(end_T)
    blocks: list[Block] = []
    node = 0
    while node < len(cuts) - 1:
        start, after = cuts[node], node + 1
        while after < len(cuts) - 1 and cuts[after + 1] - start <= block_tokens:
            after += 1
        blocks += _block_calls(end_T, start, cuts[after], after == node + 1, dtype)
        node = after
    return blocks


def _block_calls(end_T: Tensor, start: int, stop: int, one_node: bool, dtype: torch.dtype) -> list[Block]:
    earlier = end_T[:start]
    partial = ((earlier > start) & (earlier < stop)).nonzero()[:, 0]
    seen_by_all = (earlier >= stop).nonzero()[:, 0]
    keys: slice | Tensor = slice(start, stop)
    mask = None
    if not one_node or len(partial):
        index = torch.cat([partial, torch.arange(start, stop)])
        mask = _mask(end_T, start, stop, index, dtype)
        keys = index if len(partial) else keys
    calls = [Block(start=start, stop=stop, keys=keys, causal=mask is None, mask=mask, first=True)]
    if len(seen_by_all):
        ancestors = _as_slice(seen_by_all)
        calls.append(Block(start=start, stop=stop, keys=ancestors, causal=False, mask=None, first=False))
    return calls


def _mask(end_T: Tensor, start: int, stop: int, index_K: Tensor, dtype: torch.dtype) -> Tensor:
    rows = torch.arange(start, stop)[:, None]
    visible = (index_K <= rows) & (rows < end_T[index_K])
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[None, None]


def _as_slice(index: Tensor) -> slice | Tensor:
    first, last = int(index[0]), int(index[-1]) + 1
    return slice(first, last) if last - first == len(index) else index


class _TreeAttention(torch.autograd.Function):
    """q [1, N, T, D], k and v [1, G, T, D] -> [1, N, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for block in blocks:
            rows, keys = slice(block.start, block.stop), block.keys
            part, part_lse = _forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, block.causal, attn_mask=block.mask, scale=scale
            )
            if block.first:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                weight = torch.sigmoid(part_lse - lse[:, :, rows])
                lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], part_lse)
                out[:, :, rows].lerp_(part, weight[..., None].to(out.dtype))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            rows, keys = slice(block.start, block.stop), block.keys
            part_q, part_k, part_v = _backward(
                grads[0][:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                block.causal,
                attn_mask=block.mask,
                scale=ctx.scale,
            )
            if block.first:
                grad_q[:, :, rows] = part_q
            else:
                grad_q[:, :, rows] += part_q
            _accumulate(grad_k, keys, part_k)
            _accumulate(grad_v, keys, part_v)
        return grad_q, grad_k, grad_v, None, None


def _accumulate(total: Tensor, keys: slice | Tensor, part: Tensor) -> None:
    if isinstance(keys, slice):
        total[:, :, keys] += part
    else:
        total.index_add_(2, keys, part)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float) -> Tensor:
    """Attention of a packed forest on the CPU.

    Args:
        q: [1, N, T, D]; k, v: [1, G, T, D] with N a multiple of G; float32 or bfloat16.
        blocks: what `plan` made of the forest's `end`, with masks of q's dtype.
        scale: factor of the scores before the softmax.

    Returns:
        [1, N, T, D].
    """
    out: Tensor = _TreeAttention.apply(q, k, v, blocks, scale)  # type: ignore[no-untyped-call]
    return out


class VarlenPlan(Struct, frozen=True, kw_only=True):
    """The same forest as one variable-length call: a sequence per node, its keys the path from the root."""

    keys: Tensor  # int64 [sum of path lengths]
    query_ends: Tensor  # int32 [nodes + 1], cumulative
    key_ends: Tensor  # int32 [nodes + 1], cumulative
    longest_node: int
    longest_path: int


def varlen_plan(end_T: Tensor, device: torch.device) -> VarlenPlan:
    """Node and path lengths of a forest, on the model's device.

    Args:
        end_T: int64 [T] on the CPU.
    """
    cuts = node_starts(end_T)
    paths: list[Tensor] = []
    for start, stop in pairwise(cuts):
        ancestors = (end_T[:start] >= stop).nonzero()[:, 0]
        paths.append(torch.cat([ancestors, torch.arange(start, stop)]))
    lengths = torch.tensor([0, *(len(path) for path in paths)], dtype=torch.int32)
    nodes = torch.tensor(cuts, dtype=torch.int32)
    return VarlenPlan(
        keys=torch.cat(paths).to(device),
        query_ends=nodes.to(device),
        key_ends=lengths.cumsum(0, dtype=torch.int32).to(device),
        longest_node=int((nodes[1:] - nodes[:-1]).max()),
        longest_path=int(lengths.max()),
    )


def varlen_tree_attention(q: Tensor, k: Tensor, v: Tensor, forest: VarlenPlan, scale: float) -> Tensor:
    """The forest as one FlashAttention call, causal from the bottom right: a node's last token sees its path.

    Needs a CUDA device, which the tests do not have: they check the plan, not this call.

    Args:
        q: [T, N, D]; k, v: [T, G, D] on a CUDA device, float16 or bfloat16.

    Returns:
        [T, N, D].
    """
    out = varlen_attn(
        q,
        k[forest.keys],
        v[forest.keys],
        forest.query_ends,
        forest.key_ends,
        forest.longest_node,
        forest.longest_path,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


class Planner:
    """Keeps the plan of the forest that is being computed, so that the layers share it.

    The key is the identity of the `end` vector's memory; the kept reference rules out that the memory is reused.
    """

    def __init__(self) -> None:
        self._end: Tensor | None = None
        self._version = -1
        self._dtype: torch.dtype | None = None
        self._plan: list[Block] | VarlenPlan | None = None

    def blocks(self, end_T: Tensor, dtype: torch.dtype) -> list[Block]:
        """The CPU plan of a forest."""
        if not self._holds(end_T, dtype) or not isinstance(self._plan, list):
            self._keep(end_T, dtype, plan(end_T, dtype))
        assert isinstance(self._plan, list)
        return self._plan

    def varlen(self, end_T: Tensor, device: torch.device) -> VarlenPlan:
        """The CUDA plan of a forest."""
        if not self._holds(end_T, None) or not isinstance(self._plan, VarlenPlan):
            self._keep(end_T, None, varlen_plan(end_T.cpu(), device))
        assert isinstance(self._plan, VarlenPlan)
        return self._plan

    def _holds(self, end_T: Tensor, dtype: torch.dtype | None) -> bool:
        kept = self._end
        return (
            kept is not None
            and kept.data_ptr() == end_T.data_ptr()
            and kept.shape == end_T.shape
            and self._version == end_T._version
            and self._dtype == dtype
        )

    def _keep(self, end_T: Tensor, dtype: torch.dtype | None, made: list[Block] | VarlenPlan) -> None:
        self._end, self._version, self._dtype, self._plan = end_T, end_T._version, dtype, made


class TreeCoreAttention(torch.nn.Module):
    """Megatron's core attention slot; the forest's `end` vector arrives in the place of the attention mask."""

    def __init__(self, *, planner: Planner, config: Any, softmax_scale: float | None = None, **_kwargs: object) -> None:
        super().__init__()
        self._planner = planner
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_kwargs: object) -> Tensor:
        """query [T, 1, N, D], key and value [T, 1, G, D], attention_mask = end_T int64 [T] -> [T, 1, N * D]."""
        if query.is_cuda:
            forest = self._planner.varlen(attention_mask, query.device)
            out = varlen_tree_attention(query[:, 0], key[:, 0], value[:, 0], forest, self._scale)
            return out.flatten(1)[:, None]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        blocks = self._planner.blocks(attention_mask, query.dtype)
        return tree_attention(q, k, v, blocks, self._scale).permute(2, 0, 1, 3).flatten(2)
