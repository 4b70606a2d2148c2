"""How much memory one rank of the learner needs: every large tensor of `model`, `optimizer` and `numerics`, counted.

Pure arithmetic over a model's shape and a layout, without torch. It describes this code as it is: gradient buffers
and optimizer states are not sharded over the data-parallel ranks, and a pipeline does not exist.
Where the plan has to assume something about the data, it is a constant below.

Bytes are bytes, GB are 10**9 of them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from clawpipe.learner.shape import ModelShape
from clawpipe.pipeline.config import ParallelConfig, Recompute

# T packed tokens, K gathered keys, R token copies at this rank's experts, V vocabulary, H hidden, F feed-forward
# N query heads, G key-value heads, D head dimension, P tensor-parallel size

GB = 10**9
FLOAT = 4  # bytes of a float32
INT = 8  # bytes of an int64

MAX_LOGITS = 1 << 27  # of one chunk of rows (`numerics`): 512 MiB in float32
EXPERT_IMBALANCE = 1.5  # token copies at the busiest expert rank over the mean: nothing balances the router
ENTRY_BYTES = 128  # of one loss entry: indices (int64) and the loss's columns (float32), about 20 of them
MARGIN = 0.08  # of the device: CUDA context, NCCL buffers, the allocator's fragments
DEVICES_GB = (80, 141)  # that every plan is compared with: H100 and A100, H200

_BYTES = {"bfloat16": 2, "float32": 4}


class Load(Struct, frozen=True, kw_only=True):
    """What a rank computes on."""

    tokens: int  # of the largest forest
    readers: int  # nodes whose paths hold one token of it: each gathers the token's key anew
    dtype: Literal["float32", "bfloat16"]
    recompute: Recompute = "none"
    value_model: bool = False
    fused: bool = True  # the kernels of CUDA; False: the CPU's, which keep more


class Parameters(Struct, frozen=True, kw_only=True):
    """Numbers of parameters that one rank holds of one model."""

    embedding: int
    output: int  # 0 when it is the embedding
    attention: int
    experts: int  # or the dense feed-forward layers
    router: int
    norms: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.embedding + self.output + self.attention + self.experts + self.router + self.norms


class Item(Struct, frozen=True, kw_only=True):
    """One line of the plan."""

    name: str
    num_bytes: int
    how: str


def parameters(shape: ModelShape, parallel: ParallelConfig) -> Parameters:
    """What a rank holds: vocabulary, heads and dense feed-forward split over tensor ranks, experts over expert x
    expert_tensor ranks; router and norms on every rank."""
    heads = shape.num_heads + 2 * shape.num_kv_heads + shape.num_heads  # q, k, v; output projection
    vocabulary = shape.vocab_size * shape.hidden_size // parallel.tensor
    per_layer_norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    return Parameters(
        embedding=vocabulary,
        output=0 if shape.tied_embeddings else vocabulary,
        attention=shape.num_layers * heads * shape.head_dim * shape.hidden_size // parallel.tensor,
        experts=shape.num_layers * _feed_forward(shape, parallel),
        router=shape.num_layers * shape.num_experts * shape.hidden_size,
        norms=shape.num_layers * per_layer_norms + shape.hidden_size,
    )


def _feed_forward(shape: ModelShape, parallel: ParallelConfig) -> int:
    one = 3 * shape.ffn_size * shape.hidden_size  # gate, up, down
    if not shape.num_experts:
        return one // parallel.tensor
    return shape.num_experts // parallel.expert * one // parallel.expert_tensor


def active_parameters(shape: ModelShape) -> int:
    """How many parameters of the whole model work on one token."""
    held = parameters(shape, ParallelConfig())
    idle = held.experts - held.experts * shape.experts_per_token // shape.num_experts if shape.num_experts else 0
    return held.total - idle


def value_parameters(shape: ModelShape, parallel: ParallelConfig) -> int:
    """A value model of the same shape: the trunk, and a head [1, H] on every rank in the output layer's place."""
    held = parameters(shape, parallel)
    return held.total - held.output + shape.hidden_size


def state_bytes(num_parameters: int, dtype: str) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of so many parameters, in bytes.

    Gradients: Megatron's float32 buffer (`optimizer.wrap`: grad_reduce_in_fp32, no distributed optimizer). Adam:
    two float32 moments, and float32 weights beside those in bfloat16. There that is 18 bytes a parameter, ZeRO's 16
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12) with gradients in float32; in float32, 16.
    """
    adam = 2 * FLOAT + (FLOAT if dtype == "bfloat16" else 0)
    return num_parameters * _BYTES[dtype], num_parameters * FLOAT, num_parameters * adam


def _sequence(load: Load, parallel: ParallelConfig) -> int:
    """Tokens of a rank where the sequence is split over the tensor ranks; `numerics` pads to a multiple."""
    return -(-load.tokens // parallel.tensor)


def _copies(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """R: token copies at a rank's experts. All expert-tensor ranks see the copies of each other."""
    mean = _sequence(load, parallel) * max(shape.experts_per_token, 1) * parallel.expert_tensor
    return int(mean * EXPERT_IMBALANCE) if parallel.expert > 1 else mean


def attention_bytes(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """What one layer's attention keeps for its backward pass.

    Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1, equation 1) counts 11 sbh + 5 as^2 b: input and output
    of the projections, q, k, v and the score matrix. Here: sequence-parallel input and its norm 2 H / P; q, k, v of
    the projection (N + 2 G) D / P; with norms of q and k, q once more; q after its rotation and the output, 2 N D / P.
    No scores but their log-sum-exp, float32 N / P (FlashAttention-2, arXiv 2307.08691, section 3.1.1). Keys and
    values are gathered, a path for each node of the forest: 2 K G D / P, K = T x readers
    (`tree_attention.varlen_tree_attention`).
    The CPU's norms keep one more product each, its rotation four tables [T, D], and it gathers no keys.
    """
    size, split, tokens = _BYTES[load.dtype], parallel.tensor, load.tokens
    queries = tokens * shape.num_heads * shape.head_dim // split
    keys = tokens * shape.num_kv_heads * shape.head_dim // split
    kept = (2 if load.fused else 3) * _sequence(load, parallel) * shape.hidden_size
    kept += 3 * queries + 2 * keys
    kept += queries if shape.qk_norm else 0
    kept += 2 * keys * load.readers if load.fused else keys + 4 * tokens * shape.head_dim
    kept += queries + keys if shape.qk_norm and not load.fused else 0
    return kept * size + tokens * shape.num_heads // split * FLOAT


def feed_forward_bytes(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """What one layer's experts, or its dense feed-forward layer, keep for the backward pass.

    Korthikanti et al. 2022 (section 4.1) counts 19 sbh with a GELU of 4 h. Here, with SwiGLU: the input and its norm
    2 H / P; gate and up 2 F, their product F. A mixture does that for R token copies, whose sorted hidden states R H
    are kept too, beside the router's probabilities [T / P, E] in float32 and the copies' indices.
    The CPU's kernels keep one more product of the norm and two of SwiGLU, one more where the router's weight is in it.
    """
    size, rows = _BYTES[load.dtype], _sequence(load, parallel)
    kept = (2 if load.fused else 3) * rows * shape.hidden_size * size
    if not shape.num_experts:
        return kept + (3 if load.fused else 5) * load.tokens * shape.ffn_size // parallel.tensor * size
    copies = _copies(shape, parallel, load)
    products = (3 if load.fused else 6) * shape.ffn_size // parallel.expert_tensor
    routing = 2 * rows * shape.num_experts * FLOAT + copies * (INT + FLOAT)
    return kept + copies * (shape.hidden_size + products) * size + routing


def kept_bytes(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """What the layers keep between forward and backward pass.

    Recomputed, a layer keeps its input alone (Chen et al. 2016, arXiv 1604.06174), and the layer that is at work all
    of the rest. The last norm keeps its input.
    """
    layer = attention_bytes(shape, parallel, load) + feed_forward_bytes(shape, parallel, load)
    entry = _sequence(load, parallel) * shape.hidden_size * _BYTES[load.dtype]
    last = (1 if load.fused else 2) * entry
    if load.recompute == "full":
        return shape.num_layers * entry + layer + last
    return shape.num_layers * layer + last


def backward_bytes(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """What one layer's backward pass needs beside what was kept: the larger of attention and feed-forward.

    Attention: gradients of the gathered keys and values, first for each query head (FlashAttention-2 sums over a
    group's heads afterwards), 2 K (N + G) D / P, and of q in float32. Experts: gradients of what they kept, and the
    copies on both sides of the all-to-all.
    """
    size, split = _BYTES[load.dtype], parallel.tensor
    grouped = shape.num_heads if shape.num_heads != shape.num_kv_heads else 0
    keys = 2 * load.tokens * load.readers * (grouped + shape.num_kv_heads) * shape.head_dim // split
    queries = load.tokens * shape.num_heads * shape.head_dim // split
    attention = (keys + queries) * size + queries * FLOAT
    if not shape.num_experts:
        return max(attention, 4 * load.tokens * shape.ffn_size // split * size)
    products = 3 * shape.ffn_size // parallel.expert_tensor
    return max(attention, _copies(shape, parallel, load) * (3 * shape.hidden_size + products) * size)


def logits_bytes(shape: ModelShape, parallel: ParallelConfig, load: Load) -> int:
    """Output rows and one chunk of logits (`numerics._Head`).

    Whole hidden states [T, H] and those of the rows with an entry, each with its gradient. A chunk has at most
    MAX_LOGITS logits over all tensor ranks; of each a rank holds the logit in the model's dtype, in float32, divided
    by the temperature or exponentiated, and its gradient.
    """
    size = _BYTES[load.dtype]
    rows = min(load.tokens, max(1, MAX_LOGITS // shape.vocab_size))
    chunk = rows * shape.vocab_size // parallel.tensor * (size + 3 * FLOAT)
    return 4 * load.tokens * shape.hidden_size * size + chunk


def packing_bytes(shape: ModelShape, load: Load) -> int:
    """The forest on the device: tokens and positions, rotary angles, the gathered keys' indices, loss entries.

    The mask is the vector `end`, one int64 for each token, and its plan (`tree_attention.Planner`).
    """
    angles = 3 * shape.head_dim // 2 * FLOAT  # half of them, and both halves
    return load.tokens * (3 * INT + angles + load.readers * INT + ENTRY_BYTES)


def memory_plan(shape: ModelShape, parallel: ParallelConfig, load: Load) -> tuple[Item, ...]:
    """Everything that a rank holds when it holds most: in the backward pass of the largest forest.

    Policy and value model compute one after the other, so that activations count once.
    """
    policy = parameters(shape, parallel).total
    value = value_parameters(shape, parallel) if load.value_model else 0
    weights, gradients, optimizer = state_bytes(policy + value, load.dtype)
    count = f"{policy / GB:.2f} B parameters" + (f" and {value / GB:.2f} B of the value model" if value else "")
    adam = "float32 weights and two moments" if load.dtype == "bfloat16" else "two moments"
    kept = "all layers' inputs, one layer whole" if load.recompute == "full" else "all layers whole"
    lines = (
        ("weights", weights, f"{count}, {load.dtype}"),
        ("gradients", gradients, "float32 buffers, not sharded over data ranks"),
        ("optimizer", optimizer, f"{adam}, not sharded over data ranks"),
        (
            "activations",
            kept_bytes(shape, parallel, load),
            f"{load.tokens} tokens: {kept}{_imbalance(shape, parallel)}",
        ),
        ("backward", backward_bytes(shape, parallel, load), f"of one layer, {load.readers} nodes read a token"),
        ("logits", logits_bytes(shape, parallel, load), "output rows, and one chunk in float32"),
        ("tree packing", packing_bytes(shape, load), "tokens, positions, mask vector, key indices, loss entries"),
    )
    return tuple(Item(name=name, num_bytes=size, how=how) for name, size, how in lines)


def _imbalance(shape: ModelShape, parallel: ParallelConfig) -> str:
    if not shape.num_experts or parallel.expert == 1:
        return ""
    return f"; busiest experts {EXPERT_IMBALANCE} x the mean"


def needed_gb(items: tuple[Item, ...]) -> float:
    """Sum of the plan in GB, without the margin."""
    return sum(item.num_bytes for item in items) / GB


def left_gb(items: tuple[Item, ...], device_gb: float) -> float:
    """What stays free on a device beside plan and margin; negative: what it misses."""
    return (1 - MARGIN) * device_gb - needed_gb(items)


def table(items: tuple[Item, ...], device_gb: float) -> tuple[str, ...]:
    """The plan as lines of text, compared with this device and with the usual ones."""
    rows = [_row(item.name, item.num_bytes / GB, item.how) for item in items]
    rows.append(_row("sum", needed_gb(items), "of one rank"))
    for size in sorted({device_gb, *DEVICES_GB}):
        left = left_gb(items, size)
        verdict = "left" if left >= 0 else "too few"
        chosen = " (device_memory_gb)" if size == device_gb else ""
        how = f"{verdict} beside {100 * MARGIN:.0f} % for CUDA, NCCL and fragments{chosen}"
        rows.append(_row(f"{size:g} GB device", abs(left), how))
    return tuple(rows)


def _row(name: str, size_gb: float, how: str) -> str:
    return f"  {name:<14}{size_gb:8.2f} GB  {how}"


def refusal(items: tuple[Item, ...], device_gb: float, load: Load) -> str | None:
    """Why the plan does not fit, and what to change; None when it does."""
    left = left_gb(items, device_gb)
    if left >= 0:
        return None
    largest = max(items, key=lambda item: item.num_bytes)
    recompute = "" if load.recompute == "full" else 'set recompute = "full", '
    return (
        f"[learner] device_memory_gb = {device_gb:g}: a rank needs {needed_gb(items):.1f} GB and has "
        f"{(1 - MARGIN) * device_gb:.1f} GB, {-left:.1f} GB too few ({largest.name} {largest.num_bytes / GB:.1f} GB); "
        f"{recompute}raise [learner.parallel] tensor or expert, lower pack_tokens, or take larger devices"
    )
