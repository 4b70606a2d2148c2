"""The command line of bubblewrap: what a sandbox sees, and as whom it runs. Pure but for finding programs.

The options travel in a file descriptor, so pid 1's command line, which the sandbox can read, holds nothing but
the harness's own arguments; its environment, which the sandbox can read too, holds nothing but PATH.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawpipe.pipeline.errors import SandboxError

WORKSPACE = "/work"
HOME = "/home/agent"
UID = 1000  # inside
SHM_BYTES = 8 * 1024**2
MAX_OPEN_FILES = 4096
JOIN_FAILED = 97
MIN_VERSION = (0, 8)  # --disable-userns
HOST_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

_BASE_ENVIRONMENT = {
    "HOME": HOME,
    "USER": "agent",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
}
_OURS = frozenset({"dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "work", "lost+found"})
# localhost is IPv4 only: the listener is, and programs that try ::1 first would see a refused connection.
ETC_FILES = {
    "hosts": "127.0.0.1 localhost\n",
    "hostname": "sandbox\n",
    "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are that start a sandbox."""

    sh: str
    bwrap: str
    prlimit: str
    setpriv: str
    unshare: str
    nsenter: str


@dataclass(frozen=True, slots=True)
class View:
    """What a sandbox sees. Paths on the left are valid where bubblewrap is started."""

    rootfs: str
    etc: str
    workspace: str
    binds: Sequence[tuple[str, str]] = ()  # (source, path inside), read-only
    home_files: Mapping[str, bytes] = field(default_factory=dict)  # path relative to HOME -> content
    env: Mapping[str, str] = field(default_factory=dict)
    has_network: bool = False  # started inside a network namespace of its own; else bubblewrap makes an empty one
    scratch_bytes: int = 64 * 1024**2  # of /tmp, and of /home


def find_programs() -> Programs:
    """SandboxError names the package that is missing or too old."""
    packages = {"sh": "dash", "bwrap": "bubblewrap"}
    found = {}
    for name in Programs.__dataclass_fields__:
        path = shutil.which(name, path=HOST_ENVIRONMENT["PATH"])
        if path is None:
            package = packages.get(name, "util-linux")
            raise SandboxError(f"sandbox: the program {name} is missing; install the package {package}")
        found[name] = path
    programs = Programs(**found)
    _check_version(programs.bwrap)
    return programs


def _check_version(bwrap: str) -> None:
    done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, env=HOST_ENVIRONMENT)
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    if match is None or (int(match[1]), int(match[2])) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise SandboxError(f"sandbox: {bwrap} is {done.stdout.strip() or 'no bubblewrap'}; install {wanted} or newer")


def root_options(rootfs: Path) -> list[str]:
    """How the top of a rootfs is shown: folders read-only, links as links. Computed once per rootfs."""
    options = []
    for entry in sorted(rootfs.iterdir()):
        if entry.name in _OURS:
            continue
        if entry.is_symlink():
            options += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.is_dir():
            options += ["--ro-bind", "{rootfs}/" + entry.name, f"/{entry.name}"]
    return options


def options(view: View, root: Sequence[str], seccomp: bytes, blob: Callable[[bytes], int]) -> list[str]:
    """bubblewrap's options. `blob` puts bytes into a descriptor that the child inherits, and returns its number."""
    network = [] if view.has_network else ["--unshare-net"]
    return [
        *("--unshare-user", "--uid", str(UID), "--gid", str(UID), "--disable-userns"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", *network),
        *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv"),
        *(option.replace("{rootfs}", view.rootfs) for option in root),
        *("--ro-bind", view.etc, "/etc", "--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(view.scratch_bytes), "--tmpfs", "/tmp"),
        *("--size", str(view.scratch_bytes), "--tmpfs", "/home", "--dir", HOME),
        *_home_files(view.home_files, blob),
        *("--bind", view.workspace, WORKSPACE),
        *(option for source, inside in view.binds for option in ("--ro-bind", source, inside)),
        *("--remount-ro", "/", "--chdir", WORKSPACE),
        *_environment(view.env),
        *("--seccomp", str(blob(seccomp))),
    ]


def _home_files(files: Mapping[str, bytes], blob: Callable[[bytes], int]) -> list[str]:
    written = []
    for path, data in files.items():
        written += ["--perms", "0644", "--file", str(blob(data)), f"{HOME}/{path}"]
    return written


def _environment(env: Mapping[str, str]) -> list[str]:
    return [word for name, value in {**_BASE_ENVIRONMENT, **env}.items() for word in ("--setenv", name, value)]


def encode_options(words: Sequence[str]) -> bytes:
    """The format of `--args FD`. SandboxError for a word that cannot be in it."""
    for word in words:
        if "\0" in word:
            raise SandboxError(f"sandbox: an option or variable holds a NUL byte: {word[:80]!r}; remove it")
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def join_groups(programs: Programs, files: Sequence[Path]) -> list[str]:
    """A prefix that puts the process into control groups before anything else runs."""
    writes = [f"echo 0 >{shlex.quote(str(file))} || exit {JOIN_FAILED}" for file in files]
    return [programs.sh, "-c", "\n".join([*writes, 'exec "$@"']), "sh"] if files else []


def limit_resources(programs: Programs, file_bytes: int, data_bytes: int | None) -> list[str]:
    """A prefix that sets resource limits; `data_bytes` where no control group bounds memory."""
    data = [f"--data={data_bytes}"] if data_bytes is not None else []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    return [programs.prlimit, f"--fsize={file_bytes}", "--core=0", f"--nofile={files}", *data, "--"]


def become(programs: Programs, uid: int) -> list[str]:
    """A prefix that leaves root for good: bubblewrap's user namespace must not map anything to host root."""
    identity = ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    return [programs.setpriv, *identity, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
