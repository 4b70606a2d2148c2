"""[correction]: one table per kind. The formulas and their sources are in `learner/correction.py`.

rho = pi_old / mu, r = pi_theta / pi_old, w = pi_theta / mu = r rho, with mu as recorded at rollout time.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from clawpipe.pipeline.tables import Fraction, Positive, Table

AtMostOne = Annotated[float, Meta(gt=0, le=1)]
AtLeastOne = Annotated[float, Meta(ge=1)]


class AutoThrottle(Table, frozen=True, kw_only=True):
    """[correction.auto_throttle]: `for_updates` updates in a row with an effective sample size below `ess_below`
    lower [schedule] max_staleness by one step, as many in a row at or above it raise it again by one."""

    ess_below: AtMostOne = 0.5
    for_updates: Positive = 3


class _Kind(Table, frozen=True, kw_only=True):
    """What every kind has."""

    auto_throttle: AutoThrottle | None = None


class UncorrectedConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="none"):
    """kind = "none": as if pi_old had sampled every token."""

    def __post_init__(self) -> None:
        if self.auto_throttle is not None:
            raise ValueError(
                'kind = "none" gives every token the weight 1, so its effective sample size never falls; remove '
                "[correction.auto_throttle] or choose another kind"
            )


class TruncatedConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="truncated"):
    """kind = "truncated": min(rho, c(s)), c(s) = 1 + (cap - 1) * decay**s, s the token's staleness."""

    cap: AtLeastOne = 2.0
    decay: AtMostOne = 1.0


class DecoupledConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="decoupled"):
    """kind = "decoupled": rho as it is; tokens above `mask_above` are left out."""

    mask_above: AtLeastOne = 5.0


class IcePopConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="icepop"):
    """kind = "icepop": rho as it is; tokens outside of [low, high] are left out."""

    low: AtMostOne = 0.5
    high: AtLeastOne = 5.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)


class GeometricMaskConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="geometric_mask"):
    """kind = "geometric_mask": branches whose geometric mean of rho is outside of [low, high], or that have one token
    with rho below `veto_below`, are left out; in the others min(rho, cap)."""

    low: AtMostOne = 0.99
    high: AtLeastOne = 1.01
    veto_below: Fraction = 1e-4
    cap: AtLeastOne = 2.0

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)


class CispoConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="cispo"):
    """kind = "cispo": min(w, cap) on the log-likelihood; [algorithm] eps_low and eps_high have no effect."""

    cap: AtLeastOne = 5.0


class ToprConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="topr"):
    """kind = "topr": on the log-likelihood 1 where the advantage is not negative, else min(w, 1); [algorithm] eps_low
    and eps_high have no effect."""


class BinaryTvConfig(_Kind, frozen=True, kw_only=True, tag_field="kind", tag="binary_tv"):
    """kind = "binary_tv": w, without the tokens whose probability has already moved by more than `delta` the way that
    their advantage asks for; [algorithm] eps_low and eps_high have no effect."""

    delta: AtMostOne = 0.2
    kl_coef: Annotated[float, Meta(ge=0)] = 1e-3


CorrectionConfig = (
    UncorrectedConfig
    | TruncatedConfig
    | DecoupledConfig
    | IcePopConfig
    | GeometricMaskConfig
    | CispoConfig
    | ToprConfig
    | BinaryTvConfig
)

DEFAULT_KIND = "truncated"  # of a table that does not name its kind


def _check_band(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low = {low} is not below high = {high}: every token would be left out; raise high")
