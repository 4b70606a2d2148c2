"""The read-only root that sandboxes see: prepared once from this machine's own programs, and cached.

A folder with usr/ and etc/: Python, a shell, the usual small programs, git and node where they are installed,
with the libraries that they load. The cache's name is a digest of what it is made from; it appears whole or not
at all. It is needed because sandboxes run as users who may read neither /root nor the build's virtual environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clawpipe.actors.sandbox import kernel
from clawpipe.actors.sandbox.bubblewrap import HOST_ENVIRONMENT
from clawpipe.actors.sandbox.identity import is_dead, new_identity
from clawpipe.pipeline.errors import SandboxError
from clawpipe.pipeline.models import cache_dir

_RECIPE = 2  # part of the digest: changed with what this module does
REQUIRED = ("sh", "env", "cat", "ls", "cp", "mv", "rm", "mkdir", "grep", "sed", "find")
OPTIONAL = (
    *("bash", "git", "node", "awk", "mawk", "gawk", "xargs", "diff", "cmp", "tar", "gzip", "gunzip", "jq"),
    *("which", "less", "ps", "pgrep", "prlimit", "patch", "unzip", "zip", "xxd", "bc", "tree", "rg"),
    *("[", "arch", "base32", "base64", "basename", "chmod", "chown", "cksum", "comm", "csplit", "cut", "date"),
    *("dd", "df", "dirname", "du", "echo", "expand", "expr", "factor", "false", "fmt", "fold", "head", "hostname"),
    *("id", "install", "join", "kill", "link", "ln", "logname", "md5sum", "mkfifo", "mktemp", "nice", "nl"),
    *("nohup", "nproc", "numfmt", "od", "paste", "pathchk", "pr", "printenv", "printf", "pwd", "readlink"),
    *("realpath", "rmdir", "seq", "setsid", "sha1sum", "sha256sum", "sha512sum", "shred", "shuf", "sleep", "sort"),
    *("split", "stat", "stdbuf", "stty", "sum", "sync", "tac", "tail", "tee", "test", "timeout", "touch", "tr"),
    *("true", "truncate", "tsort", "tty", "uname", "unexpand", "uniq", "unlink", "users", "wc", "whoami", "yes"),
)
# What programs that are brought into a sandbox (`Launch.binds`) expect of any Linux, though none of ours loads it.
_LIBRARIES = (
    *("libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libresolv.so.2", "libutil.so.1"),
    *("libnss_files.so.2", "libnss_dns.so.2", "libgcc_s.so.1", "libstdc++.so.6"),
)
_DATA = ("share/zoneinfo", "share/git-core/templates", "lib/locale/C.utf8")
_LIBRARY = re.compile(r"(?:=>\s+)?(/\S+)\s+\(0x")
_SKIPPED_MODULES = shutil.ignore_patterns(
    "test", "tests", "config-*", "site-packages", "dist-packages", "idlelib", "turtledemo", "*.a"
)


@dataclass(frozen=True, slots=True)
class Python:
    """An installed Python: the interpreter, and its standard library."""

    program: Path
    library: Path


def find(configured: str) -> Path:
    """The configured folder, or the prepared one. SandboxError when it is none or something is missing."""
    if not configured:
        return prepare()
    root = Path(configured)
    if not (root / "usr").is_dir():
        raise SandboxError(f"[sandbox] rootfs = {configured}: has no folder usr; give a root file system's folder")
    return root


def prepare(cache: Path | None = None) -> Path:
    """The cached root, built in a few seconds if it is not there. Blocks. SandboxError names what is missing."""
    python = find_python()
    programs = find_programs()
    folder = cache or cache_dir() / "rootfs"
    target = folder / _digest(python, programs)
    for left in folder.glob("new-*"):
        if is_dead(left.name):
            shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"new-{new_identity()}")
    try:
        _build(temporary, python, programs)
        _make_durable(temporary)
        try:
            temporary.rename(target)
        except OSError:  # somebody else was quicker
            if not target.exists():
                raise
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"sandbox: the rootfs could not be built in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def find_programs() -> dict[str, Path]:
    """Name -> program on this machine. SandboxError when a required one is missing."""
    found = {}
    for name in (*REQUIRED, *OPTIONAL):
        path = shutil.which(name, path=HOST_ENVIRONMENT["PATH"])
        if path is not None:
            found[name] = Path(path)
        elif name in REQUIRED:
            raise SandboxError(f"sandbox: the program {name} is missing on this machine; install it")
    return found


def find_python() -> Python:
    """The system's python3 if it has a standard library beside it, else the one that runs us."""
    system = shutil.which("python3", path=HOST_ENVIRONMENT["PATH"])
    for program in [*([Path(system)] if system else []), Path(sys.base_prefix, "bin", "python3")]:
        real = program.resolve()
        library = real.parent.parent / "lib" / re.sub(r"[^0-9.a-z]", "", real.name)
        if (library / "os.py").exists() and (library / "encodings").is_dir():
            return Python(real, library)
    own = Path(sysconfig.get_path("stdlib"))
    return Python(Path(sys.base_prefix, "bin", own.name).resolve(), own)


def _digest(python: Python, programs: dict[str, Path]) -> str:
    """Of what the root is made from: a changed program or library (ld.so.cache) gives another root."""
    digest = hashlib.sha256(f"{_RECIPE} {sorted(programs)}".encode())
    sources = [python.program, python.library, python.library / "os.py", Path("/etc/ld.so.cache")]
    for path in [*sources, *programs.values(), *(Path("/usr") / data for data in _DATA)]:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_mode}\n".encode())
    return digest.hexdigest()[:32]


def _build(root: Path, python: Python, programs: dict[str, Path]) -> None:
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc"):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    _copy_programs(root, programs)
    _copy_python(root, python)
    for data in _DATA:
        if Path("/usr", data).is_dir():
            shutil.copytree(Path("/usr", data), root / "usr" / data, symlinks=True, dirs_exist_ok=True)
    extensions = sorted((python.library / "lib-dynload").glob("*.so"))
    loaded = list(_libraries([*programs.values(), python.program, *extensions]))
    beside = {library.parent for library in loaded}
    common = (folder / name for folder in sorted(beside) for name in _LIBRARIES)
    for library in [*loaded, *filter(Path.exists, common)]:
        _copy(library, root / _place_of(library))
    _cache_libraries(root)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)  # whatever our umask is


def _copy_programs(root: Path, programs: dict[str, Path]) -> None:
    """Programs that are one file under several names stay one file."""
    first: dict[Path, str] = {}
    for name, path in programs.items():
        real = path.resolve()
        if real in first:
            (root / "usr/bin" / name).symlink_to(first[real])
        else:
            first[real] = name
            _copy(real, root / "usr/bin" / name)


def _copy_python(root: Path, python: Python) -> None:
    """Under /usr, where an interpreter called /usr/bin/python3.N looks for /usr/lib/python3.N by itself."""
    version = python.library.name
    _copy(python.program, root / "usr/bin" / version)
    for name in ("python3", "python"):
        (root / "usr/bin" / name).symlink_to(version)
    library = root / "usr/lib" / version
    shutil.copytree(python.library, library, symlinks=False, ignore=_SKIPPED_MODULES)
    if not (library / "__pycache__").is_dir():  # in a read-only root, nothing else would ever write it
        compiling = [str(python.program), "-I", "-m", "compileall", "-q", "-j", "0", "-s", str(root), str(library)]
        subprocess.run(compiling, check=True, capture_output=True, env=HOST_ENVIRONMENT)


def _libraries(programs: Iterable[Path]) -> Iterator[Path]:
    """What the loader would load for them, the loader included; scripts and static programs load nothing."""
    done = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, env={**HOST_ENVIRONMENT, "LC_ALL": "C"}
    )
    seen = set()
    for line in done.stdout.splitlines():
        match = _LIBRARY.search(line)
        if match and match[1] not in seen:
            seen.add(match[1])
            yield Path(match[1])


def _place_of(library: Path) -> Path:
    """Where a library lies in the root: its own folder if that is below /usr, else /usr/lib."""
    folder = library.parent.resolve()
    if not folder.is_relative_to("/usr"):
        folder = Path("/usr/lib")
    return (folder / library.name).relative_to("/")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copyfile(source.resolve(), target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _cache_libraries(root: Path) -> None:
    """Lets the loader find libraries in folders that it does not search by itself."""
    folders = sorted({f"/{path.parent.relative_to(root)}" for path in (root / "usr").rglob("*.so*")})
    (root / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in folders))
    ldconfig = shutil.which("ldconfig", path=HOST_ENVIRONMENT["PATH"])
    if ldconfig:
        subprocess.run([ldconfig, "-r", str(root)], check=True, capture_output=True, env=HOST_ENVIRONMENT)


def _make_durable(folder: Path) -> None:
    """On the disk before the name says that it is whole."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        kernel.syncfs(fd)
    finally:
        os.close(fd)
