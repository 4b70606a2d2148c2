"""What a grader printed -> the reward: the mean of all numeric values of its JSON object. Pure.

ClawGym II's code score is the mean of the numeric values that the grader returns (arXiv 2608.16798):
booleans count as 0 and 1, and a value under the key "reward", which one family of graders prints as its
author's own verdict, is a value like any other; it stays visible under that name among the checks.
"""

from __future__ import annotations

import json
import math
from typing import Any

from msgspec import Struct


class Graded(Struct, frozen=True, kw_only=True):
    """A verdict. `note` says why the grader's own words were not used; then one check, at 0, names the reason."""

    reward: float
    checks: dict[str, float]
    note: str = ""


def score(output: str) -> Graded:
    """The verdict that a grader's standard output states.

    Output without a usable verdict is the agent's zero: the agent's files are the only thing that varies
    between two runs of a task's grader, and a policy must not gain by breaking it.
    """
    found = _last_object(output)
    if found is None:
        return zero("grader_printed_no_json", f"printed no JSON object: {output[-200:]!r}")
    numbers = {_text(key): value for key, value in found.items() if isinstance(value, bool | int | float)}
    if not numbers:
        return zero("grader_printed_no_number", f"printed no numeric value: {output[-200:]!r}")
    for key, value in numbers.items():
        if not 0 <= value <= 1:  # NaN is refused here too: it compares as false
            return zero("grader_value_refused", f"printed {key} = {str(value)[:40]}, which is not from 0 to 1")
    checks = {key: float(value) for key, value in numbers.items()}
    return Graded(reward=math.fsum(checks.values()) / len(checks), checks=checks)


def zero(check: str, note: str) -> Graded:
    """The agent's zero, with the check that names its reason."""
    return Graded(reward=0.0, checks={check: 0.0}, note=note)


def _text(key: str) -> str:
    """JSON may hold half a surrogate pair, and no message of ours can."""
    return key.encode("utf-8", "replace").decode()


def _last_object(output: str) -> dict[str, Any] | None:
    """The whole output as one JSON object, or its last line that is not empty."""
    for text in (output, (output.strip().splitlines() or [""])[-1]):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None
