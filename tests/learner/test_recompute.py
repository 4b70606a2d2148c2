"""Layers that are computed anew in the backward pass give the same gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clawpipe.learner import batch as batches
from clawpipe.learner import hf, parallel
from clawpipe.learner.model import build_model
from clawpipe.learner.numerics import token_logprobs
from clawpipe.learner.optimizer import wrap
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.forest import Batch


def gradients(folder: Path, batch: Batch, dtype: torch.dtype, recompute: str) -> dict[str, torch.Tensor]:
    """Of the sum of two forests' logprobs, added up in the buffers."""
    with parallel.session(ParallelConfig()):
        model = build_model(folder, ParallelConfig(), dtype, 0, recompute)
        hf.load(model, folder)
        wrapped = wrap(model)
        wrapped.zero_grad_buffer()
        for forest in batches.load(batch, vocab_size=64, version=0):
            token_logprobs(wrapped, forest, temperature=0.7).sum().backward()
        return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_and_without_recomputation_are_equal(
    model_dir: Path, make_batch: Callable[..., Batch], dtype: torch.dtype
) -> None:
    kept = gradients(model_dir, make_batch(), dtype, "none")
    anew = gradients(model_dir, make_batch(), dtype, "full")
    assert kept.keys() == anew.keys()
    for name, value in kept.items():
        assert value.abs().max() > 0, name
        assert torch.equal(value, anew[name]), name
