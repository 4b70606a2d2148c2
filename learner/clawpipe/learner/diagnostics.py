"""How far the data is from the policy that learns from it: in all, per harness, per staleness bucket, and per role
where auxiliary calls are trained too.

With rho_t = pi_old / mu and w_t the weight used: k1 = mean -log rho (also the mean of log mu - log pi_old),
k3 = mean of rho - 1 - log rho (Schulman 2020, an estimate of KL(mu || pi_old) that is never negative),
ESS = (sum w)^2 / (n sum w^2), where n counts the tokens that the correction leaves out too, with w = 0.

With v the version that sampled a token, log rho = [log pi_old - log pi_v] + [log pi_v - log mu]: staleness and
engine mismatch. pi_v is not at hand, but for tokens of staleness 0 it is pi_old, so their k1 is the mismatch alone:

    mismatch_k1 = k1 of the group's tokens of staleness 0; for a staleness bucket, of all such tokens
    staleness_k1 = k1 - mismatch_k1

This assumes that engine and learner disagree alike on tokens of every version. Without tokens of staleness 0
there is neither number.

Sums are kept on the device in float64 and read once per update.

Shapes: G groups of entries (all, each harness, role and staleness bucket), R rows, E loss entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from clawpipe.pipeline.forest import RolloutRow

_BUCKETS: Final = ((0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (5, "5-8"), (9, "9+"))
_SUMS: Final = ("n", "staleness", "k1", "k3", "w", "w2", "capped", "clipped", "entropy", "fresh_n", "fresh_k1")
_MAXIMA: Final = ("weight", "staleness")


class Diagnostics:
    """Collects the entries of one update, forest by forest."""

    def __init__(self, rollouts: Sequence[RolloutRow], device: torch.device, reasons: Sequence[str] = ()) -> None:
        """`reasons`: for which tokens may be left out by the correction."""
        self._reasons = tuple(reasons)
        harnesses = [f"harness/{row.harness}/" for row in rollouts]
        roles = [f"role/{row.role}/" for row in rollouts]
        kinds = [harnesses] if len(set(roles)) < 2 else [harnesses, roles]
        names = [name for kind in kinds for name in sorted(set(kind))]
        self._names = ["", *names, *(f"staleness/{name}/" for _, name in _BUCKETS)]
        self._first_bucket = 1 + len(names)
        self._kinds_R = [torch.tensor([1 + names.index(name) for name in kind], device=device) for kind in kinds]
        self._bounds = torch.tensor([bound for bound, _ in _BUCKETS][1:], device=device)
        shape = (len(self._names), len(_SUMS) + len(self._reasons))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(shape[0], len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        *,
        rollout_E: Tensor,
        staleness_E: Tensor,
        log_rho_E: Tensor,
        entropy_E: Tensor,
        weight_E: Tensor,
        capped_E: Tensor,
        clipped_E: Tensor,
        left_out: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Takes the entries of one forest that are not too stale. `left_out`: reason -> bool [E]."""
        log_rho_E, weight_E = log_rho_E.double(), weight_E.double()
        rho_E, fresh_E = log_rho_E.exp(), staleness_E == 0
        columns = {
            "n": torch.ones_like(rho_E),
            "staleness": staleness_E,
            "k1": -log_rho_E,
            "k3": rho_E - 1 - log_rho_E,
            "w": weight_E,
            "w2": weight_E.square(),
            "capped": capped_E,
            "clipped": clipped_E,
            "entropy": entropy_E,
            "fresh_n": fresh_E,
            "fresh_k1": -log_rho_E * fresh_E,
            **(left_out or {}),
        }
        values_EK = torch.stack([columns[name].double() for name in (*_SUMS, *self._reasons)], 1)
        maxima_EM = torch.stack([weight_E, staleness_E.double()], 1)
        bucket_E = self._first_bucket + torch.bucketize(staleness_E, self._bounds, right=True)
        for group_E in (torch.zeros_like(rollout_E), *(kind_R[rollout_E] for kind_R in self._kinds_R), bucket_E):
            self._sums.index_add_(0, group_E, values_EK)
            self._maxima.scatter_reduce_(0, group_E[:, None].expand_as(maxima_EM), maxima_EM, "amax")

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Joins the ranks of a data-parallel group; a collective call."""
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(self._sums, group=group)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX, group=group)

    def metrics(self) -> dict[str, float]:
        """One number per group and diagnostic; groups without entries are left out."""
        columns = (*_SUMS, *self._reasons)
        totals = [dict(zip(columns, sums, strict=True)) for sums in self._sums.tolist()]
        maxima = [dict(zip(_MAXIMA, values, strict=True)) for values in self._maxima.tolist()]
        found: dict[str, float] = {}
        for number, (name, total, most) in enumerate(zip(self._names, totals, maxima, strict=True)):
            if total["n"]:
                values = _metrics(total, most)
                values |= _split(total, totals[0] if number >= self._first_bucket else total)
                values |= {f"left_out/{reason}": total[reason] / total["n"] for reason in self._reasons}
                found |= {f"{name}{key}": value for key, value in values.items()}
        return found


def _metrics(total: dict[str, float], most: dict[str, float]) -> dict[str, float]:
    n = total["n"]
    return {
        "num_entries": n,
        "staleness_mean": total["staleness"] / n,
        "staleness_max": most["staleness"],
        "k1": total["k1"] / n,
        "k3": total["k3"] / n,
        "ess": total["w"] ** 2 / (n * total["w2"]) if total["w2"] else 0.0,
        "cap_fraction": total["capped"] / n,
        "weight_mean": total["w"] / n,
        "weight_max": most["weight"],
        "clip_fraction": total["clipped"] / n,
        "entropy": total["entropy"] / n,
    }


def _split(total: dict[str, float], reference: dict[str, float]) -> dict[str, float]:
    """k1 of `total` in two: engine mismatch, as the tokens of staleness 0 in `reference` show it, and staleness."""
    if not reference["fresh_n"]:
        return {}
    mismatch_k1 = reference["fresh_k1"] / reference["fresh_n"]
    return {"mismatch_k1": mismatch_k1, "staleness_k1": total["k1"] / total["n"] - mismatch_k1}
