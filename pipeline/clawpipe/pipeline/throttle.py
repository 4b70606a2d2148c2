"""How much staleness the effective sample size of the updates allows. Pure.

It follows from the updates in the books alone, so a service that starts again, and a learner that starts anew from a
checkpoint, find what holds without a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from clawpipe.pipeline.config import AutoThrottle

ESS = "ess"  # the metric of an update


def allowed_staleness(ess: Iterable[float], rule: AutoThrottle, max_staleness: int) -> int:
    """After updates with these effective sample sizes, oldest first; within 0..`max_staleness`."""
    allowed, below, above = max_staleness, 0, 0
    for value in ess:
        below, above = (below + 1, 0) if value < rule.ess_below else (0, above + 1)
        if below == rule.for_updates:
            allowed, below = max(allowed - 1, 0), 0
        if above == rule.for_updates:
            allowed, above = min(allowed + 1, max_staleness), 0
    return allowed
