"""Control groups: what a sandbox may use, how all of it is killed at once, and what dead runs left behind.

Three kinds of machine: controllers in cgroup v1 with or without an empty cgroup2 beside them (hybrid), plain
cgroup2, and no writable cgroups at all (ordinary users: resource limits only). A supervisor has one folder per
hierarchy, `clawpipe-<run id>-<identity>`, below its own group, so whatever limits bind the supervisor
bind its sandboxes; each sandbox has one folder in each.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clawpipe.actors.sandbox.identity import is_dead

CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
# Of pids.max, for bubblewrap's monitor and its pid 1: the rest is the program's.
_OWN_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory_bytes: int
    cpus: float
    max_processes: int


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this process is: its own folder per v1 controller, and in cgroup2 with the mount's top."""

    v1: dict[str, Path]
    v2: Path | None = None
    v2_top: Path | None = None


def find_hierarchies(mountinfo: str, own_groups: str) -> Hierarchies:
    """From the texts of /proc/self/mountinfo and /proc/self/cgroup. Pure."""
    own = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    v1: dict[str, Path] = {}
    v2 = v2_top = None
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = tail.split()[:3]
        if kind == "cgroup2" and "" in own:
            v2, v2_top = _own_folder(point, root, own[""]), Path(point)
        elif kind == "cgroup":
            for controller in set(options.split(",")) & set(CONTROLLERS) & set(own):
                v1[controller] = _own_folder(point, root, own[controller])
    return Hierarchies(v1, v2, v2_top)


def _own_folder(point: str, root: str, path: str) -> Path:
    """A mount may show only the part of the hierarchy below `root` (containers)."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return Path(point, path.strip("/"))


@dataclass(slots=True)
class Group:
    """One sandbox's folders. `kill_folder` is the one in cgroup2; without any folder it is of no effect."""

    v1: dict[str, Path]
    v2: Path | None

    @property
    def folders(self) -> list[Path]:
        """All of them, each once: v1 controllers may be mounted together."""
        return list(dict.fromkeys([*self.v1.values(), *([self.v2] if self.v2 else [])]))

    def kill(self) -> None:
        """SIGKILL to everything in it."""
        if self.v2 is not None and (self.v2 / "cgroup.kill").exists():
            with suppress(FileNotFoundError):
                (self.v2 / "cgroup.kill").write_text("1")
            return
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def populated(self) -> bool:
        """Whether a process is left in it."""
        if self.v2 is not None:
            return "populated 1" in (self.v2 / "cgroup.events").read_text()
        return bool(self._pids())

    def peak_bytes(self) -> int | None:
        """The most memory it ever used, None when nobody counts."""
        for folder, name in ((self.v1.get("memory"), "memory.max_usage_in_bytes"), (self.v2, "memory.peak")):
            if folder is not None and (folder / name).exists():
                return int((folder / name).read_text())
        return None

    def oom_kills(self) -> int:
        """How many of its processes the kernel ended for want of memory."""
        for folder, name in ((self.v1.get("memory"), "memory.oom_control"), (self.v2, "memory.events")):
            if folder is not None and (folder / name).exists():
                found = re.search(r"^oom_kill (\d+)", (folder / name).read_text(), re.MULTILINE)
                return int(found[1]) if found else 0
        return 0

    def remove(self) -> bool:
        """Takes the folders away; False while the kernel still holds one of them."""
        return sum(not _remove(folder) for folder in self.folders) == 0

    def _pids(self) -> list[int]:
        pids: set[int] = set()
        for folder in self.folders:
            with suppress(FileNotFoundError):  # removed already, and so empty
                pids.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        return sorted(pids)


class GroupRoot:
    """A supervisor's folder in each hierarchy that it may write to."""

    def __init__(self, v1: dict[str, Path], v2: Path | None, v2_controllers: Iterable[str]) -> None:
        self._v1, self._v2, self._v2_controllers = v1, v2, frozenset(v2_controllers)

    @property
    def controllers(self) -> set[str]:
        """The limits that can be set."""
        return set(self._v1) | self._v2_controllers

    @property
    def folders(self) -> list[Path]:
        """All of them, each once."""
        return list(dict.fromkeys([*self._v1.values(), *([self._v2] if self._v2 else [])]))

    def create(self, name: str, limits: Limits) -> Group:
        """A new group with these limits. OSError."""
        group = Group({c: folder / name for c, folder in self._v1.items()}, self._v2 / name if self._v2 else None)
        try:
            for folder in group.folders:
                folder.mkdir()
            for controller, folder in group.v1.items():
                _limit_v1(controller, folder, limits)
            if group.v2 is not None:
                _limit_v2(group.v2, limits, self._v2_controllers)
        except OSError:
            group.remove()
            raise
        return group

    def remove(self) -> None:
        """Takes the supervisor's folders away, with whatever is left in them."""
        for folder in self.folders:
            _clear(folder)


def open_root(hierarchies: Hierarchies, name: str) -> GroupRoot:
    """Makes the supervisor's folders; a hierarchy that refuses is left out."""
    v1 = {c: own / name for c, own in hierarchies.v1.items() if _try_mkdir(own / name)}
    wanted = {c for c in CONTROLLERS if c not in hierarchies.v1}
    for parent in sorted(_v2_parents(hierarchies), key=lambda folder: -len(_available(folder, wanted))):
        available = _available(parent, wanted)
        if _enable(parent, available) and _try_mkdir(parent / name):
            if _enable(parent / name, available):
                return GroupRoot(v1, parent / name, available)
            _remove(parent / name)
    if hierarchies.v2 is not None and _try_mkdir(hierarchies.v2 / name):
        return GroupRoot(v1, hierarchies.v2 / name, ())  # no limits there, but everything dies at once
    return GroupRoot(v1, None, ())


def _v2_parents(hierarchies: Hierarchies) -> list[Path]:
    """Our own group and those above it, nearest first: the nearest that can hand all controllers down is taken."""
    own, top = hierarchies.v2, hierarchies.v2_top
    if own is None or top is None:
        return []
    return [own, *(parent for parent in own.parents if parent == top or parent.is_relative_to(top))]


def _available(folder: Path, wanted: set[str]) -> set[str]:
    try:
        return wanted & set((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return set()


def _enable(folder: Path, controllers: set[str]) -> bool:
    """Hands controllers down to the folder's children, if it can.

    A group with processes cannot. Where that group is the top of all we see (a container), its processes are
    moved into a group below it, which changes nothing for them.
    """
    try:
        _hand_down(folder, controllers)
    except OSError as error:
        if error.errno != errno.EBUSY or (folder.parent / "cgroup.procs").exists():
            return False
        try:
            _vacate(folder)
            _hand_down(folder, controllers)
        except OSError:
            return False
    return True


def _hand_down(folder: Path, controllers: set[str]) -> None:
    control = folder / "cgroup.subtree_control"
    missing = controllers - set(control.read_text().split())
    if missing:
        control.write_text(" ".join(f"+{controller}" for controller in sorted(missing)))


def _vacate(folder: Path) -> None:
    (folder / "clawpipe-host").mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            (folder / "clawpipe-host" / "cgroup.procs").write_text(pid)


def _try_mkdir(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _limit_v1(controller: str, folder: Path, limits: Limits) -> None:
    if controller == "memory":
        (folder / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))
        if (folder / "memory.memsw.limit_in_bytes").exists():  # absent where swap is not accounted for
            (folder / "memory.memsw.limit_in_bytes").write_text(str(limits.memory_bytes))
    elif controller == "pids":
        (folder / "pids.max").write_text(str(limits.max_processes + _OWN_PROCESSES))
    else:
        (folder / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(round(limits.cpus * _CPU_PERIOD_US)))


def _limit_v2(folder: Path, limits: Limits, controllers: frozenset[str]) -> None:
    if "memory" in controllers:
        (folder / "memory.max").write_text(str(limits.memory_bytes))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
    if "pids" in controllers:
        (folder / "pids.max").write_text(str(limits.max_processes + _OWN_PROCESSES))
    if "cpu" in controllers:
        (folder / "cpu.max").write_text(f"{round(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}")


def sweep(hierarchies: Hierarchies, recorded: Iterable[Path] = ()) -> list[str]:
    """Kills and removes the groups of supervisors that are dead; returns the names of their folders.

    `recorded`: parents that earlier supervisors used; the group of a login or a job is not the same twice.
    """
    places: set[Path] = set(recorded)
    for own in (*hierarchies.v1.values(), *_v2_parents(hierarchies)):
        places.update((own, *own.parent.glob("*/")) if own.parent != own else (own,))
    swept = set()
    for folder in (found for place in places for found in place.glob("clawpipe-*")):
        if is_dead(folder.name):
            _clear(folder)
            swept.add(folder.name)
    return sorted(swept)


def _clear(folder: Path, timeout_s: float = 5.0) -> None:
    """Kills everything in the sandboxes' folders below `folder`, and removes them and it. Blocks."""
    deadline = time.monotonic() + timeout_s
    inner = [path for path in folder.glob("*/") if path.is_dir()]
    groups = [Group({}, path) if (path / "cgroup.kill").exists() else Group({"": path}, None) for path in inner]
    for group in groups:
        group.kill()
    while sum(not group.remove() for group in groups) and time.monotonic() < deadline:
        time.sleep(0.005)
        for group in groups:
            group.kill()
    while not _remove(folder) and time.monotonic() < deadline:
        time.sleep(0.005)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True
