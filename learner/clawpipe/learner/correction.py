"""Off-policy correction: what a token adds to the objective that another policy than pi_theta sampled.

With mu as recorded at rollout time, pi_old the learner before the update and pi_theta the learner as it is now:

    r_t = pi_theta(t) / pi_old(t)    rho_t = pi_old(t) / mu(t)    w_t = pi_theta(t) / mu(t) = r_t rho_t

Each correction maps the loss entries of one forest to their terms J_t; `loss.policy_loss` sums them up. A token that
is left out has the term 0 and counts in the denominators all the same: leaving out never makes the others louder.
"sg" stops the gradient.

Shapes: E loss entries. All float32: a ratio exponentiates a difference of logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from clawpipe.pipeline.config import (
    BinaryTvConfig,
    CispoConfig,
    CorrectionConfig,
    DecoupledConfig,
    GeometricMaskConfig,
    IcePopConfig,
    ToprConfig,
    TruncatedConfig,
    UncorrectedConfig,
)

# exp(20) = 4.9e8 and its square are finite in float32; beyond, a ratio says nothing more.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What there is to know of one forest's loss entries."""

    logprob_E: Tensor  # log pi_theta, with gradient
    old_E: Tensor  # log pi_old
    behaviour_E: Tensor  # log mu
    advantage_E: Tensor
    staleness_E: Tensor  # int64
    segment_E: Tensor  # int64, below E: equal for the entries of one kept branch, which are all in here
    eps_low: float
    eps_high: float

    @property
    def ratio_E(self) -> Tensor:
        """r, with gradient."""
        return log_ratio(self.logprob_E, self.old_E.detach()).exp()

    @property
    def log_rho_E(self) -> Tensor:
        """log rho, no gradient."""
        return log_ratio(self.old_E, self.behaviour_E).detach()

    @property
    def log_w_E(self) -> Tensor:
        """log w, with gradient."""
        return log_ratio(self.logprob_E, self.behaviour_E)


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What a correction makes of them."""

    objective_E: Tensor  # J, float32 with gradient, to be maximised
    weight_E: Tensor  # the weight in J, float32 without gradient, 0 where left out
    capped_E: Tensor  # bool: the weight was cut at a cap
    clipped_E: Tensor  # bool: r was clipped, no gradient flows
    left_out: Mapping[str, Tensor] = field(default_factory=dict)  # reason -> bool [E]; none under two reasons


class Correction(Protocol):
    """From loss entries to terms."""

    reasons: ClassVar[tuple[str, ...]]  # the keys of `Terms.left_out`

    def terms(self, entries: Entries) -> Terms:
        """The terms of these entries."""
        ...


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7): as if pi_old had sampled every token.

    J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)
    """

    reasons: ClassVar[tuple[str, ...]] = ()

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        return surrogate(entries, torch.ones_like(entries.log_rho_E))


@dataclass(frozen=True, slots=True)
class Truncated:
    """Truncated importance sampling per token (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training").

    J = min(rho, c(s)) min(r A, clip(r) A), c(s) = 1 + (cap - 1) decay^s: with decay < 1 the cap tightens with
    staleness s.
    """

    cap: float
    decay: float
    reasons: ClassVar[tuple[str, ...]] = ()

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        rho_E = entries.log_rho_E.exp()
        cap_E = 1.0 + (self.cap - 1.0) * self.decay ** entries.staleness_E.float()
        return surrogate(entries, torch.minimum(rho_E, cap_E), capped_E=rho_E >= cap_E)


@dataclass(frozen=True, slots=True)
class Decoupled:
    """Decoupled PPO (arXiv 2110.00641, eq. 3; per token and asynchronous: AReaL, arXiv 2505.24298).

    J = rho min(r A, clip(r) A) where rho <= mask_above, else 0
    """

    mask_above: float
    reasons: ClassVar[tuple[str, ...]] = ("decoupled_mask",)

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        rho_E = entries.log_rho_E.exp()
        return surrogate(entries, rho_E, left_out={"decoupled_mask": rho_E > self.mask_above})


@dataclass(frozen=True, slots=True)
class IcePop:
    """IcePop (Ring-1T, arXiv 2510.18855): token masking on both sides.

    J = M(rho) min(r A, clip(r) A), M(rho) = rho where low <= rho <= high, else 0
    """

    low: float
    high: float
    reasons: ClassVar[tuple[str, ...]] = ("icepop_band",)

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        rho_E = entries.log_rho_E.exp()
        return surrogate(entries, rho_E, left_out={"icepop_band": (rho_E < self.low) | (rho_E > self.high)})


@dataclass(frozen=True, slots=True)
class GeometricMask:
    """A branch is in or out as a whole, by the geometric mean of its ratios (GSPO's length-normalised s_i,
    arXiv 2507.18071, here of pi_old over mu); one token that pi_old all but excludes vetoes it.

    J = min(rho, cap) min(r A, clip(r) A) where low <= exp(mean of log rho over the branch) <= high and no rho of the
    branch is below veto_below, else 0

    A branch's tokens are those it is the first of its row to train, the stale ones among them too.
    """

    low: float
    high: float
    veto_below: float
    cap: float
    reasons: ClassVar[tuple[str, ...]] = ("veto", "geometric_mask")

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        rho_E = entries.log_rho_E.exp()
        geometric_E = _branch_mean(entries.log_rho_E, entries.segment_E).exp()
        veto_E = _branch_any(rho_E < self.veto_below, entries.segment_E)
        outside_E = (geometric_E < self.low) | (geometric_E > self.high)
        left_out = {"veto": veto_E, "geometric_mask": outside_E & ~veto_E}
        return surrogate(entries, rho_E.clamp(max=self.cap), capped_E=rho_E >= self.cap, left_out=left_out)


@dataclass(frozen=True, slots=True)
class Cispo:
    """CISPO (MiniMax-M1, arXiv 2506.13585, J_CISPO without the lower bound; so in ScaleRL, arXiv 2510.13786).

    J = sg(min(w, cap)) A log pi_theta: a large ratio is cut, its token keeps a gradient
    """

    cap: float
    reasons: ClassVar[tuple[str, ...]] = ()

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        w_E = entries.log_w_E.detach().exp()
        return likelihood(entries, w_E.clamp(max=self.cap), capped_E=w_E >= self.cap)


@dataclass(frozen=True, slots=True)
class Topr:
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286), with the ratio of a token instead of a sequence's.

    J = A log pi_theta where A >= 0, sg(min(w, 1)) A log pi_theta where A < 0
    """

    reasons: ClassVar[tuple[str, ...]] = ()

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        w_E, negative_E = entries.log_w_E.detach().exp(), entries.advantage_E < 0
        return likelihood(entries, torch.where(negative_E, w_E.clamp(max=1.0), 1.0), capped_E=negative_E & (w_E > 1.0))


@dataclass(frozen=True, slots=True)
class BinaryTv:
    """DPPO with the binary total variation (arXiv 2602.04879): the trust region is in probabilities, not in ratios.

    J = keep A w - kl_coef log^2 w; not kept are tokens with A > 0 and pi_theta - mu > delta, and those with A < 0 and
    pi_theta - mu < -delta. Of these only the pull back to mu stays.
    """

    delta: float
    kl_coef: float
    reasons: ClassVar[tuple[str, ...]] = ("tv",)

    def terms(self, entries: Entries) -> Terms:
        """See `Correction`."""
        log_w_E, A_E = entries.log_w_E, entries.advantage_E
        moved_E = entries.logprob_E.detach().float().exp() - entries.behaviour_E.float().exp()
        left_out_E = (A_E > 0) & (moved_E > self.delta) | (A_E < 0) & (moved_E < -self.delta)
        w_E = torch.where(left_out_E, 0.0, log_w_E.exp())
        objective_E = w_E * A_E - self.kl_coef * log_w_E.square()
        return Terms(objective_E, w_E.detach(), _none(w_E), _none(w_E), {"tv": left_out_E})


def build_correction(config: CorrectionConfig) -> Correction:
    """The correction that [correction] asks for."""
    match config:
        case UncorrectedConfig():
            return Uncorrected()
        case TruncatedConfig(cap=cap, decay=decay):
            return Truncated(cap, decay)
        case DecoupledConfig(mask_above=mask_above):
            return Decoupled(mask_above)
        case IcePopConfig(low=low, high=high):
            return IcePop(low, high)
        case GeometricMaskConfig(low=low, high=high, veto_below=veto_below, cap=cap):
            return GeometricMask(low, high, veto_below, cap)
        case CispoConfig(cap=cap):
            return Cispo(cap)
        case ToprConfig():
            return Topr()
        case BinaryTvConfig(delta=delta, kl_coef=kl_coef):
            return BinaryTv(delta, kl_coef)


def surrogate(
    entries: Entries,
    weight_E: Tensor,
    *,
    capped_E: Tensor | None = None,
    left_out: Mapping[str, Tensor] | None = None,
) -> Terms:
    """J = weight min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), 0 where left out. The weight is a constant."""
    ratio_E, A_E = entries.ratio_E, entries.advantage_E
    clipped_E = ratio_E.clamp(1.0 - entries.eps_low, 1.0 + entries.eps_high)
    for without_E in (left_out or {}).values():
        weight_E = weight_E.masked_fill(without_E, 0.0)
    return Terms(
        objective_E=weight_E.detach() * torch.minimum(ratio_E * A_E, clipped_E * A_E),
        weight_E=weight_E.detach(),
        capped_E=_none(weight_E) if capped_E is None else capped_E & (weight_E > 0),
        clipped_E=(clipped_E * A_E < ratio_E * A_E).detach(),
        left_out=left_out or {},
    )


def likelihood(entries: Entries, weight_E: Tensor, *, capped_E: Tensor) -> Terms:
    """J = weight A log pi_theta, nothing clipped. The weight is a constant."""
    objective_E = weight_E * entries.advantage_E * entries.logprob_E.float()
    return Terms(objective_E, weight_E, capped_E, _none(weight_E))


def log_ratio(logprob_E: Tensor, reference_E: Tensor) -> Tensor:
    """log of logprob's policy over the reference's, float32, clamped to +-20 (no gradient beyond)."""
    return (logprob_E.float() - reference_E.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _branch_mean(values_E: Tensor, segment_E: Tensor) -> Tensor:
    """[E]: each entry's branch's mean. There are no more branches than entries."""
    sums_S = torch.zeros_like(values_E).index_add(0, segment_E, values_E)
    counts_S = torch.zeros_like(values_E).index_add(0, segment_E, torch.ones_like(values_E))
    return (sums_S / counts_S.clamp(min=1.0))[segment_E]


def _branch_any(holds_E: Tensor, segment_E: Tensor) -> Tensor:
    """bool [E]: whether it holds for any entry of the branch."""
    return torch.zeros_like(holds_E, dtype=torch.int64).index_add(0, segment_E, holds_E.long())[segment_E] > 0


def _none(like_E: Tensor) -> Tensor:
    return torch.zeros_like(like_E, dtype=torch.bool)
