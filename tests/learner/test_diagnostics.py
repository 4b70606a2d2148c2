"""Diagnostics against a numpy oracle, in all and by group."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from clawpipe.learner.diagnostics import Diagnostics
from clawpipe.pipeline.forest import RolloutRow


def rows(*harnesses: str) -> list[RolloutRow]:
    return [
        RolloutRow(rollout_id=f"r{i}", group_id="g", harness=harness, reward=0.0, advantage=0.0, num_trainable=1)
        for i, harness in enumerate(harnesses)
    ]


def oracle(log_rho, weight, capped, clipped, entropy, staleness):
    rho = np.exp(log_rho)
    return {
        "num_entries": len(rho),
        "k1": -log_rho.mean(),
        "k3": (rho - 1 - log_rho).mean(),
        "ess": weight.sum() ** 2 / (len(rho) * (weight**2).sum()),
        "cap_fraction": capped.mean(),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "clip_fraction": clipped.mean(),
        "entropy": entropy.mean(),
        "staleness_mean": staleness.mean(),
        "staleness_max": staleness.max(),
    }


def test_every_group_equals_the_oracle_on_its_entries():
    rng = np.random.default_rng(5)
    n = 60
    owner = rng.integers(0, 3, n)
    staleness = rng.integers(0, 12, n)
    log_rho = rng.normal(0, 0.7, n).astype(np.float32).astype(np.float64)
    weight = np.minimum(np.exp(log_rho), 2.0)
    capped, clipped = weight >= 2.0, rng.random(n) < 0.3
    entropy = rng.uniform(0, 3, n)
    harness = np.array(["a", "b", "a"])[owner]
    found = Diagnostics(rows("a", "b", "a"), torch.device("cpu"))
    for part in np.array_split(np.arange(n), 4):
        found.add(
            rollout_E=torch.tensor(owner[part]),
            staleness_E=torch.tensor(staleness[part]),
            log_rho_E=torch.tensor(log_rho[part], dtype=torch.float32),
            entropy_E=torch.tensor(entropy[part], dtype=torch.float32),
            weight_E=torch.tensor(weight[part], dtype=torch.float32),
            capped_E=torch.tensor(capped[part]),
            clipped_E=torch.tensor(clipped[part]),
        )
    metrics = found.metrics()
    columns = (log_rho, weight, capped, clipped, entropy, staleness)
    groups = {
        "": staleness >= 0,
        "harness/a/": harness == "a",
        "harness/b/": harness == "b",
        "staleness/0/": staleness == 0,
        "staleness/1/": staleness == 1,
        "staleness/3-4/": (staleness == 3) | (staleness == 4),
        "staleness/5-8/": (staleness >= 5) & (staleness <= 8),
        "staleness/9+/": staleness >= 9,
    }
    for name, chosen in groups.items():
        for key, value in oracle(*(column[chosen] for column in columns)).items():
            assert metrics[f"{name}{key}"] == pytest.approx(value, rel=1e-6), (name, key)


def test_equal_weights_are_a_full_sample_and_one_big_weight_is_not():
    def ess(weights: list[float]) -> float:
        found = Diagnostics(rows("a"), torch.device("cpu"))
        zeros = torch.zeros(len(weights))
        found.add(
            rollout_E=torch.zeros(len(weights), dtype=torch.long),
            staleness_E=torch.zeros(len(weights), dtype=torch.long),
            log_rho_E=zeros,
            entropy_E=zeros,
            weight_E=torch.tensor(weights),
            capped_E=zeros.bool(),
            clipped_E=zeros.bool(),
        )
        return found.metrics()["ess"]

    assert ess([0.5, 0.5, 0.5, 0.5]) == pytest.approx(1.0)
    assert ess([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_roles_are_told_apart_where_more_than_one_is_trained():
    both = [*rows("a", "b"), msgspec.structs.replace(rows("b")[0], role="subagent")]
    found = {}
    for name, chosen in (("both", both), ("main", both[:2])):
        diagnostics = Diagnostics(chosen, torch.device("cpu"))
        owner = torch.tensor([0, 1, 1, 2, 2, 2])[: 3 * len(chosen) - 3]
        weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[: len(owner)]
        zeros = torch.zeros(len(owner))
        diagnostics.add(
            rollout_E=owner,
            staleness_E=zeros.long(),
            log_rho_E=zeros,
            entropy_E=zeros,
            weight_E=weight,
            capped_E=zeros.bool(),
            clipped_E=zeros.bool(),
        )
        found[name] = diagnostics.metrics()
    means = {key: value for key, value in found["both"].items() if key.endswith("weight_mean")}
    assert means == {
        "weight_mean": 3.5,
        "harness/a/weight_mean": 1.0,
        "harness/b/weight_mean": 4.0,
        "role/main/weight_mean": 2.0,
        "role/subagent/weight_mean": 5.0,
        "staleness/0/weight_mean": 3.5,
    }
    assert not any(key.startswith("role/") for key in found["main"])


def test_groups_without_entries_are_left_out():
    assert Diagnostics(rows("a"), torch.device("cpu")).metrics() == {}
