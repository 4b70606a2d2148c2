"""Muon and AdamW for the cold start; AdamW's place in the protocol is tested with the update."""

from __future__ import annotations

import math

import pytest
import torch

from clawpipe.learner.optimizer import MuonAdamW


class Net(torch.nn.Module):
    """Named as a Megatron model names its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(8, 16)
        self.linear_qkv = torch.nn.Linear(16, 48, bias=False)
        self.router = torch.nn.Linear(16, 4, bias=False)
        self.norm = torch.nn.Parameter(torch.ones(16))


def stepped(scale: float = 1.0, grad: float = 1.0) -> dict[str, torch.Tensor]:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = MuonAdamW(net, muon_lr=0.02, adamw_lr=0.01, clip_grad=1.0)
    optimizer.set_lr(scale)
    optimizer.zero_grad()
    for p in net.parameters():
        p.grad = grad * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in net.named_parameters()}


def test_a_matrix_moves_by_an_almost_orthogonal_step():
    singular = torch.linalg.svdvals(stepped()["linear_qkv.weight"])
    # Muon's scale for a tall matrix is sqrt(rows / columns); Newton-Schulz leaves singular values round 1.
    assert singular.min() > 0.6 * 0.02 * math.sqrt(3)
    assert singular.max() < 1.3 * 0.02 * math.sqrt(3)


def test_embeddings_norms_and_routers_move_as_adamw_moves_them():
    moved = stepped()
    for name in ("embedding.weight", "router.weight", "norm"):
        # The first step of Adam is its rate, whatever the gradient's size.
        assert moved[name].abs().max().item() == pytest.approx(0.01, rel=1e-3), name
        assert moved[name].abs().min().item() == pytest.approx(0.01, rel=1e-2), name


def test_both_rates_follow_the_schedule():
    whole, half = stepped(1.0), stepped(0.5)
    for name, change in whole.items():
        assert torch.allclose(half[name], 0.5 * change, atol=1e-7), name


def test_a_gradient_that_is_not_finite_makes_no_step():
    assert all(change.abs().max() == 0.0 for change in stepped(grad=math.inf).values())


def test_the_norm_before_clipping_is_returned():
    net = Net()
    optimizer = MuonAdamW(net, muon_lr=0.0, adamw_lr=0.01, clip_grad=1.0)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    net.norm.grad = torch.full((16,), 3.0)
    assert optimizer.step() == pytest.approx(12.0)
    assert net.norm.grad.norm().item() == pytest.approx(1.0, rel=1e-4)
