"""From a packed forest to the log-probabilities of its sampled tokens: what the loss and SFT compute on.

The model runs once over the forest; only the rows that some entry needs get logits. A token's
log-probability comes from the row of its parent, with the logits divided by the sampling temperature.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawpipe.learner import cpu
from clawpipe.learner.memory_plan import MAX_LOGITS
from clawpipe.learner.model import unwrap

# T packed tokens, E loss entries, R rows with logits, V vocabulary, P tensor-parallel size, H hidden size


class PackedForest(Protocol):
    """The part of a forest that the forward pass needs (`batch.ForestTensors` has it)."""

    @property
    def tokens_T(self) -> Tensor: ...  # int64
    @property
    def position_T(self) -> Tensor: ...  # int64, depth in the tree
    @property
    def parent_T(self) -> Tensor: ...  # int64, -1 at a root
    @property
    def end_T(self) -> Tensor: ...  # int64, end of the token's subtree, exclusive
    @property
    def entry_token_E(self) -> Tensor: ...  # int64, index into T, never a root


def token_logprobs(
    model: torch.nn.Module, forest: PackedForest, temperature: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Log-probability of every entry's token given its path.

    All tensor ranks are given the same forest; under expert parallelism all ranks must call together, each with
    its own forest (one without entries will do). Differentiable.

    Args:
        model: from `build_model`, wrapped by Megatron or not.
        forest: T packed tokens, E entries.
        temperature: the logits are divided by it, as they were at sampling.
        max_logits: rows are taken in chunks with no more logits than this, which bounds the memory.

    Returns:
        float32 [E] on the model's device, the same on all tensor ranks.
    """
    return _logprobs(model, forest, _Head(model, temperature, max_logits, with_entropy=False))[0]


def token_logprobs_and_entropy(
    model: torch.nn.Module, forest: PackedForest, temperature: float, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy in nats of the distribution that each entry was drawn from.

    Returns:
        float32 [E], and float32 [E] without gradient.
    """
    return _logprobs(model, forest, _Head(model, temperature, max_logits, with_entropy=True))


def _logprobs(model: torch.nn.Module, forest: PackedForest, head: _Head) -> tuple[Tensor, Tensor]:
    device = cpu.device()
    hidden_TH = run(model, forest)
    row_R, entry_row_E = torch.unique(forest.parent_T[forest.entry_token_E], return_inverse=True)
    target_E = forest.tokens_T[forest.entry_token_E].to(device)
    return head(hidden_TH[row_R.to(device)], entry_row_E.to(device), target_E)


def run(model: torch.nn.Module, forest: PackedForest) -> Tensor:
    """What the model says of every packed token, and of the pad tokens after them.

    All tensor ranks are given the same forest; under expert parallelism all ranks must call together.
    """
    device = cpu.device()
    tokens_T, position_T, end_T = _pad(forest, parallel_state.get_tensor_model_parallel_world_size())
    out: Tensor = model(tokens_T.to(device)[None], position_T.to(device)[None], end_T)
    return out


def _pad(forest: PackedForest, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and ends with pad tokens, each a tree of its own, up to a multiple of the tensor size.

    Sequence parallelism gives every tensor rank the same number of tokens.
    """
    size = len(forest.tokens_T)
    missing = -size % multiple
    if not missing:
        return forest.tokens_T, forest.position_T, forest.end_T
    zeros = forest.tokens_T.new_zeros(missing)
    ends = torch.arange(size + 1, size + missing + 1)
    return (
        torch.cat([forest.tokens_T, zeros]),
        torch.cat([forest.position_T, zeros]),
        torch.cat([forest.end_T, ends]),
    )


class _Head:
    """Applies the output layer to rows, in chunks when their logits would not fit; see `token_logprobs`."""

    def __init__(self, model: torch.nn.Module, temperature: float, max_logits: int, with_entropy: bool) -> None:
        self._model = unwrap(model)
        self._chunk_rows = max(1, max_logits // self._model.vocab_size)
        self._temperature = temperature
        self._with_entropy = with_entropy

    def __call__(self, hidden_RH: Tensor, row_E: Tensor, target_E: Tensor) -> tuple[Tensor, Tensor]:
        chunk = self._chunk_rows
        if len(hidden_RH) <= chunk:
            return self._chunk(hidden_RH, row_E, target_E)
        logprob_E = hidden_RH.new_zeros(len(row_E), dtype=torch.float32)
        entropy_E = torch.zeros_like(logprob_E)
        for start in range(0, len(hidden_RH), chunk):
            here = ((row_E >= start) & (row_E < start + chunk)).nonzero()[:, 0]
            args = (hidden_RH[start : start + chunk], row_E[here] - start, target_E[here])
            # Recomputed in the backward pass, so that one chunk's logits exist at a time.
            part, part_entropy = checkpoint(self._chunk, *args, use_reentrant=False)
            logprob_E = logprob_E.index_put((here,), part)
            entropy_E[here] = part_entropy
        return logprob_E, entropy_E

    def _chunk(self, hidden_RH: Tensor, row_E: Tensor, target_E: Tensor) -> tuple[Tensor, Tensor]:
        # float32: the loss exponentiates differences of these log-probabilities.
        logits_RV = self._model.logits(hidden_RH).float()
        if self._temperature != 1.0:
            logits_RV = logits_RV / self._temperature
        logprob_E, entropy_R = _VocabParallelLogprob.apply(  # type: ignore[no-untyped-call]
            logits_RV, row_E, target_E, self._with_entropy
        )
        return logprob_E, entropy_R[row_E]


class _VocabParallelLogprob(torch.autograd.Function):
    """log softmax(logits[row])[target] over a vocabulary that is split over the tensor ranks.

    logits float32 [R, V / P]; row, target int64 [E] -> float32 [E], and the rows' entropy float32 [R].
    """

    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, row_E: Tensor, target_E: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        lse_R = _log_sum_exp(logits_RV)
        column_E = target_E - parallel_state.get_tensor_model_parallel_rank() * logits_RV.shape[1]
        mine_E = (column_E >= 0) & (column_E < logits_RV.shape[1])
        column_E = column_E.clamp(0, logits_RV.shape[1] - 1)
        picked_E = _sum_over_tensor_ranks(logits_RV[row_E, column_E] * mine_E)
        entropy_R = _entropy(logits_RV, lse_R) if with_entropy else torch.zeros_like(lse_R)
        ctx.save_for_backward(logits_RV, lse_R, row_E, column_E, mine_E)
        ctx.mark_non_differentiable(entropy_R)
        return picked_E - lse_R[row_E], entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_RV, lse_R, row_E, column_E, mine_E = ctx.saved_tensors
        grad_E = grads[0]
        grad_R = torch.zeros_like(lse_R).index_add_(0, row_E, grad_E)
        grad_RV = (logits_RV - lse_R[:, None]).exp_().mul_(-grad_R[:, None])
        grad_RV.index_put_((row_E, column_E), grad_E * mine_E, accumulate=True)
        return grad_RV, None, None, None


def _log_sum_exp(logits_RV: Tensor) -> Tensor:
    lse_R = logits_RV.logsumexp(dim=1)
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return lse_R
    largest_R = lse_R.clone()
    dist.all_reduce(largest_R, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    return largest_R + _sum_over_tensor_ranks((lse_R - largest_R).exp()).log()


def _entropy(logits_RV: Tensor, lse_R: Tensor) -> Tensor:
    """H = lse - sum_v p_v logit_v."""
    probability_RV = (logits_RV - lse_R[:, None]).exp_()
    return lse_R - _sum_over_tensor_ranks(torch.linalg.vecdot(probability_RV, logits_RV))


def _sum_over_tensor_ranks(values: Tensor) -> Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
    return values
