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
        "left_out/band": capped.mean(),  # of tokens that are capped here
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
    found = Diagnostics(rows("a", "b", "a"), torch.device("cpu"), ("band",))
    for part in np.array_split(np.arange(n), 4):
        found.add(
            rollout_E=torch.tensor(owner[part]),
            staleness_E=torch.tensor(staleness[part]),
            log_rho_E=torch.tensor(log_rho[part], dtype=torch.float32),
            entropy_E=torch.tensor(entropy[part], dtype=torch.float32),
            weight_E=torch.tensor(weight[part], dtype=torch.float32),
            capped_E=torch.tensor(capped[part]),
            clipped_E=torch.tensor(clipped[part]),
            left_out={"band": torch.tensor(capped[part])},
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
        fresh = (staleness == 0) & (chosen | name.startswith("staleness/"))
        mismatch_k1 = -log_rho[fresh].mean()
        assert metrics[f"{name}mismatch_k1"] == pytest.approx(mismatch_k1, rel=1e-6)
        staleness_k1 = -log_rho[chosen].mean() - mismatch_k1
        assert metrics[f"{name}staleness_k1"] == pytest.approx(staleness_k1, rel=1e-6, abs=1e-12)


def test_log_w_is_split_into_engine_mismatch_and_staleness_where_fresh_tokens_show_the_first():
    # Harness a: fresh -log rho 0.1 and 0.3, two steps old 0.8. Harness b: one step old 0.5, nothing fresh.
    found = Diagnostics(rows("a", "b"), torch.device("cpu"))
    zeros = torch.zeros(4)
    found.add(
        rollout_E=torch.tensor([0, 0, 0, 1]),
        staleness_E=torch.tensor([0, 0, 2, 1]),
        log_rho_E=-torch.tensor([0.1, 0.3, 0.8, 0.5], dtype=torch.float64),
        entropy_E=zeros,
        weight_E=zeros + 1,
        capped_E=zeros.bool(),
        clipped_E=zeros.bool(),
    )
    split = {key: value for key, value in found.metrics().items() if key.endswith(("mismatch_k1", "staleness_k1"))}
    assert split == pytest.approx(
        {
            "mismatch_k1": 0.2,
            "staleness_k1": 1.7 / 4 - 0.2,
            "harness/a/mismatch_k1": 0.2,
            "harness/a/staleness_k1": 0.4 - 0.2,
            "staleness/0/mismatch_k1": 0.2,
            "staleness/0/staleness_k1": 0.0,
            "staleness/1/mismatch_k1": 0.2,
            "staleness/1/staleness_k1": 0.5 - 0.2,
            "staleness/2/mismatch_k1": 0.2,
            "staleness/2/staleness_k1": 0.8 - 0.2,
        }
    )


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
