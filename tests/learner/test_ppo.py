"""The whole update of PPO against an independent one: Hugging Face models, sequence by sequence, in plain PyTorch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from clawpipe.learner import batch as batches
from clawpipe.learner import critic as critics
from clawpipe.learner import hf, parallel
from clawpipe.learner.correction import build_correction
from clawpipe.learner.critic import build_value_model
from clawpipe.learner.model import build_model, unwrap
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.ppo import Critic, ppo_update, value_update
from clawpipe.learner.update import Objective, Policy, Report
from clawpipe.pipeline.config import LearnerConfig, ParallelConfig, PpoConfig, TruncatedConfig
from clawpipe.pipeline.forest import Batch, RolloutRow
from clawpipe.pipeline.packing import Branch, Trainable, pack

LEARNER = LearnerConfig(lr=1e-3, eps=1e-4, clip_grad=0.05)
TEACHING = LearnerConfig(lr=2e-3, eps=1e-4, clip_grad=0.05)
TEMPERATURE = 0.7


def objective(minibatches: int = 1, max_staleness: int = 4, aggregation: str = "rollout_mean") -> Objective:
    return Objective(
        algorithm=PpoConfig(aggregation=aggregation),
        correction=build_correction(TruncatedConfig(cap=1.5, decay=0.8)),
        temperature=TEMPERATURE,
        max_staleness=max_staleness,
        minibatches=minibatches,
    )


class Both:
    """Policy and value model in one process."""

    def __init__(self, model_dir: Path, ranks: parallel.Ranks) -> None:
        model = build_model(model_dir, ParallelConfig(), torch.float32, seed=0)
        hf.load(model, model_dir)
        values = build_value_model(model_dir, ParallelConfig(), torch.float32, seed=0)
        critics.load_trunk(values, model_dir)
        with torch.no_grad():
            values.value_head.weight.copy_(head()[None])
        wrapped, valued = wrap(model), wrap(values)
        self.policy = Policy(model=wrapped, optimizer=AdamW(wrapped, LEARNER), ranks=ranks)
        self.critic = Critic(model=valued, optimizer=AdamW(valued, TEACHING))

    def run(self, batch: Batch, version: int, what: Objective, pretrain: bool = False) -> Report:
        forests = batches.load(batch, vocab_size=64, version=version)
        given = {"version": version, "objective": what}
        if pretrain:
            return value_update(self.critic, self.policy.ranks, batch.rollouts, forests, **given)
        return ppo_update(self.policy, self.critic, batch.rollouts, forests, **given)

    def policy_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in hf.export(self.policy.model)}

    def value_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in hf.export(self.critic.model)}


@contextmanager
def learner(model_dir: Path) -> Iterator[Both]:
    with parallel.session(ParallelConfig()) as ranks:
        yield Both(model_dir, ranks)


def head() -> torch.Tensor:
    return 0.2 * torch.randn(32, generator=torch.Generator().manual_seed(4))


def with_returns(batch: Batch) -> Batch:
    """As the pipeline service serves it for PPO: every row's advantage is its reward."""
    rows = tuple(msgspec.structs.replace(row, advantage=row.reward) for row in batch.rollouts)
    return msgspec.structs.replace(batch, rollouts=rows)


def with_versions(batch: Batch, versions: list[int]) -> Batch:
    forests = []
    for forest, version in zip(batch.forests, versions, strict=True):
        count = len(forest.entry_version) // 4
        forests.append(msgspec.structs.replace(forest, entry_version=np.full(count, version, "<i4").tobytes()))
    return msgspec.structs.replace(batch, forests=tuple(forests))


class Reference:
    """The same update written again: separate sequences, a loop per token, torch's own AdamW."""

    def __init__(self, model_dir: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoModelForCausalLM

            options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
            self.policy = AutoModelForCausalLM.from_pretrained(model_dir, **options)
            self.trunk = AutoModelForCausalLM.from_pretrained(model_dir, **options).model
        self.head = head().requires_grad_()
        self.optimizers = [
            torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0)
            for parameters, config in ((self.policy.parameters(), LEARNER), (self.taught(), TEACHING))
        ]

    def taught(self) -> list[torch.Tensor]:
        return [*self.trunk.parameters(), self.head]

    def logprob(self, path: list[int]) -> torch.Tensor:
        return (self.policy(torch.tensor([path])).logits[0, -2] / TEMPERATURE).log_softmax(-1)[path[-1]]

    def value(self, path: list[int]) -> torch.Tensor:
        """V before the last token of the path was sampled."""
        return self.trunk(torch.tensor([path[:-1]])).last_hidden_state[0, -1] @ self.head

    def update(self, batch: Batch, version: int, what: Objective, pretrain: bool = False) -> dict[str, float]:
        entries = list(enumerate(sequences(batch)))
        with torch.no_grad():
            old = [self.logprob(path).item() for _, (_, path, _, _) in entries]
            values = [self.value(path).item() for _, (_, path, _, _) in entries]
        counts = [row.num_trainable for row in batch.rollouts]
        size, losses = len(counts) // what.minibatches, ([], [])
        parts = [
            [(e, entry) for e, entry in entries if part * size <= entry[0] < (part + 1) * size]
            for part in range(what.minibatches)
        ]
        for which in (1,) if pretrain else (0, 1):
            for part in parts:
                loss = torch.zeros(())
                for e, (row, path, mu, v) in part:
                    mean = 1 / (size * counts[row]) if what.algorithm.aggregation == "rollout_mean" else 1 / len(part)
                    if version - v > what.max_staleness:
                        continue
                    returned = batch.rollouts[row].advantage
                    if which == 1:
                        loss = loss + mean * (self.value(path) - returned) ** 2
                        continue
                    advantage, ratio = returned - values[e], (self.logprob(path) - old[e]).exp()
                    weight = min(math.exp(old[e] - mu), 1 + 0.5 * 0.8 ** (version - v))
                    kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                    loss = loss - mean * weight * kept
                self.step(which, loss)
                losses[which].append(loss.item())
        fresh = [e for e, (_, _, _, v) in entries if version - v <= what.max_staleness]
        returns = np.array([batch.rollouts[entries[e][1][0]].advantage for e in fresh])
        advantages = returns - np.array([values[e] for e in fresh])
        found = {
            "value_loss": float(np.mean(losses[1])),
            "value_mean": float(np.mean([values[e] for e in fresh])),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std()),
            "explained_variance": float(1 - advantages.var() / returns.var()),
        }
        return found if pretrain else found | {"loss": float(np.mean(losses[0]))}

    def step(self, which: int, loss: torch.Tensor) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        parameters = self.taught() if which else self.policy.parameters()
        torch.nn.utils.clip_grad_norm_(parameters, LEARNER.clip_grad)
        self.optimizers[which].step()

    def policy_weights(self) -> dict[str, torch.Tensor]:
        return per_expert(self.policy.state_dict())

    def value_weights(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor for name, tensor in per_expert(self.trunk.state_dict()).items()}
        return found | {"score.weight": self.head.detach()[None]}


def sequences(batch: Batch) -> list[tuple[int, list[int], float, int]]:
    """Every entry as (row, path of tokens, log mu, version)."""
    found = []
    for forest in batches.load(batch, vocab_size=64, version=10**6):
        parent, tokens = forest.parent_T.tolist(), forest.tokens_T.tolist()
        for e, token in enumerate(forest.entry_token_E.tolist()):
            path, at = [], token
            while at >= 0:
                path.insert(0, tokens[at])
                at = parent[at]
            row, version = forest.entry_rollout_E[e].item(), forest.entry_version_E[e].item()
            found.append((row, path, forest.entry_logprob_E[e].item(), version))
    return found


def per_expert(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in named.items():
        if name.endswith("experts.gate_up_proj"):
            for e, fused in enumerate(tensor):
                base = f"{name.removesuffix('gate_up_proj')}{e}."
                found[base + "gate_proj.weight"], found[base + "up_proj.weight"] = fused.chunk(2)
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        else:
            found[name] = tensor
    return found


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((tensor - other[name]).abs().max().item() for name, tensor in one.items())


@pytest.mark.parametrize(
    ("minibatches", "aggregation", "versions", "masked"),
    [(1, "rollout_mean", [6, 4], {}), (2, "token_mean", [6, 4], {}), (1, "rollout_mean", [6, 1], {"stale": 10})],
)
def test_an_update_equals_plain_pytorch_on_hugging_face_models(
    model_dir, make_batch, minibatches, aggregation, versions, masked
):
    batch = with_returns(with_versions(make_batch(version=6), versions))
    what = objective(minibatches, aggregation=aggregation)
    reference = Reference(model_dir)
    expected = reference.update(batch, 6, what)
    with learner(model_dir) as mine:
        before = mine.policy_weights(), mine.value_weights()
        report = mine.run(batch, 6, what)
        after = mine.policy_weights(), mine.value_weights()
    assert (report.num_steps, report.num_value_steps, report.num_nonfinite) == (minibatches, minibatches, 0)
    assert report.masked_tokens == masked
    for name, value in expected.items():
        assert report.metrics[name] == pytest.approx(value, abs=2e-6, rel=1e-5), name
    assert report.metrics["ess"] > 0
    assert min(furthest(old, new) for old, new in zip(before, after, strict=True)) > 5e-4
    assert furthest(after[0], reference.policy_weights()) < 1e-5
    assert furthest(after[1], reference.value_weights()) < 1e-5


def test_in_pre_training_the_value_model_alone_learns(model_dir, make_batch):
    batch = with_returns(with_versions(make_batch(version=6), [6, 1]))
    reference = Reference(model_dir)
    expected = reference.update(batch, 6, objective(), pretrain=True)
    with learner(model_dir) as mine:
        before = mine.policy_weights()
        report = mine.run(batch, 6, objective(), pretrain=True)
        assert furthest(before, mine.policy_weights()) == 0.0
        after = mine.value_weights()
    assert (report.num_steps, report.num_value_steps) == (0, 1)
    assert report.masked_tokens == {"stale": 10}
    for name, value in expected.items():
        assert report.metrics[name] == pytest.approx(value, abs=2e-6, rel=1e-5), name
    assert report.metrics["reward_mean"] == pytest.approx(0.25)
    assert "ess" not in report.metrics
    assert furthest(after, reference.value_weights()) < 1e-5


def branching_batch() -> Batch:
    """Two rollouts of one task: the first has two branches that share a sampled token, the second sampled it too."""

    def branch(tokens: list[int], entries: list[int]) -> Branch:
        n = len(entries)
        return Branch(
            tokens=np.array(tokens, np.int32),
            entries=np.array(entries, np.int32),
            logprobs=np.full(n, -2.0, np.float32),
            versions=np.zeros(n, np.int32),
        )

    first = Trainable(0, (branch([3, 7, 20, 9], [1, 3]), branch([3, 7, 21, 10, 11], [1, 3, 4])))
    second = Trainable(1, (branch([3, 7, 22, 12], [1, 3]),))
    rows = tuple(
        RolloutRow(rollout_id=f"r{n}", group_id="g", harness="h", reward=reward, advantage=reward, num_trainable=num)
        for n, (reward, num) in enumerate([(1.0, 4), (0.0, 2)])
    )
    return Batch(batch_id="b", version=0, rollouts=rows, forests=pack([first, second], 64))


def test_branches_and_rollouts_that_share_a_token_equal_separate_sequences(model_dir):
    batch = branching_batch()
    assert len(batch.forests[0].tokens) // 4 == 9
    reference = Reference(model_dir)
    expected = reference.update(batch, 0, objective())
    with learner(model_dir) as mine:
        report = mine.run(batch, 0, objective())
        after = mine.policy_weights(), mine.value_weights()
    for name, value in expected.items():
        assert report.metrics[name] == pytest.approx(value, abs=2e-6, rel=1e-5), name
    assert report.metrics["num_entries"] == 6
    assert furthest(after[0], reference.policy_weights()) < 1e-5
    assert furthest(after[1], reference.value_weights()) < 1e-5


def test_a_value_model_that_repeats_its_lesson_foretells_the_returns(model_dir, make_batch):
    batch = with_returns(make_batch())
    with learner(model_dir) as mine:
        reports = [mine.run(batch, 0, objective(), pretrain=True) for _ in range(40)]
    assert reports[-1].metrics["value_loss"] < 0.2 * reports[0].metrics["value_loss"]
    assert reports[-1].metrics["explained_variance"] > 0.5


def test_equal_returns_have_no_explained_variance(model_dir, make_batch):
    batch = make_batch()
    rows = tuple(msgspec.structs.replace(row, advantage=1.0) for row in batch.rollouts)
    with learner(model_dir) as mine:
        report = mine.run(msgspec.structs.replace(batch, rollouts=rows), 0, objective())
    assert "explained_variance" not in report.metrics
    assert report.metrics["advantage_std"] > 0


@pytest.mark.parametrize("pretrain", [False, True])
def test_an_infinite_gradient_teaches_neither(model_dir, make_batch, pretrain):
    with learner(model_dir) as mine:
        broken = mine.critic.model if pretrain else mine.policy.model
        with torch.no_grad():
            unwrap(broken).decoder.final_layernorm.weight[0] = float("nan")
        before = mine.policy_weights(), mine.value_weights()
        report = mine.run(with_returns(make_batch()), 0, objective(), pretrain)
        after = mine.policy_weights(), mine.value_weights()
    assert (report.num_steps, report.num_value_steps, report.num_nonfinite) == (0, 0, 1)
    assert report.masked_tokens == {"nonfinite_gradient": 25}
    assert all(math.isfinite(value) for value in report.metrics.values())
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old if name != "model.norm.weight")


def test_a_batch_without_entries_teaches_nothing(model_dir, make_batch):
    rows = tuple(msgspec.structs.replace(row, num_trainable=0) for row in make_batch().rollouts)
    empty = Batch(batch_id="b", version=0, rollouts=rows, forests=())
    with learner(model_dir) as mine:
        for pretrain in (True, False):
            report = mine.run(empty, 0, objective(2), pretrain)
            assert (report.num_steps, report.num_value_steps, report.num_nonfinite) == (0, 0, 0)
            assert "value_loss" not in report.metrics
