"""One update of PPO: a batch's values, the policy's update with A_t = R_i - V(s_t), the value model's steps. No I/O.

ClawGym II (arXiv 2608.16798), PPO: the branches of a rollout stand for themselves, gamma = lambda = 1, the reward
comes at each branch's own last token; formulas in `loss`. The advantages are those of the value model before the
update. It then learns from the same minibatches, each with a step of its own, and from all tokens that are not too
stale: what a correction leaves out is a matter of the policy's ratios, and the return is what it was.

While it is pre-trained it alone learns. The policy is not run, so there are no diagnostics of it.

Shapes: R rows, E loss entries of one forest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from msgspec.structs import replace
from torch import Tensor

from clawpipe.learner import cpu
from clawpipe.learner.batch import ForestTensors
from clawpipe.learner.checkpoint import Learned
from clawpipe.learner.critic import ValueModel, state_values
from clawpipe.learner.loss import value_loss
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.parallel import Ranks
from clawpipe.learner.update import (
    Objective,
    Policy,
    Portion,
    Report,
    Scale,
    batch_metrics,
    deal,
    finite,
    mean_over_steps,
    update,
)
from clawpipe.pipeline.config import ConstantRate, LearnerConfig
from clawpipe.pipeline.forest import RolloutRow


@dataclass(frozen=True, slots=True)
class Critic:
    """The value model, with what moves its weights; this rank's part of it."""

    model: DistributedDataParallel
    optimizer: AdamW

    @property
    def learned(self) -> Learned:
        """What a checkpoint holds of it."""
        return self.model, self.optimizer


def make_critic(model: ValueModel, settings: LearnerConfig, value_lr: float) -> Critic:
    """The value model with its optimizer: as [learner] has it, at a constant rate of its own."""
    wrapped = wrap(model)
    own = replace(settings, lr=value_lr, lr_schedule=ConstantRate())
    return Critic(model=wrapped, optimizer=AdamW(wrapped, own))


def ppo_update(
    policy: Policy,
    critic: Critic,
    rollouts: Sequence[RolloutRow],
    forests: Sequence[ForestTensors],
    *,
    version: int,
    objective: Objective,
) -> Report:
    """Trains both on one checked batch whose rows' advantages are their returns. A collective call.

    Both learn or neither: where the policy made no step, its tokens are booked as lost, and the value model makes
    none either. With one minibatch the values are the same forward pass as the first step of the value model, and
    cost nothing.
    """
    lesson = _Lesson(critic, policy.ranks, rollouts, forests, version, objective)
    values = lesson.begin()
    report = update(policy, rollouts, forests, version=version, objective=objective, values=values)
    if report.num_steps:
        lesson.teach(report)
    report.metrics = finite({**report.metrics, **lesson.metrics()})
    return report


def value_update(
    critic: Critic,
    ranks: Ranks,
    rollouts: Sequence[RolloutRow],
    forests: Sequence[ForestTensors],
    *,
    version: int,
    objective: Objective,
) -> Report:
    """Pre-training: like `ppo_update`, but the policy stays as it is and is not run."""
    lesson = _Lesson(critic, ranks, rollouts, forests, version, objective)
    lesson.begin()
    report = Report()
    report.masked_tokens = {reason: tokens for reason, tokens in lesson.teach(report).items() if tokens}
    report.metrics = finite({**batch_metrics(rollouts, forests), **lesson.metrics()})
    return report


class _Lesson:
    """What the value model learns from one batch: `begin` says what it thinks, `teach` makes it learn."""

    def __init__(
        self,
        critic: Critic,
        ranks: Ranks,
        rollouts: Sequence[RolloutRow],
        forests: Sequence[ForestTensors],
        version: int,
        objective: Objective,
    ) -> None:
        self._critic = critic
        self._data_size = ranks.data_size
        self._portions = deal(critic.model, ranks, rollouts, forests, objective.minibatches)
        self._scales = [Scale(rollouts, portion.whole, version, objective) for portion in self._portions]
        self._return_R = torch.tensor([row.advantage for row in rollouts], device=cpu.device())
        self._evaluation = _Evaluation()
        self._loss = torch.zeros((), device=cpu.device())  # of the minibatch whose gradient is there, this rank's part
        self._losses: list[Tensor] = []
        self._norms: list[float] = []

    def begin(self) -> list[list[Tensor]]:
        """The values of all entries, by minibatch and forest of this rank; leaves the first minibatch's gradient."""
        first = self._accumulate(self._portions[0], self._scales[0])
        values = [first, *(_values(self._critic, portion.own) for portion in self._portions[1:])]
        for portion, scale, known in zip(self._portions, self._scales, values, strict=True):
            for forest, value_E in zip(portion.own, known, strict=True):
                self._evaluation.add(value_E, self._returns(forest), scale.fresh(forest))
        return values

    def teach(self, report: Report) -> dict[str, int]:
        """One step for each minibatch, counted in the report. Gives the tokens that taught nothing, by reason."""
        masked = {"stale": 0, "nonfinite_gradient": 0}
        for number, (portion, scale) in enumerate(zip(self._portions, self._scales, strict=True)):
            if not portion.whole.num_entries:
                continue
            if number:
                self._accumulate(portion, scale)
            masked["stale"] += scale.num_stale
            if self._step():
                report.num_value_steps += 1
            else:
                report.num_nonfinite += 1
                masked["nonfinite_gradient"] += portion.whole.num_entries - scale.num_stale
        return masked

    def metrics(self) -> dict[str, float]:
        """Of the values before the steps, and means over the steps, if there were any; a collective call."""
        found = self._evaluation.metrics()
        if not self._losses:
            return found
        norms = list(filter(math.isfinite, self._norms))
        return {
            **found,
            "value_loss": mean_over_steps(self._losses),
            "value_grad_norm": sum(norms) / max(len(norms), 1),
        }

    def _accumulate(self, portion: Portion, scale: Scale) -> list[Tensor]:
        """Adds the forests' gradients up; gives each one's values, float32 [E] without gradient."""
        self._critic.optimizer.zero_grad()
        self._loss = torch.zeros((), device=cpu.device())
        values = []
        for forest in portion.own:
            value_E = state_values(self._critic.model, forest)
            loss = value_loss(value_E, self._returns(forest), scale.of(forest))
            # The gradients are averaged over the data-parallel ranks, and each has another part of the sum.
            (loss * self._data_size).backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
            values.append(value_E.detach())
        return values

    def _step(self) -> bool:
        """One step by the gradients that were added up; whether they were finite and it was made."""
        self._losses.append(self._loss)
        self._norms.append(self._critic.optimizer.step())
        return math.isfinite(self._norms[-1])

    def _returns(self, forest: ForestTensors) -> Tensor:
        """R of each entry, float32 [E]."""
        return self._return_R[forest.entry_rollout_E.to(cpu.device())]


@torch.no_grad()
def _values(critic: Critic, forests: Sequence[ForestTensors]) -> list[Tensor]:
    return [state_values(critic.model, forest) for forest in forests]


class _Evaluation:
    """How well values foretell returns, over the entries that are not too stale. Sums in float64, read once."""

    def __init__(self) -> None:
        self._sums = torch.zeros(6, dtype=torch.float64, device=cpu.device())

    def add(self, value_E: Tensor, return_E: Tensor, fresh_E: Tensor) -> None:
        """Takes the entries of one forest."""
        value_E, return_E = value_E[fresh_E].double(), return_E[fresh_E].double()
        advantage_E = return_E - value_E
        columns = (torch.ones_like(value_E), value_E, return_E, return_E.square(), advantage_E, advantage_E.square())
        self._sums += torch.stack([column.sum() for column in columns])

    def metrics(self) -> dict[str, float]:
        """Over all ranks; a collective call. explained_variance = 1 - Var(R - V) / Var(R); none for equal returns."""
        dist.all_reduce(self._sums, group=parallel_state.get_data_parallel_group())
        n, value, returned, returned2, advantage, advantage2 = self._sums.tolist()
        if not n:
            return {}
        spread = returned2 / n - (returned / n) ** 2
        left = max(advantage2 / n - (advantage / n) ** 2, 0.0)
        found = {"value_mean": value / n, "advantage_mean": advantage / n, "advantage_std": math.sqrt(left)}
        return found | ({"explained_variance": 1 - left / spread} if spread > 1e-12 else {})
