"""The folder that an agent works in: laid out before it starts, bounded while it works, gone afterwards.

W0, the task's files, is written once per task into a content-addressed layer (`Layers`) and becomes the lower
layer of an overlay whose upper layer is a tmpfs; the tmpfs's size and number of inodes are the quota. Where
overlays are not allowed, and for snapshots, which are never the same twice, the files are copied into the
tmpfs instead. An ordinary user gets a plain folder, without a quota.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawpipe.actors.sandbox import kernel
from clawpipe.actors.sandbox.collect import Entry, File, Folder, Link

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Renaming a folder of W0 must work as on any disk (redirect_dir); the other three would only tie the layers
# to inode numbers, which cached layers and a tmpfs do not keep.
_OVERLAY_OPTIONS = "redirect_dir=on,index=off,metacopy=off,xino=off"
_SPARE_INODES = 16  # of the tmpfs, for the overlay's own folders


@dataclass(frozen=True, slots=True)
class Quota:
    """What an agent may add to its workspace."""

    max_bytes: int
    max_files: int


@dataclass(slots=True)
class Workspace:
    """A laid-out workspace. `path` is where bubblewrap finds it; `root_fd` leads there from anywhere."""

    path: str
    root_fd: int

    def close(self) -> None:
        """Lets go of the folder, so that it can be taken away."""
        os.close(self.root_fd)


class Layers:
    """Folders with given content, each written once: `<folder>/<digest>`, put in place atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, files: Mapping[str, bytes]) -> Path:
        """The folder that holds exactly `files`; blocks while it is written. Not to be changed by anybody."""
        target = self._folder / _digest(files)
        if target.exists():
            return target
        temporary = self._folder / f".{uuid.uuid4().hex}"
        temporary.mkdir(mode=0o755)
        with _opened(temporary) as root_fd:
            write_entries(root_fd, {os.fsencode(path): File(data) for path, data in files.items()})
        try:
            temporary.rename(target)
        except OSError:  # somebody else wrote the same
            shutil.rmtree(temporary)
            if not target.exists():
                raise
        return target


def mount_overlay(box: str, layer_fd: int, uid: int, quota: Quota) -> Workspace:
    """In the forking thread: an overlay over the detached mount `layer_fd`. OSError."""
    for name in ("lower", "tmpfs", "merged"):
        os.mkdir(f"{box}/{name}")
    kernel.attach(layer_fd, f"{box}/lower")
    _mount_tmpfs(f"{box}/tmpfs", quota)
    os.mkdir(f"{box}/tmpfs/upper")
    os.mkdir(f"{box}/tmpfs/work")
    os.chown(f"{box}/tmpfs/upper", uid, uid)
    layers = f"lowerdir={box}/lower,upperdir={box}/tmpfs/upper,workdir={box}/tmpfs/work"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("overlay", f"{box}/merged", "overlay", flags, f"{layers},{_OVERLAY_OPTIONS}")
    return Workspace(f"{box}/merged", os.open(f"{box}/merged", _OPEN_FOLDER))


def mount_copy(box: str, uid: int, quota: Quota) -> Workspace:
    """In the forking thread: an empty tmpfs, to be filled by `write_entries`. OSError."""
    os.mkdir(f"{box}/tmpfs")
    _mount_tmpfs(f"{box}/tmpfs", quota)
    os.mkdir(f"{box}/tmpfs/work")
    os.chown(f"{box}/tmpfs/work", uid, uid)
    return Workspace(f"{box}/tmpfs/work", os.open(f"{box}/tmpfs/work", _OPEN_FOLDER))


def plain_folder(box: str) -> Workspace:
    """For an ordinary user: an empty folder, to be filled by `write_entries`. OSError."""
    os.mkdir(f"{box}/work")
    return Workspace(f"{box}/work", os.open(f"{box}/work", _OPEN_FOLDER))


def size_of(entries: Mapping[bytes, Entry]) -> tuple[int, int]:
    """(bytes, entries) that a copy takes, folders that are only implied by a path included."""
    paths = set(entries)
    for path in entries:
        while b"/" in path:
            path = path.rpartition(b"/")[0]
            paths.add(path)
    return sum(len(e.data) for e in entries.values() if isinstance(e, File)), len(paths)


def write_entries(root_fd: int, entries: Mapping[bytes, Entry], owner: int | None = None) -> None:
    """Lays entries out below a folder that nobody else writes to, following no link. ValueError, OSError.

    Missing parents are made. With `owner`, everything belongs to that user and group.
    """
    for path, entry in sorted(entries.items()):  # a folder sorts before what it holds
        with _parent(root_fd, path, owner) as (fd, name):
            _write_entry(fd, name, entry, owner)
    for path, entry in sorted(entries.items(), reverse=True):  # a folder that forbids writing is closed last
        if isinstance(entry, Folder):
            with _parent(root_fd, path, owner) as (fd, name):
                os.chmod(name, entry.mode & 0o777, dir_fd=fd)


def _write_entry(fd: int, name: bytes, entry: Entry, owner: int | None) -> None:
    if isinstance(entry, Folder):
        _make_folder(fd, name, owner)
    elif isinstance(entry, Link):
        os.symlink(entry.target, name, dir_fd=fd)
        _give(fd, name, owner)
    else:
        _write_file(fd, name, entry, owner)


def _write_file(fd: int, name: bytes, entry: File, owner: int | None) -> None:
    file = os.open(name, _CREATE_FILE, 0o600, dir_fd=fd)
    try:
        view = memoryview(entry.data)
        while view:
            view = view[os.write(file, view) :]
        os.fchmod(file, entry.mode & 0o777)
        if owner is not None:
            os.fchown(file, owner, owner)
        if entry.mtime_ns is not None:
            os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(file)


@contextmanager
def _parent(root_fd: int, path: bytes, owner: int | None) -> Iterator[tuple[int, bytes]]:
    *folders, name = path.split(b"/")
    if any(part in (b"", b".", b"..") or b"\0" in part for part in (*folders, name)):
        raise ValueError(f"workspace: the path {path!r} is not a relative path inside the workspace")
    fd = os.dup(root_fd)
    try:
        for part in folders:
            inner = _enter(fd, part, owner)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


def _enter(fd: int, name: bytes, owner: int | None) -> int:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=fd)
    except FileNotFoundError:
        _make_folder(fd, name, owner)
        return os.open(name, _OPEN_FOLDER, dir_fd=fd)


def _make_folder(fd: int, name: bytes, owner: int | None) -> None:
    os.mkdir(name, 0o755, dir_fd=fd)
    _give(fd, name, owner)


def _give(fd: int, name: bytes, owner: int | None) -> None:
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=fd, follow_symlinks=False)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, _OPEN_FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _mount_tmpfs(target: str, quota: Quota) -> None:
    options = f"size={quota.max_bytes},nr_inodes={quota.max_files + _SPARE_INODES},mode=0755"
    kernel.mount("tmpfs", target, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        name = os.fsencode(path)
        digest.update(len(name).to_bytes(8, "little") + name + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
