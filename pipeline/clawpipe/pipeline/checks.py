"""What can be known before anything starts: `clawpipe check`, and the first step of `clawpipe up`.

This room checks the machine and the ports; actors and learner add theirs through the entry points
`clawpipe.checks`, since pipeline imports neither. A problem is one line: what, where, what to do.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec import Struct

from clawpipe.pipeline.config import Config
from clawpipe.pipeline.processes import port_is_free

MIN_FREE_DISK_BYTES = 2 * 1024**3
MIN_FREE_SHM_BYTES = 64 * 1024**2
MIN_MEMORY_BYTES = 6 * 1024**3


class Report(Struct, frozen=True, kw_only=True):
    """What a check found."""

    problems: tuple[str, ...] = ()
    task_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # lines for whoever asked: what was found, whether or not it is a problem


Check = Callable[..., Report]


def run_checks(config: Config, *, offline: bool) -> Report:
    """All checks. `offline` looks at the configuration alone: no path, port, program or machine."""
    reports = [] if offline else [Report(problems=tuple(machine_problems(config)))]
    for entry in importlib.metadata.entry_points(group="clawpipe.checks"):
        check: Check = entry.load()
        reports.append(check(config, offline=offline))
    return Report(
        problems=tuple(problem for report in reports for problem in report.problems),
        task_ids=tuple(task_id for report in reports for task_id in report.task_ids),
        notes=tuple(note for report in reports for note in report.notes),
    )


def machine_problems(config: Config) -> list[str]:
    """Disk, memory and ports that do not suffice for the embedded parts."""
    problems = []
    disk = _free_bytes(Path(config.run.dir))
    if disk < MIN_FREE_DISK_BYTES:
        problems.append(
            f"[run] dir: {disk / 1024**3:.1f} GiB are free on the disk of {config.run.dir}, "
            f"{MIN_FREE_DISK_BYTES / 1024**3:.0f} GiB are needed; free some, or choose another folder"
        )
    staging = _free_bytes(Path(config.push.dir))
    if staging < MIN_FREE_SHM_BYTES:
        problems.append(
            f"[push] dir: {staging / 1024**2:.0f} MiB are free on {config.push.dir}; "
            "free some (in a container: start it with a larger --shm-size), or choose another folder"
        )
    memory = psutil.virtual_memory().available
    if not config.engines.urls and memory < MIN_MEMORY_BYTES:
        problems.append(
            f"{memory / 1024**3:.1f} GiB of memory are available, {MIN_MEMORY_BYTES / 1024**3:.0f} GiB are needed "
            "for the embedded engine and the learner; end other programs, or set [engines] urls"
        )
    return problems + port_problems(config)


def port_problems(config: Config) -> list[str]:
    """Ports of embedded servers that somebody else listens on."""
    wanted = []
    if not config.nats.url and config.nats.port:
        wanted.append(("[nats] port", config.nats.port))
    if not config.engines.urls and config.engines.port:
        wanted += [("[engines] port", config.engines.port + index) for index in range(config.engines.count)]
    return [
        f"{key}: port {port} is in use; choose another port, or 0 for a free one"
        for key, port in wanted
        if not port_is_free(port)
    ]


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
