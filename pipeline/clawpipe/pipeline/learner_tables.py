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


Recompute = Literal["none", "full"]


class ConstantRate(Table, frozen=True, kw_only=True, tag_field="kind", tag="constant"):
    """[learner.lr_schedule] kind = "constant": `lr`, after a warm-up from nothing."""

    warmup_updates: NonNegative = 0


class LinearRate(Table, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """[learner.lr_schedule] kind = "linear": after the warm-up, from `lr` to `min_lr` in `decay_updates` on a line."""

    decay_updates: Positive
    warmup_updates: NonNegative = 0
    min_lr: Annotated[float, Meta(ge=0)] = 0.0


class CosineRate(Table, frozen=True, kw_only=True, tag_field="kind", tag="cosine"):
    """[learner.lr_schedule] kind = "cosine": the same on half a cosine wave."""

    decay_updates: Positive
    warmup_updates: NonNegative = 0
    min_lr: Annotated[float, Meta(ge=0)] = 0.0


RateConfig = ConstantRate | LinearRate | CosineRate


class LearnerConfig(Table, frozen=True, kw_only=True):
    """[learner]"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Positive = 1
    lr: Annotated[float, Meta(gt=0)] = 1e-6
    lr_schedule: RateConfig = ConstantRate()
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip_grad: Annotated[float, Meta(gt=0)] = 1.0
    pack_tokens: Positive = 8192  # token budget of one forest
    recompute: Recompute = "none"  # full: the backward pass computes each layer anew from its input; less memory
    device_memory_gb: NonNegative = 0  # of one device, in 10**9 bytes; `clawpipe check` plans for it; 0: no plan
    minibatches: Positive = 1  # optimizer steps per batch
    max_nonfinite_in_row: Positive = 5  # updates without a step, since the gradient was not finite; then the run ends
    max_restarts: NonNegative = 5
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.lr_schedule, ConstantRate) and self.lr_schedule.min_lr > self.lr:
            raise ValueError(
                f"lr_schedule.min_lr = {self.lr_schedule.min_lr} is above lr = {self.lr}, and the rate only falls; "
                "lower min_lr"
            )


class GrpoConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="grpo"):
    """[algorithm] kind = "grpo": advantages from the group; the formula and its sources are in `learner/loss.py`."""

    eps_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    eps_high: Annotated[float, Meta(gt=0)] = 0.28
    advantage_eps: Annotated[float, Meta(gt=0)] = 1e-4
    aggregation: Literal["rollout_mean", "token_mean"] = "rollout_mean"


class PpoConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="ppo"):
    """[algorithm] kind = "ppo": advantages from a value model of its own, A_t = R - V(s_t); formulas and sources are
    in `learner/loss.py`.

    An update in which the value model alone learns counts as one of [run] updates; the weights' version stays.
    """

    eps_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    eps_high: Annotated[float, Meta(gt=0)] = 0.28
    aggregation: Literal["rollout_mean", "token_mean"] = "rollout_mean"
    value_lr: Annotated[float, Meta(gt=0)] = 5e-6
    value_pretrain_updates: NonNegative = 10  # in which the value model alone learns
    value_path: str = ""  # what `clawpipe value-pretrain` wrote; empty: the start model with a new head


AlgorithmConfig = GrpoConfig | PpoConfig
