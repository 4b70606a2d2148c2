"""The system calls that Python 3.11 does not offer: namespaces, and mounts that are made from descriptors.

A mount is cloned where a path means what the caller thinks (`clone_mount`), and attached in the forking
thread's own mount namespace (`attach`): the descriptor carries it from one to the other.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000

MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_OPEN_TREE = 428  # these three numbers are the same on x86_64 and aarch64
_MOVE_MOUNT = 429
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
_MOUNT_ATTR_NODEV = 4
_MOUNT_ATTR_IDMAP = 0x0010_0000
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Moves the calling thread into new namespaces. OSError."""
    _check(_libc().unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Moves the calling thread into the namespace behind `fd`. OSError."""
    _check(_libc().setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2). OSError."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc().mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def unmount(target: str) -> None:
    """Takes a mount away at once; the kernel frees it when nothing uses it any more. OSError."""
    _check(_libc().umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def clone_mount(path: str, *, userns: int | None = None, read_only: bool = False, recursive: bool = True) -> int:
    """A detached copy of what is mounted at `path`, without setuid and devices; the caller closes it. OSError.

    With `userns`, the files of host root show as those of the user that this user namespace maps root to;
    where the file system cannot do that (EINVAL), OSError too.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    fd = _check(_libc().syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")
    try:
        attributes = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
        if userns is not None:
            attributes |= _MOUNT_ATTR_IDMAP
        request = struct.pack("QQQQ", attributes, 0, 0, userns or 0)
        where = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
        result = _libc().syscall(_MOUNT_SETATTR, fd, b"", where, request, len(request))
        _check(result, f"mount_setattr {path}")
    except OSError:
        os.close(fd)
        raise
    return fd


def attach(fd: int, target: str) -> None:
    """Mounts a detached copy at `target` in the calling thread's mount namespace. OSError."""
    result = _libc().syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(result, f"move_mount {target}")


@contextmanager
def subreaper() -> Iterator[None]:
    """For the block, orphans among our descendants become children of this process, which must wait for them."""
    was = ctypes.c_int()
    _check(_libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0), "prctl")
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    try:
        yield
    finally:
        _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0), "prctl")


def syncfs(fd: int) -> None:
    """Writes the file system that holds `fd` to its disk. OSError."""
    _check(_libc().syncfs(fd), "syncfs")


def namespace(kind: str) -> int:
    """A descriptor of the calling thread's namespace `kind` ("net", "mnt", "user"); the caller closes it."""
    return os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def refused(error: OSError) -> bool:
    """Whether the kernel cannot or may not do this, as opposed to a fault in what was asked for."""
    return error.errno in (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP)
