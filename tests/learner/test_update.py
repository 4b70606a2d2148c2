"""The whole update against an independent one: the Hugging Face model, sequence by sequence, in plain PyTorch."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from clawpipe.learner import batch as batches
from clawpipe.learner import hf, parallel
from clawpipe.learner.correction import build_correction
from clawpipe.learner.model import build_model, unwrap
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.update import Objective, Policy, update
from clawpipe.pipeline.config import (
    BinaryTvConfig,
    CispoConfig,
    DecoupledConfig,
    GeometricMaskConfig,
    GrpoConfig,
    IcePopConfig,
    LearnerConfig,
    ParallelConfig,
    ToprConfig,
    TruncatedConfig,
    UncorrectedConfig,
)
from clawpipe.pipeline.forest import Batch

LEARNER = LearnerConfig(lr=1e-3, eps=1e-4, clip_grad=0.05)
TEMPERATURE = 0.7
TRUNCATED = TruncatedConfig(cap=1.5, decay=0.8)


def objective(
    minibatches: int = 1, max_staleness: int = 4, aggregation: str = "rollout_mean", correction=TRUNCATED
) -> Objective:
    return Objective(
        algorithm=GrpoConfig(aggregation=aggregation),
        correction=build_correction(correction),
        temperature=TEMPERATURE,
        max_staleness=max_staleness,
        minibatches=minibatches,
    )


@contextmanager
def policy(model_dir: Path) -> Iterator[Policy]:
    with parallel.session(ParallelConfig()) as ranks:
        model = build_model(model_dir, ParallelConfig(), torch.float32, seed=0)
        hf.load(model, model_dir)
        wrapped = wrap(model)
        yield Policy(model=wrapped, optimizer=AdamW(wrapped, LEARNER), ranks=ranks)


def weights(of: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf.export(of.model)}


def run(of: Policy, batch: Batch, version: int, what: Objective):
    forests = batches.load(batch, vocab_size=64, version=version)
    return update(of, batch.rollouts, forests, version=version, objective=what)


def with_versions(batch: Batch, versions: list[int]) -> Batch:
    """Forest f's entries were sampled by versions[f]."""
    forests = []
    for forest, version in zip(batch.forests, versions, strict=True):
        count = len(forest.entry_version) // 4
        forests.append(msgspec.structs.replace(forest, entry_version=np.full(count, version, "<i4").tobytes()))
    return msgspec.structs.replace(batch, forests=tuple(forests))


def with_branches(batch: Batch, count: int) -> Batch:
    """The entries of every row lie on `count` branches in turn."""
    forests = []
    for forest in batch.forests:
        branches = np.arange(len(forest.entry_token) // 4) % count
        forests.append(msgspec.structs.replace(forest, entry_branch=branches.astype("<i4").tobytes()))
    return msgspec.structs.replace(batch, forests=tuple(forests))


def clipped(r, a):
    return torch.minimum(r * a, r.clamp(0.8, 1.28) * a)


def truncated_term(new, old, mu, a, s, branch):
    return min(math.exp(old - mu), 1 + 0.5 * 0.8**s) * clipped((new - old).exp(), a), None


def uncorrected_term(new, old, mu, a, s, branch):
    return clipped((new - old).exp(), a), None


def decoupled_term(new, old, mu, a, s, branch):
    rho = math.exp(old - mu)
    return (0.0, "decoupled_mask") if rho > 1.5 else (rho * clipped((new - old).exp(), a), None)


def icepop_term(new, old, mu, a, s, branch):
    rho = math.exp(old - mu)
    return (rho * clipped((new - old).exp(), a), None) if 0.5 <= rho <= 2.0 else (0.0, "icepop_band")


def geometric_term(new, old, mu, a, s, branch):
    if min(branch) < math.log(0.05):
        return 0.0, "veto"
    if not 0.3 <= math.exp(sum(branch) / len(branch)) <= 1.5:
        return 0.0, "geometric_mask"
    return min(math.exp(old - mu), 1.2) * clipped((new - old).exp(), a), None


def cispo_term(new, old, mu, a, s, branch):
    return min(math.exp(new.item() - mu), 1.5) * a * new, None


def topr_term(new, old, mu, a, s, branch):
    return (1.0 if a >= 0 else min(math.exp(new.item() - mu), 1.0)) * a * new, None


def binary_tv_term(new, old, mu, a, s, branch):
    moved, pull = math.exp(new.item()) - math.exp(mu), 0.01 * (new - mu) ** 2
    if (a > 0 and moved > 0.01) or (a < 0 and moved < -0.01):
        return -pull, "tv"
    return a * (new - mu).exp() - pull, None


class Reference:
    """The same update written again: separate sequences, a loop per token, torch's own AdamW."""

    def __init__(self, model_dir: Path, term=truncated_term) -> None:
        self.term = term
        self.left_out: Counter[str] = Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNER.lr, betas=LEARNER.betas, eps=LEARNER.eps, weight_decay=0.0
        )

    def sequences(self, batch: Batch) -> dict[int, list[tuple[list[int], float, int, int]]]:
        """rollout -> its entries as (path of tokens, log mu, version, branch)."""
        found: dict[int, list[tuple[list[int], float, int, int]]] = {}
        for forest in batches.load(batch, vocab_size=64, version=10**6):
            parent, tokens = forest.parent_T.tolist(), forest.tokens_T.tolist()
            for e, token in enumerate(forest.entry_token_E.tolist()):
                path, at = [], token
                while at >= 0:
                    path.insert(0, tokens[at])
                    at = parent[at]
                version, branch = forest.entry_version_E[e].item(), forest.entry_branch_E[e].item()
                row = (path, forest.entry_logprob_E[e].item(), version, branch)
                found.setdefault(forest.entry_rollout_E[e].item(), []).append(row)
        return found

    def logprob(self, path: list[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([path])).logits[0, -2] / TEMPERATURE
        return logits.log_softmax(-1)[path[-1]]

    def update(self, batch: Batch, version: int, what: Objective) -> tuple[float, list[float]]:
        sequences = self.sequences(batch)
        with torch.no_grad():
            old = {row: [self.logprob(path).item() for path, *_ in each] for row, each in sequences.items()}
        size, losses, norms = len(batch.rollouts) // what.minibatches, [], []
        for part in range(what.minibatches):
            rows = [row for row in range(part * size, (part + 1) * size) if row in sequences]
            total = sum(len(sequences[row]) for row in rows)
            loss = torch.zeros(())
            for row in rows:
                advantage = batch.rollouts[row].advantage
                mean = 1 / (size * len(sequences[row]))
                if what.algorithm.aggregation == "token_mean":
                    mean = 1 / total
                branches: dict[int, list[float]] = {}
                for (_, mu, _, b), old_logprob in zip(sequences[row], old[row], strict=True):
                    branches.setdefault(b, []).append(old_logprob - mu)
                for (path, mu, v, b), old_logprob in zip(sequences[row], old[row], strict=True):
                    staleness = version - v
                    if staleness > what.max_staleness:
                        continue
                    j, why = self.term(self.logprob(path), old_logprob, mu, advantage, staleness, branches[b])
                    self.left_out[why] += why is not None
                    loss = loss - mean * j
            self.optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), LEARNER.clip_grad).item())
            self.optimizer.step()
        return sum(losses) / len(losses), norms

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in self.model.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e in range(len(tensor)):
                    gate, up = tensor[e].chunk(2)
                    found[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                    found[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
            elif name.endswith("experts.down_proj"):
                for e in range(len(tensor)):
                    found[name.replace("down_proj", f"{e}.down_proj.weight")] = tensor[e]
            else:
                found[name] = tensor
        return found


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((tensor - other[name]).abs().max().item() for name, tensor in one.items())


@pytest.mark.parametrize(("minibatches", "aggregation"), [(1, "rollout_mean"), (2, "token_mean")])
def test_an_update_equals_plain_pytorch_on_the_hugging_face_model(model_dir, make_batch, minibatches, aggregation):
    batch = with_versions(make_batch(version=6), [6, 4])
    what = objective(minibatches, aggregation=aggregation)
    reference = Reference(model_dir)
    loss, norms = reference.update(batch, 6, what)
    with policy(model_dir) as mine:
        before = weights(mine)
        report = run(mine, batch, 6, what)
        after = weights(mine)
    assert report.num_steps == minibatches
    assert report.metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert report.metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4)
    assert min(norms) > LEARNER.clip_grad  # clipping is part of what is compared
    assert furthest(before, after) > 5e-4
    assert furthest(after, reference.weights()) < 1e-5


@pytest.mark.parametrize(
    ("config", "term"),
    [
        (UncorrectedConfig(), uncorrected_term),
        (DecoupledConfig(mask_above=1.5), decoupled_term),
        (IcePopConfig(low=0.5, high=2.0), icepop_term),
        (GeometricMaskConfig(low=0.3, high=1.5, veto_below=0.05, cap=1.2), geometric_term),
        (CispoConfig(cap=1.5), cispo_term),
        (ToprConfig(), topr_term),
        (BinaryTvConfig(delta=0.01, kl_coef=0.01), binary_tv_term),
    ],
)
def test_an_update_with_every_correction_equals_plain_pytorch(model_dir, make_batch, config, term):
    batch = with_branches(with_versions(make_batch(version=6), [6, 4]), 2)
    what = objective(2, correction=config)
    reference = Reference(model_dir, term)
    loss, norms = reference.update(batch, 6, what)
    with policy(model_dir) as mine:
        report = run(mine, batch, 6, what)
        after = weights(mine)
    assert report.metrics["loss"] == pytest.approx(loss, abs=2e-6)
    assert report.metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4)
    assert report.masked_tokens == {reason: n for reason, n in reference.left_out.items() if n}
    assert set(report.masked_tokens) == set(what.correction.reasons)
    for reason, tokens in report.masked_tokens.items():
        assert report.metrics[f"left_out/{reason}"] == pytest.approx(tokens / 25)
    assert furthest(after, reference.weights()) < 1e-5


def test_tokens_that_are_too_stale_are_left_out_and_counted(model_dir, make_batch):
    batch = with_versions(make_batch(version=6), [6, 1])
    what = objective(max_staleness=4)
    reference = Reference(model_dir)
    reference.update(batch, 6, what)
    with policy(model_dir) as mine:
        report = run(mine, batch, 6, what)
        after = weights(mine)
    assert report.masked_tokens == {"stale": 10}
    assert report.metrics["num_entries"] == 15
    assert report.metrics["staleness_max"] == 0
    assert furthest(after, reference.weights()) < 1e-5


def test_rewards_are_counted_once_for_every_rollout_whatever_the_number_of_its_roles(model_dir, make_batch):
    batch = make_batch()
    # Row 4 (reward 0.4) becomes the sub-agents' row of rollout 2, whose reward is 0.2.
    auxiliary = msgspec.structs.replace(batch.rollouts[4], rollout_id="r2", reward=0.2, role="subagent")
    batch = msgspec.structs.replace(batch, rollouts=(*batch.rollouts[:4], auxiliary, batch.rollouts[5]))
    with policy(model_dir) as mine:
        metrics = run(mine, batch, 0, objective()).metrics
    assert metrics["num_rollouts"] == 5
    assert metrics["reward_mean"] == pytest.approx((0.0 + 0.1 + 0.2 + 0.3 + 0.5) / 5)
    assert metrics["harness/even/reward_mean"] == pytest.approx(0.1)
    assert metrics["role/subagent/num_entries"] == 6


def test_metrics_say_what_the_batch_was(model_dir, make_batch):
    batch = with_versions(make_batch(version=6), [6, 4])
    with policy(model_dir) as mine:
        metrics = run(mine, batch, 6, objective()).metrics
    assert metrics["reward_mean"] == pytest.approx(0.25)
    assert metrics["harness/even/reward_mean"] == pytest.approx(0.2)
    assert metrics["num_tokens"] == 12 + 25
    assert metrics["num_entries"] == 25
    assert metrics["staleness/0/num_entries"] == 15
    assert metrics["staleness/2/num_entries"] == 10
    assert metrics["staleness_mean"] == pytest.approx(2 * 10 / 25)
    assert metrics["clip_fraction"] == 0.0  # one step: pi_theta is pi_old


def test_an_infinite_gradient_makes_no_step(model_dir, make_batch):
    with policy(model_dir) as mine:
        norm = unwrap(mine.model).decoder.final_layernorm.weight
        with torch.no_grad():
            norm[0] = float("nan")
        before = weights(mine)
        report = run(mine, make_batch(), 0, objective())
        after = weights(mine)
    assert (report.num_steps, report.num_nonfinite) == (0, 1)
    assert report.masked_tokens == {"nonfinite_gradient": 25}
    assert all(torch.equal(before[name], after[name]) for name in before if name != "model.norm.weight")


def test_tokens_left_out_of_a_step_that_was_not_made_are_counted_once(model_dir, make_batch):
    with policy(model_dir) as mine:
        with torch.no_grad():
            unwrap(mine.model).decoder.final_layernorm.weight[0] = float("inf")
        report = run(mine, make_batch(), 0, objective(correction=IcePopConfig(low=0.5, high=2.0)))
    assert report.masked_tokens == {"nonfinite_gradient": 25}


def test_a_batch_without_entries_makes_no_step(model_dir, make_batch):
    batch = make_batch()
    rows = tuple(msgspec.structs.replace(row, num_trainable=0) for row in batch.rollouts)
    empty = Batch(batch_id="b", version=0, rollouts=rows, forests=())
    with policy(model_dir) as mine:
        before = weights(mine)
        report = run(mine, empty, 0, objective())
        assert furthest(before, weights(mine)) == 0.0
    assert (report.num_steps, report.num_nonfinite, report.metrics["loss"]) == (0, 0, 0.0)


def test_the_learning_rate_scales_the_step(model_dir, make_batch):
    moved = []
    for scale in (1.0, 0.25):
        with policy(model_dir) as mine:
            before = weights(mine)
            mine.optimizer.set_lr(scale)
            run(mine, make_batch(), 0, objective())
            moved.append(furthest(before, weights(mine)))
    assert moved[1] == pytest.approx(0.25 * moved[0], rel=1e-3)
