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

RUN_SUFFIX = ".run"  # the folder beside the file with logs and progress of its making

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
    target = _place(target)
    run_dir = target.with_suffix(RUN_SUFFIX)
    runtime = Runtime(run_id=f"demos-{uuid.uuid4().hex[:12]}", run_dir=str(run_dir), demos_path=str(target))
    for role in ("syllables", "demos") if recorded_harnesses(config) else ("demos",):
        role_of(role)(config, runtime)
    return target


def table(target: Path) -> Iterator[str]:
    """What was recorded, a line per harness. Harnesses that are not recorded have none."""
    summary = target.with_suffix(SUMMARY_SUFFIX)
    found: list[dict[str, Any]] = msgspec.json.decode(summary.read_bytes()) if summary.exists() else []
    if found:
        yield f"{'harness':16} {'rollouts':>8} {'again':>5} {'reward':>7} {'flawed':>7}  calls by role"
    for row in found:
        calls = ", ".join(f"{role} {count}" for role, count in row["calls"].items())
        rewards = f"{_number(row['mean_reward']):>7} {_number(row['mean_reward_flawed']):>7}"
        yield f"{row['harness']:16} {row['rollouts']:>8} {row['tried_again']:>5} {rewards}  {calls}"


def _place(target: Path) -> Path:
    """The file's absolute path; its folder is there, and nothing of an earlier recording is said of it."""
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(SUMMARY_SUFFIX).unlink(missing_ok=True)
    except OSError as err:
        raise ConfigError(f"{target}: cannot be written ({err.strerror}); name another file with --out") from err
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder; name a file with --out")
    return target


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
