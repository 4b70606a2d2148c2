"""One update of the policy: minibatches -> log pi_old -> loss -> gradient -> optimizer steps. No I/O.

Every rank of the learner calls `update` with the same batch and works on its own share of the forests. The
result, weights and metrics alike, does not depend on the layout.

Shapes: R rows, E loss entries of one forest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from clawpipe.learner import cpu
from clawpipe.learner.batch import ForestTensors, Minibatch, flops, minibatches, share
from clawpipe.learner.correction import Correction, Entries, Terms
from clawpipe.learner.diagnostics import Diagnostics
from clawpipe.learner.loss import policy_loss, ppo_advantages, shares
from clawpipe.learner.model import unwrap
from clawpipe.learner.numerics import token_logprobs, token_logprobs_and_entropy
from clawpipe.learner.optimizer import Optimizer
from clawpipe.learner.parallel import Ranks
from clawpipe.pipeline.config import AlgorithmConfig
from clawpipe.pipeline.forest import RolloutRow


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that learns, with what moves its weights; this rank's part of it."""

    model: DistributedDataParallel
    optimizer: Optimizer
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update maximises."""

    algorithm: AlgorithmConfig
    correction: Correction
    temperature: float  # of the rollouts; logits are divided by it
    max_staleness: int  # older tokens are left out of the loss
    minibatches: int = 1  # optimizer steps per batch


@dataclass(slots=True)
class Report:
    """What an update did. Without a step (`num_steps` 0) the weights are as they were."""

    num_steps: int = 0
    num_value_steps: int = 0  # of the value model
    num_nonfinite: int = 0  # steps that were not made because the gradient was not finite
    metrics: dict[str, float] = field(default_factory=dict)
    masked_tokens: dict[str, int] = field(default_factory=dict)


def update(
    policy: Policy,
    rollouts: Sequence[RolloutRow],
    forests: Sequence[ForestTensors],
    *,
    version: int,
    objective: Objective,
    values: Sequence[Sequence[Tensor]] | None = None,
) -> Report:
    """Trains the policy on one checked batch (`batch.load`). A collective call.

    `version` is that of the weights as they are now: staleness is counted from it. With one minibatch,
    log pi_old is the same forward pass as log pi_theta and costs nothing. With `values`, V(s_t) of every entry of
    what `deal` gives this rank, a row's advantage is the return that they are taken from.
    """
    portions = deal(policy.model, policy.ranks, rollouts, forests, objective.minibatches)
    unknown: list[None] = [None] * len(portions)
    old = [None, *(_recompute(policy, portion.own, objective.temperature) for portion in portions[1:])]
    diagnostics = Diagnostics(rollouts, cpu.device(), objective.correction.reasons)
    report, losses, steps = Report(), [], []
    for portion, old_logprobs, known in zip(portions, old, values or unknown, strict=True):
        if not portion.whole.num_entries:
            continue
        step = _Step(policy, rollouts, portion.whole, version, objective, diagnostics)
        losses.append(step.accumulate(portion.own, old_logprobs, known))
        steps.append((step, policy.optimizer.step()))
    diagnostics.reduce(parallel_state.get_data_parallel_group())
    for (step, norm), left_out in zip(steps, _left_out([step for step, _ in steps]), strict=True):
        _count(report, norm, step.num_tokens, {"stale": step.scale.num_stale, **left_out})
    norms = [norm for _, norm in steps]
    metrics = {
        **batch_metrics(rollouts, forests),
        **diagnostics.metrics(),
        "loss": mean_over_steps(losses),
        "grad_norm": sum(filter(math.isfinite, norms)) / max(report.num_steps, 1),
    }
    report.metrics = finite(metrics)
    return report


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """What is not a number has no place in the run's history; `num_nonfinite` tells of it."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True)
class Portion:
    """A minibatch, and what this rank computes of it."""

    whole: Minibatch
    own: list[ForestTensors]


def deal(
    model: DistributedDataParallel,
    ranks: Ranks,
    rollouts: Sequence[RolloutRow],
    forests: Sequence[ForestTensors],
    count: int,
) -> list[Portion]:
    """A batch in `count` minibatches. The same batch is always dealt alike, for policy and value model."""
    return [Portion(part, _share(model, ranks, part)) for part in minibatches(rollouts, forests, count)]


class Scale:
    """Each entry's share of the mean over its minibatch: 0 for a token that is too stale."""

    def __init__(self, rollouts: Sequence[RolloutRow], part: Minibatch, version: int, objective: Objective) -> None:
        self._version = version
        self._max_staleness = objective.max_staleness
        self.num_stale = sum(int((~self._fresh(forest)).sum()) for forest in part.forests)
        self._share_R = shares(
            rollouts,
            num_rows=part.num_rows,
            num_entries=part.num_entries,
            aggregation=objective.algorithm.aggregation,
        ).to(cpu.device())

    def fresh(self, forest: ForestTensors) -> Tensor:
        """bool [E]: which entries are not too stale."""
        return self._fresh(forest).to(cpu.device())

    def of(self, forest: ForestTensors) -> Tensor:
        """float32 [E]."""
        return torch.where(self.fresh(forest), self._share_R[forest.entry_rollout_E.to(cpu.device())], 0.0)

    def _fresh(self, forest: ForestTensors) -> Tensor:
        return self._version - forest.entry_version_E <= self._max_staleness


class _Step:
    """The gradient of one minibatch."""

    def __init__(
        self,
        policy: Policy,
        rollouts: Sequence[RolloutRow],
        part: Minibatch,
        version: int,
        objective: Objective,
        diagnostics: Diagnostics,
    ) -> None:
        self._policy = policy
        self._version = version
        self._objective = objective
        self._diagnostics = diagnostics
        self._advantage_R = torch.tensor([row.advantage for row in rollouts], device=cpu.device())
        self.num_tokens = part.num_entries
        self.left_out = {  # reason -> tokens, of this rank
            reason: torch.zeros((), dtype=torch.int64, device=cpu.device()) for reason in objective.correction.reasons
        }
        self.scale = Scale(rollouts, part, version, objective)

    def accumulate(
        self, forests: Sequence[ForestTensors], old: Sequence[Tensor] | None, values: Sequence[Tensor] | None
    ) -> Tensor:
        """Adds the forests' gradients up; returns the sum of their losses (this rank's, no gradient)."""
        self._policy.optimizer.zero_grad()
        total = torch.zeros((), device=cpu.device())
        unknown = [None] * len(forests)
        for forest, old_E, value_E in zip(forests, old or unknown, values or unknown, strict=True):
            loss = self._loss(forest, old_E, value_E)
            # The gradients are averaged over the data-parallel ranks, and each has another part of the sum.
            (loss * self._policy.ranks.data_size).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss(self, forest: ForestTensors, old_E: Tensor | None, value_E: Tensor | None) -> Tensor:
        objective, device = self._objective, cpu.device()
        rollout_E = forest.entry_rollout_E.to(device)
        staleness_E = (self._version - forest.entry_version_E).to(device)
        logprob_E, entropy_E = token_logprobs_and_entropy(self._policy.model, forest, objective.temperature)
        advantage_E = self._advantage_R[rollout_E]
        entries = Entries(
            logprob_E=logprob_E,
            old_E=logprob_E.detach() if old_E is None else old_E,
            behaviour_E=forest.entry_logprob_E.to(device),
            advantage_E=advantage_E if value_E is None else ppo_advantages(advantage_E, value_E),
            staleness_E=staleness_E,
            segment_E=forest.segments().to(device),
            eps_low=objective.algorithm.eps_low,
            eps_high=objective.algorithm.eps_high,
        )
        terms = objective.correction.terms(entries)
        self._observe(entries, terms, rollout_E, entropy_E, self.scale.fresh(forest))
        return policy_loss(terms.objective_E, self.scale.of(forest))

    def _observe(self, entries: Entries, terms: Terms, rollout_E: Tensor, entropy_E: Tensor, fresh_E: Tensor) -> None:
        """What the report says of these entries; those that are too stale are counted elsewhere."""
        left_out = {reason: without_E[fresh_E] for reason, without_E in terms.left_out.items()}
        for reason, without_E in left_out.items():
            self.left_out[reason] += without_E.sum()
        self._diagnostics.add(
            rollout_E=rollout_E[fresh_E],
            staleness_E=entries.staleness_E[fresh_E],
            log_rho_E=entries.log_rho_E[fresh_E],
            entropy_E=entropy_E[fresh_E],
            weight_E=terms.weight_E[fresh_E],
            capped_E=terms.capped_E[fresh_E],
            clipped_E=terms.clipped_E[fresh_E],
            left_out=left_out,
        )


def _share(model: DistributedDataParallel, ranks: Ranks, part: Minibatch) -> list[ForestTensors]:
    config = unwrap(model).config
    attention = config.num_attention_heads * config.kv_channels
    key_value = config.num_query_groups * config.kv_channels
    experts = config.moe_router_topk if config.num_moe_experts else 1
    per_layer = config.hidden_size * (2 * attention + 2 * key_value + 3 * experts * config.ffn_hidden_size)
    cost = flops(params_per_token=config.num_layers * per_layer, attention_width=config.num_layers * attention)
    return share(part.forests, rank=ranks.data_rank, size=ranks.data_size, cost=cost)


@torch.no_grad()
def _recompute(policy: Policy, forests: Sequence[ForestTensors], temperature: float) -> list[Tensor]:
    return [token_logprobs(policy.model, forest, temperature) for forest in forests]


def _left_out(steps: Sequence[_Step]) -> list[dict[str, int]]:
    """For each step, how many tokens the correction left out, by reason, over all ranks."""
    counts = [count for step in steps for count in step.left_out.values()]
    if not counts:
        return [{} for _ in steps]
    total = torch.stack(counts)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    numbers = iter(total.tolist())
    return [{reason: next(numbers) for reason in step.left_out} for step in steps]


def _count(report: Report, norm: float, num_tokens: int, masked: dict[str, int]) -> None:
    """Books a step. Of one that was not made, all tokens but the stale ones went for nothing."""
    if math.isfinite(norm):
        report.num_steps += 1
    else:
        report.num_nonfinite += 1
        masked = {"stale": masked["stale"], "nonfinite_gradient": num_tokens - masked["stale"]}
    for reason, tokens in masked.items():
        if tokens:
            report.masked_tokens[reason] = report.masked_tokens.get(reason, 0) + tokens


def mean_over_steps(losses: Sequence[Tensor]) -> float:
    """Of the steps' losses, of which every rank has its part. A collective call."""
    if not losses:
        return 0.0
    mean = torch.stack(list(losses)).mean()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return float(mean)


def batch_metrics(rows: Sequence[RolloutRow], forests: Sequence[ForestTensors]) -> dict[str, float]:
    """Rewards are those of rollouts: a rollout counts once, however many roles of it are trained."""
    rollouts = {row.rollout_id: row for row in rows}.values()
    rewards: dict[str, list[float]] = {"": [row.reward for row in rollouts]}
    for row in rollouts:
        rewards.setdefault(f"harness/{row.harness}/", []).append(row.reward)
    return {
        **{f"{name}reward_mean": sum(values) / max(len(values), 1) for name, values in rewards.items()},
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(sum(forest.num_tokens for forest in forests)),
    }
