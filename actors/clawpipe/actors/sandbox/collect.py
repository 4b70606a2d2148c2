"""A workspace that an agent left behind -> a `Snapshot`, read on the host without trusting a byte of it.

Runs after every process of the sandbox is dead. Never follows a link, never blocks on a pipe, never leaves the
folder: everything is relative to folder descriptors, opened without following and checked again once open.
Names are bytes, modes lose setuid, setgid and sticky, and whoever exceeds a limit gets a named refusal.
The walk is of the merged overlay, not of its upper layer, so it does not depend on how the kernel encodes
renames and deletions.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

MAX_DEPTH = 64
_READ_BYTES = 1 << 20
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class WorkspaceRefused(Exception):
    """The agent left more than the collector takes, or something that changed while it was read.

    `limit` is one of "files", "bytes", "depth", "changed". This is the agent's doing, not infrastructure.
    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class File(Struct, frozen=True, tag="file"):
    """A regular file. `mode` has permission bits only."""

    data: bytes
    mode: int = 0o644
    mtime_ns: int | None = None


class Folder(Struct, frozen=True, tag="folder"):
    """A folder."""

    mode: int = 0o755


class Link(Struct, frozen=True, tag="link"):
    """A symbolic link, as data: nobody has followed it."""

    target: bytes


Entry = File | Folder | Link


class Skipped(Struct, frozen=True):
    """Something that is no part of a snapshot: "special" (pipe, socket, device) or "unreadable"."""

    path: bytes
    reason: str


class Snapshot(Struct, frozen=True):
    """A whole workspace by relative path ("a/b"), folders before what they hold."""

    entries: dict[bytes, Entry]
    skipped: tuple[Skipped, ...] = ()

    def read(self, path: str) -> bytes | None:
        """The content of the regular file at `path`, None when there is none."""
        entry = self.entries.get(os.fsencode(path))
        return entry.data if isinstance(entry, File) else None


def dump_snapshot(snapshot: Snapshot) -> bytes:
    """As it is stored in the run folder."""
    return msgspec.msgpack.encode(snapshot)


def restore_snapshot(data: bytes) -> Snapshot:
    """What `dump_snapshot` wrote. msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=Snapshot)


def collect(root_fd: int, *, max_files: int, max_bytes: int, max_depth: int = MAX_DEPTH) -> Snapshot:
    """Everything below the folder `root_fd`, which stays open. WorkspaceRefused; OSError when we are at fault."""
    walk = _Walk(max_files, max_bytes, max_depth)
    walk.folder(os.open(b".", _OPEN_FOLDER, dir_fd=root_fd), b"", 0)
    return Snapshot(walk.entries, tuple(walk.skipped))


@dataclass(slots=True)
class _Walk:
    max_files: int
    max_bytes: int
    max_depth: int
    entries: dict[bytes, Entry] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    num_seen: int = 0
    num_bytes: int = 0

    def folder(self, fd: int, prefix: bytes, depth: int) -> None:
        """Depth first, so that no more descriptors than `max_depth` are open; closes `fd`."""
        try:
            for name in self._names(fd):
                self._entry(fd, name, prefix + name, depth)
        finally:
            os.close(fd)

    def _names(self, fd: int) -> list[bytes]:
        names = []
        with os.scandir(fd) as found:
            for item in found:
                names.append(os.fsencode(item.name))
                self.num_seen += 1
                if self.num_seen > self.max_files:
                    raise WorkspaceRefused("files", f"the workspace holds more than {self.max_files} entries")
        return sorted(names)

    def _entry(self, fd: int, name: bytes, path: bytes, depth: int) -> None:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        try:
            if stat.S_ISDIR(status.st_mode):
                self._subfolder(fd, name, path, depth, status)
            elif stat.S_ISREG(status.st_mode):
                self.entries[path] = self._file(fd, name, path, status)
            elif stat.S_ISLNK(status.st_mode):
                self.entries[path] = Link(os.readlink(name, dir_fd=fd))
            else:
                self.skipped.append(Skipped(path, "special"))
        except PermissionError:  # only as an ordinary user: root reads everything
            self.skipped.append(Skipped(path, "unreadable"))

    def _subfolder(self, fd: int, name: bytes, path: bytes, depth: int, status: os.stat_result) -> None:
        if depth >= self.max_depth:
            raise WorkspaceRefused("depth", f"the workspace's folders are nested deeper than {self.max_depth}")
        inner = os.open(name, _OPEN_FOLDER, dir_fd=fd)
        self.entries[path] = Folder(status.st_mode & 0o777)
        self.folder(inner, path + b"/", depth + 1)

    def _file(self, fd: int, name: bytes, path: bytes, expected: os.stat_result) -> File:
        self._take(expected.st_size)
        file = os.open(name, _OPEN_FILE, dir_fd=fd)
        try:
            status = os.fstat(file)
            if not os.path.samestat(status, expected) or not stat.S_ISREG(status.st_mode):
                raise WorkspaceRefused("changed", f"{path!r} changed while the workspace was read")
            data = _read(file, expected.st_size)
        finally:
            os.close(file)
        if len(data) != expected.st_size:
            raise WorkspaceRefused("changed", f"{path!r} changed while the workspace was read")
        return File(data, status.st_mode & 0o777, status.st_mtime_ns)

    def _take(self, size: int) -> None:
        self.num_bytes += size
        if self.num_bytes > self.max_bytes:
            raise WorkspaceRefused("bytes", f"the workspace holds more than {self.max_bytes} bytes")


def _read(fd: int, size: int) -> bytes:
    """At most one byte more than `size`, so that a file that grew is seen."""
    parts = []
    left = size + 1
    while left > 0 and (part := os.read(fd, min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
