"""The core attention against dense masked attention."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from clawpipe.learner.tree_attention import Planner, node_starts, plan, tree_attention, varlen_plan

HEADS, GROUPS, DIM = 4, 2, 16


@st.composite
def ends(draw: st.DrawFn) -> torch.Tensor:
    """`end` of a random forest, from the depths of its tokens in depth-first order."""
    jumps = draw(st.lists(st.integers(0, 12), min_size=1, max_size=90))
    depth, depths = -1, []
    for jump in jumps:
        # Mostly one step down, at times back up to any ancestor's sibling.
        depth = depth + 1 if jump > 2 else (jump * (depth + 1)) // 3
        depths.append(depth)
    after = [
        next((k for k in range(i + 1, len(depths)) if depths[k] <= depths[i]), len(depths)) for i in range(len(depths))
    ]
    return torch.tensor(after)


def visible(end_T: torch.Tensor) -> torch.Tensor:
    row, column = torch.arange(len(end_T))[:, None], torch.arange(len(end_T))[None]
    return (column <= row) & (row < end_T[None])


def queries_keys_values(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(1, heads, size, DIM, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, end_T: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(end_T), scale=0.3, enable_gqa=True)


@settings(max_examples=60, deadline=None)
@given(end_T=ends(), block_tokens=st.sampled_from([1, 4, 17, 256]))
def test_output_and_gradients_equal_dense_masked_attention(end_T: torch.Tensor, block_tokens: int) -> None:
    ours, theirs = queries_keys_values(len(end_T)), queries_keys_values(len(end_T))
    out = tree_attention(*ours, plan(end_T, block_tokens=block_tokens), 0.3)
    expected = dense(*theirs, end_T)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=2e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(end_T=ends(), block_tokens=st.sampled_from([1, 4, 17, 256]))
def test_the_plan_covers_every_visible_pair_once(end_T: torch.Tensor, block_tokens: int) -> None:
    size = len(end_T)
    counted = torch.zeros(size, size, dtype=torch.int64)
    for block in plan(end_T, block_tokens=block_tokens):
        rows = torch.arange(block.start, block.stop)
        columns = torch.arange(size)[block.keys]
        allowed = torch.ones(len(rows), len(columns), dtype=torch.bool)
        if block.causal:
            allowed = allowed.tril()
        if block.mask is not None:
            allowed = block.mask[0, 0] == 0
        counted[rows[:, None], columns[None]] += allowed.long()
    assert torch.equal(counted, visible(end_T).long())


def test_bfloat16_is_as_near_to_float32_as_dense_bfloat16_is() -> None:
    end_T = torch.tensor([30] * 10 + [18] * 8 + [30] * 12)
    exact = dense(*queries_keys_values(30), end_T)
    ours = tree_attention(*queries_keys_values(30, torch.bfloat16), plan(end_T, torch.bfloat16), 0.3)
    theirs = dense(*queries_keys_values(30, torch.bfloat16), end_T)
    assert (ours.float() - exact).abs().max() <= 1.5 * (theirs.float() - exact).abs().max()


def test_a_line_is_one_causal_call_without_a_mask() -> None:
    (block,) = plan(torch.full((700,), 700))
    assert (block.start, block.stop, block.keys, block.causal, block.mask) == (0, 700, slice(0, 700), True, None)


def test_nodes_start_where_the_end_changes() -> None:
    assert node_starts(torch.tensor([5, 5, 3, 5, 5, 6])) == [0, 2, 3, 5, 6]


@settings(max_examples=40, deadline=None)
@given(end_T=ends())
def test_the_variable_length_plan_says_the_same_attention(end_T: torch.Tensor) -> None:
    """Each node's queries against its path, causal from the bottom right, as the CUDA kernel reads the plan."""
    q, k, v = queries_keys_values(len(end_T))
    forest = varlen_plan(end_T, torch.device("cpu"))
    parts = []
    for node in range(len(forest.query_ends) - 1):
        rows = slice(int(forest.query_ends[node]), int(forest.query_ends[node + 1]))
        keys = forest.keys[int(forest.key_ends[node]) : int(forest.key_ends[node + 1])]
        length = rows.stop - rows.start
        mask = torch.ones(length, len(keys), dtype=torch.bool).tril(len(keys) - length)
        parts.append(
            scaled_dot_product_attention(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=0.3, enable_gqa=True
            )
        )
    torch.testing.assert_close(torch.cat(parts, dim=2), dense(q, k, v, end_T), atol=1e-5, rtol=0)


def test_layers_share_a_plan_until_the_forest_changes() -> None:
    planner, end_T = Planner(), torch.tensor([4, 2, 4, 4])
    first = planner.blocks(end_T, torch.float32)
    assert planner.blocks(end_T.detach(), torch.float32) is first
    end_T[1] = 4
    assert len(planner.blocks(end_T, torch.float32)) == 1
    assert planner.blocks(end_T, torch.float32)[0].causal
    assert not first[0].causal
