"""Weights of the corrections, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from clawpipe.learner.correction import build_correction, log_ratio
from clawpipe.pipeline.config import CorrectionConfig


def weigh(config: CorrectionConfig, rhos: list[float], staleness: list[int]):
    log_rho = torch.tensor([math.log(rho) for rho in rhos], requires_grad=True)
    weight, capped = build_correction(config).weigh(log_rho, torch.tensor(staleness))
    return weight, capped.tolist()


def test_truncation_cuts_from_above_only():
    weight, capped = weigh(CorrectionConfig(cap=2.0), [0.01, 1.0, 1.9, 2.5, 400.0], [0] * 5)
    assert weight.tolist() == pytest.approx([0.01, 1.0, 1.9, 2.0, 2.0])
    assert capped == [False, False, False, True, True]
    assert not weight.requires_grad


def test_decay_tightens_the_cap_with_staleness():
    # c(s) = 1 + (3 - 1) * 0.5^s: 3, 2, 1.5
    weight, capped = weigh(CorrectionConfig(cap=3.0, decay=0.5), [2.5, 2.5, 2.5, 0.5], [0, 1, 2, 2])
    assert weight.tolist() == pytest.approx([2.5, 2.0, 1.5, 0.5])
    assert capped == [False, True, True, False]


def test_constant_cap_does_not_depend_on_staleness():
    weight, _ = weigh(CorrectionConfig(cap=2.0, decay=1.0), [5.0, 5.0], [0, 7])
    assert weight.tolist() == [2.0, 2.0]


def test_none_weighs_every_token_alike():
    weight, capped = weigh(CorrectionConfig(kind="none"), [0.1, 9.0], [0, 3])
    assert weight.tolist() == [1.0, 1.0]
    assert capped == [False, False]


def test_log_ratio_is_clamped_in_float32():
    ratio = log_ratio(torch.tensor([-1.0, -90.0, -0.5]), torch.tensor([-90.0, -1.0, -0.25]))
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == [20.0, -20.0, -0.25]
    low = log_ratio(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.001]))
    assert low.item() == pytest.approx(0.001, abs=1e-6)
