"""Optimizers behind one small protocol: Megatron's AdamW for reinforcement learning, Muon for the cold start.

A step reduces the gradients over the ranks, clips them by their global norm and moves the weights, or leaves
the weights alone when the norm is not finite. AdamW's rate follows `learning_rate`; the cold start sets its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from clawpipe.learner import cpu
from clawpipe.learner.cpu import CudaAsCpu
from clawpipe.learner.learning_rate import learning_rate
from clawpipe.pipeline.config import LearnerConfig
from clawpipe.pipeline.errors import LearnerError


class Optimizer(Protocol):
    """Moves a model's weights by the gradients that backward passes have added up."""

    def zero_grad(self) -> None:
        """Forgets the gradients; call before the first backward pass of a step."""
        ...

    def step(self) -> float:
        """One step. Returns the gradient's norm before clipping; if it is not finite, no step was made."""
        ...

    def set_lr(self, scale: float) -> None:
        """Sets every learning rate to `scale` times its configured value."""
        ...


def wrap(model: nn.Module) -> DistributedDataParallel:
    """The model with gradient buffers (float32) that are averaged over the data-parallel ranks.

    The average makes the gradient that of the mean of the ranks' losses: `update` scales for it.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        # Loading its state into another layout needs TransformerEngine or Apex.
        use_distributed_optimizer=False,
        check_for_nan_in_grad=False,
    )
    with CudaAsCpu():
        return DistributedDataParallel(model.config, config, model)


class AdamW:
    """Megatron's AdamW over a wrapped model (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2)."""

    def __init__(self, model: DistributedDataParallel, config: LearnerConfig) -> None:
        half = config.dtype == "bfloat16"
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=False,
        )
        self._model = model
        self._config = config
        self._scale = 1.0
        self._num_steps = 0
        with CudaAsCpu():
            self._inner = get_megatron_optimizer(settings, [model])
            self._zero_moments()

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        self._model.zero_grad_buffer()
        self._inner.zero_grad()

    def step(self) -> float:
        """See `Optimizer`. A collective call; every rank gets the same norm."""
        with CudaAsCpu():
            finalize_model_grads([self._model])
            self._inner.prepare_grads()
            norm = _agreed(self._inner.get_grad_norm())
            if math.isfinite(norm):
                self._make_step()
        return norm

    def set_lr(self, scale: float) -> None:
        """See `Optimizer`. The schedule goes on below the scale."""
        self._scale = scale

    @property
    def next_lr(self) -> float:
        """The rate of the next step."""
        return self._scale * learning_rate(self._config, self._num_steps)

    def _make_step(self) -> None:
        rate = self.next_lr
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step()
        self._num_steps += 1

    def sharded_state_dict(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Moments (and float32 weights) for `checkpoint`, laid out as the model's `model_state`, and the step count.

        Rates and other settings are left out: they come from the configuration, on resuming too. Megatron
        keeps one optimizer for dense weights and one for experts that are spread over ranks; the tensors'
        names do not tell which, so that any layout can take them.
        """
        parts, step = {}, torch.tensor(float(self._num_steps))
        with CudaAsCpu():
            for number, part in enumerate(self._inner.chained_optimizers):
                state = part.sharded_state_dict(model_state)
                _moments(state)["state"].pop("common_step", None)
                del _moments(state)["param_groups"]
                parts[number] = state
        return {"parts": parts, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what a checkpoint held for `sharded_state_dict`."""
        self._num_steps = int(state["step"])
        with CudaAsCpu(), torch.no_grad():
            for number, part in enumerate(self._inner.chained_optimizers):
                moments = _moments(state["parts"][number])
                moments["param_groups"] = part.optimizer.state_dict()["param_groups"]
                moments["state"]["common_step"] = state["step"]
                part.load_state_dict(state["parts"][number])

    def _zero_moments(self) -> None:
        """AdamW makes its moments at the first step; a checkpoint must have a place for them before."""
        for part in self._inner.chained_optimizers:
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    part.optimizer.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    """torch's optimizer state within Megatron's, which has float32 weights beside it when the model is bfloat16."""
    inner: dict[str, Any] = state.get("optimizer", state)
    return inner


def _agreed(norm: float) -> float:
    """NaN on one rank becomes NaN on all: the dense and the expert parts are summed over different groups."""
    largest = torch.tensor(norm if math.isfinite(norm) else math.inf, device=cpu.device())
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


class MuonAdamW:
    """Muon for the matrices (Jordan et al. 2024), AdamW for embeddings, norms and routers.

    For the supervised cold start of a small model in one process: Muon orthogonalises whole matrices, and a
    rank of a tensor-parallel model holds only parts of them.
    """

    def __init__(self, model: nn.Module, *, muon_lr: float, adamw_lr: float, clip_grad: float) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise LearnerError("the cold start runs in one process; start it without torchrun")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if _is_matrix(name, p)]
        rest = [p for name, p in named if not _is_matrix(name, p)]
        self._parameters = [*matrices, *rest]
        self._clip_grad = clip_grad
        self._rates = (muon_lr, adamw_lr)
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def zero_grad(self) -> None:
        """See `Optimizer`."""
        for part in self._parts:
            part.zero_grad()

    def step(self) -> float:
        """See `Optimizer`."""
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._clip_grad))
        if math.isfinite(norm):
            for part in self._parts:
                part.step()
        return norm

    def set_lr(self, scale: float) -> None:
        """See `Optimizer`."""
        for part, rate in zip(self._parts, self._rates, strict=True):
            for group in part.param_groups:
                group["lr"] = scale * rate


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Hidden matrices, experts and fused qkv among them; embeddings, output layer and routers are not."""
    outside = ("embedding", "embed_tokens", "output_layer", "lm_head", "router", ".gate.weight")
    return parameter.ndim == 2 and not any(word in name for word in outside)
