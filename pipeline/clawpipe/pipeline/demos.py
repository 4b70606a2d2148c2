"""`clawpipe demos`: makes the demonstrations of a configuration, without a run, and says what came of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from clawpipe.pipeline.checks import run_checks
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.models import SUMMARY_SUFFIX, model_folders, recorded_harnesses
from clawpipe.pipeline.runtime import Runtime

RoleOf = Callable[[str], Callable[[Config, Runtime], None]]


def make(config: Config, out: Path | None, role_of: RoleOf) -> Path:
    """Writes the file, by default where `clawpipe up` looks for it, and returns its path.

    `role_of` gives a role's main function. ConfigError when something is missing, or there is no place for the file.
    """
    target = out or model_folders(config).demos
    if target is None:
        raise ConfigError("the model of this configuration is not built from demonstrations; say --out FILE")
    problems = run_checks(config, offline=False).problems
    if problems:
        raise ConfigError("; ".join(problems))
    target = target.absolute()
    target.with_suffix(SUMMARY_SUFFIX).unlink(missing_ok=True)
    runtime = Runtime(run_id=f"demos-{uuid.uuid4().hex[:12]}", run_dir=str(target.parent), demos_path=str(target))
    for role in ("syllables", "demos") if recorded_harnesses(config) else ("demos",):
        role_of(role)(config, runtime)
    return target


def table(target: Path) -> Iterator[str]:
    """What was recorded, a line per harness. Harnesses that are not recorded have none."""
    summary = target.with_suffix(SUMMARY_SUFFIX)
    found: list[dict[str, Any]] = msgspec.json.decode(summary.read_bytes()) if summary.exists() else []
    if found:
        yield f"{'harness':16} {'rollouts':>8} {'reward':>7} {'flawed':>7}  calls by role"
    for row in found:
        calls = ", ".join(f"{role} {count}" for role, count in row["calls"].items())
        rewards = f"{_number(row['mean_reward']):>7} {_number(row['mean_reward_flawed']):>7}"
        yield f"{row['harness']:16} {row['rollouts']:>8} {rewards}  {calls}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
