"""Which process something belongs to: the leftovers of dead supervisors, and our own children.

A pid alone is reused; with the process's start time it is not. It means nothing in another pid namespace.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

IDENTITY = re.compile(r".*-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}")


def new_identity() -> str:
    """ "<pid>-<start time in clock ticks since boot>-<pid namespace>-<random>", for a supervisor of this process."""
    return f"{os.getpid()}-{_start_time(os.getpid())}-{_pid_namespace()}-{uuid.uuid4().hex[:8]}"


def is_dead(name: str) -> bool:
    """Whether `name` ends with the identity of a supervisor whose process is no more.

    Of those in other containers that share our file systems nothing can be said, so they pass as alive.
    """
    match = IDENTITY.fullmatch(name)
    if match is None or int(match[3]) != _pid_namespace():
        return False
    return not is_alive(int(match[1]), int(match[2]))


def is_alive(pid: int, start_time: int) -> bool:
    """Whether exactly that process still runs."""
    return _start_time(pid) == start_time


def parent_of(pid: int) -> int | None:
    """The pid of its parent, None when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children_of_uid(uid: int | None) -> list[int]:
    """This process's children that run, or ran, as user `uid`; none for None."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc") if uid is not None else [])):
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid and parent_of(pid) == os.getpid():
                found.append(pid)
        except OSError:
            continue
    return found


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """None when there is no such process, or only its zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on: state, parent, group, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
