"""The tables of the configuration that say how the learner trains. A part of `config`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from clawpipe.pipeline.tables import NonNegative, Positive, Table


class ParallelConfig(Table, frozen=True, kw_only=True):
    """[learner.parallel]: Megatron-Core's sizes. `processes` is a multiple of `tensor` and of expert x expert_tensor;
    `pipeline` must be 1."""

    processes: Positive = 1
    tensor: Positive = 1
    expert: Positive = 1
    expert_tensor: Positive = 1
    pipeline: Positive = 1

    def __post_init__(self) -> None:
        if self.processes % (self.tensor * self.pipeline):
            raise ValueError(
                f"processes = {self.processes} is not a multiple of tensor x pipeline = "
                f"{self.tensor * self.pipeline}; change one of them"
            )
        if self.tensor > 1 and self.expert == 1 and self.expert_tensor != self.tensor:
            raise ValueError(
                f"tensor = {self.tensor}, expert = 1, expert_tensor = {self.expert_tensor} gives wrong expert "
                f"gradients: experts would see other tokens than their copies; set expert_tensor = {self.tensor}"
            )
        if self.expert > 1 and self.expert_tensor != 1:
            raise ValueError(
                f"expert = {self.expert}, expert_tensor = {self.expert_tensor}: the token exchange cannot carry "
                "unequal counts through both; set expert_tensor = 1"
            )


class LearnerConfig(Table, frozen=True, kw_only=True):
    """[learner]"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Positive = 1
    lr: Annotated[float, Meta(gt=0)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip_grad: Annotated[float, Meta(gt=0)] = 1.0
    pack_tokens: Positive = 8192  # token budget of one forest
    minibatches: Positive = 1  # optimizer steps per batch
    max_restarts: NonNegative = 5
    parallel: ParallelConfig = ParallelConfig()


class GrpoConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="grpo"):
    """[algorithm] kind = "grpo": advantages from the group; the formula and its sources are in `learner/loss.py`."""

    eps_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    eps_high: Annotated[float, Meta(gt=0)] = 0.28
    advantage_eps: Annotated[float, Meta(gt=0)] = 1e-4
    aggregation: Literal["rollout_mean", "token_mean"] = "rollout_mean"


class PpoConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="ppo"):
    """[algorithm] kind = "ppo": advantages from a value model of its own, A_t = R - V(s_t).

    The learner has no value model yet: `clawpipe check` says so, and `clawpipe check --offline` takes the recipe.
    """

    eps_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    eps_high: Annotated[float, Meta(gt=0)] = 0.28
    aggregation: Literal["rollout_mean", "token_mean"] = "rollout_mean"
    value_lr: Annotated[float, Meta(gt=0)] = 5e-6
    value_pretrain_updates: NonNegative = 10  # in which the value model alone learns


AlgorithmConfig = GrpoConfig | PpoConfig


class CorrectionConfig(Table, frozen=True, kw_only=True):
    """[correction]: w = stop_grad(min(rho, c(s))), c(s) = 1 + (cap - 1) * decay**s."""

    kind: Literal["truncated", "none"] = "truncated"
    cap: Annotated[float, Meta(ge=1)] = 2.0
    decay: Annotated[float, Meta(gt=0, le=1)] = 1.0
