"""The value model: the policy's architecture with a value head in the output layer's place.

V(s_t) of a loss entry is the head's output at the entry's parent row: the state before the token was sampled.
The trunk starts from the weights that the policy starts from, the head from small random numbers.

Shapes: T packed tokens, E loss entries, H hidden size, P tensor-parallel size.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from clawpipe.learner import cpu, hf
from clawpipe.learner.model import DTYPES, PolicyModel, construct
from clawpipe.learner.numerics import PackedForest, run
from clawpipe.learner.shape import read_shape
from clawpipe.pipeline.config import Config, ParallelConfig, PpoConfig, Recompute

HEAD = "value_head.weight"


class ValueHead(torch.nn.Linear):
    """One number for each hidden state, in float32: an advantage is a difference of numbers of the same size."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, sequence_parallel: bool) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)
        # Each tensor rank sees its rows alone, so that its gradient is a part of the sum.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """float32 [..., 1]."""
        return torch.nn.functional.linear(input.float(), self.weight.float())


class ValueModel(PolicyModel):
    """PolicyModel whose forward pass ends with a value for each packed token: float32 [T], on all tensor ranks.

    Its output layer has no weight of its own and is not used.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Megatron allocates no output layer where it is the embedding.
        super().__init__(**{**kwargs, "share_embeddings_and_output_weights": True})
        config = self.config
        self.value_head = ValueHead(
            config.hidden_size, dtype=config.params_dtype, sequence_parallel=config.sequence_parallel
        )

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        value_T11: Tensor = self.value_head(hidden_states)
        if self.config.sequence_parallel:
            # All tensor ranks compute the same loss, so each takes the gradient of its rows and no more.
            value_T11 = gather_from_sequence_parallel_region(value_T11, tensor_parallel_output_grad=False)
        return value_T11[:, 0, 0]


def build_value_model(
    hf_config_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    seed: int,
    recompute: Recompute = "none",
) -> ValueModel:
    """Builds this rank's part of a value model for the model in <hf_config_dir>; see `model.build_model`.

    The head is drawn from `seed`, the same on all ranks, so small that the first values are near 0: hidden states
    come out of a norm with about length sqrt(H).
    """
    model = construct(ValueModel, hf_config_dir, parallel, dtype, seed, recompute)
    scale = read_shape(hf_config_dir).initializer_range / math.sqrt(model.config.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.value_head.weight.copy_(scale * torch.randn(model.value_head.weight.shape, generator=generator))
    return model


def load_trunk(model: ValueModel, hf_dir: Path) -> None:
    """Fills all but the head from the policy's Hugging Face folder. Raises LearnerError like `hf.load`."""
    hf.load(model, hf_dir, keep=(HEAD,))


def load_value_model(config: Config, start_dir: Path) -> ValueModel:
    """PPO's value model as a run begins with it: of [algorithm] value_path, else the start model with a new head.

    Raises LearnerError when a folder does not hold it.
    """
    settings = config.learner
    model = build_value_model(start_dir, settings.parallel, DTYPES[settings.dtype], config.run.seed, settings.recompute)
    if isinstance(config.algorithm, PpoConfig) and config.algorithm.value_path:
        hf.load(model, Path(config.algorithm.value_path))
    else:
        load_trunk(model, start_dir)
    return model


def state_values(model: torch.nn.Module, forest: PackedForest) -> Tensor:
    """V(s_t) of every entry's token given its path. Differentiable; collective like `numerics.token_logprobs`.

    Args:
        model: from `build_value_model`, wrapped by Megatron or not.
        forest: T packed tokens, E entries.

    Returns:
        float32 [E] on the model's device, the same on all tensor ranks.
    """
    value_T = run(model, forest)
    row_E = forest.parent_T[forest.entry_token_E]
    return value_T[row_E.to(cpu.device())]
