"""Which supervisor something belongs to, so that a later one can tell the leftovers of the dead from the living.

A pid alone is reused; with the process's start time it is not.
"""

from __future__ import annotations

import os
from pathlib import Path


def own_identity() -> str:
    """"<pid>-<start time in clock ticks since boot>" of this process."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def is_alive(pid: int, start_time: int) -> bool:
    """Whether exactly that process still runs."""
    return _start_time(pid) == start_time


def _start_time(pid: int) -> int | None:
    """None when there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
