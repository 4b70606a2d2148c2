"""Off-policy correction: how much a token counts that another policy than log pi_old's sampled.

rho_t = pi_old(t) / mu(t), with mu as recorded at rollout time and pi_old the learner before the update. The
loss multiplies each token by a constant weight w_t made from rho_t and the token's staleness.

Shapes: E loss entries. All float32: the ratio exponentiates a difference of logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clawpipe.pipeline.config import CorrectionConfig

# exp(20) = 4.9e8 and its square are finite in float32; beyond, a ratio says nothing more.
MAX_LOG_RATIO = 20.0


class Correction(Protocol):
    """From ratios and staleness to constant weights."""

    def weigh(self, log_rho_E: Tensor, staleness_E: Tensor) -> tuple[Tensor, Tensor]:
        """Weights w (float32 [E], no gradient) and which of them were cut at a cap (bool [E])."""
        ...


@dataclass(frozen=True, slots=True)
class Truncated:
    """Truncated importance sampling per token (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training").

    w = min(rho, c(s)), c(s) = 1 + (cap - 1) * decay^s: with decay < 1 the cap tightens with staleness s.
    """

    cap: float
    decay: float

    def weigh(self, log_rho_E: Tensor, staleness_E: Tensor) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        rho_E = log_rho_E.detach().exp()
        cap_E = 1.0 + (self.cap - 1.0) * self.decay ** staleness_E.float()
        return torch.minimum(rho_E, cap_E), rho_E >= cap_E


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """w = 1: as if pi_old had sampled every token."""

    def weigh(self, log_rho_E: Tensor, staleness_E: Tensor) -> tuple[Tensor, Tensor]:
        """See `Correction`."""
        return torch.ones_like(log_rho_E), torch.zeros_like(staleness_E, dtype=torch.bool)


def build_correction(config: CorrectionConfig) -> Correction:
    """The correction that [correction] asks for."""
    if config.kind == "none":
        return Uncorrected()
    return Truncated(cap=config.cap, decay=config.decay)


def log_ratio(logprob_E: Tensor, reference_E: Tensor) -> Tensor:
    """log of logprob's policy over the reference's, float32, clamped to +-20 (no gradient beyond)."""
    return (logprob_E.float() - reference_E.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
