"""The harness programs: pinned versions from npm, in clawpipe's cache. `clawpipe harness install | list`.

A program is a folder <kind>-<version> below `root()`, with what npm made of it in node_modules, and it appears by
rename: a half-finished one is never used. Install scripts are not run: what they do is to place a binary that the
adapters start where it lies, or to refuse this machine's node, which nothing here uses. The user's npm settings and
npm's own cache are the user's; everything else stays in the folder.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct, to_builtins
from rich.console import Console
from rich.table import Table

from clawpipe.actors.sandbox.identity import is_dead, new_identity
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.models import cache_dir

NODE_INSIDE = "/opt/node"
MIB = 1024**2
INSTALL_TIMEOUT_S = 1800.0
WORKS_TIMEOUT_S = 60.0
MAX_REASON_CHARS = 300
MAX_REASON_LINES = 4
_VERSION = re.compile(r"\d[0-9A-Za-z.+-]*")  # an exact one: never a range, a tag or a path
_NPM_ERROR = re.compile(r"^npm (?:error|ERR!) (\S.*)$", re.MULTILINE)
_NPM_OPTIONS = (
    *("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--logs-max=0"),
    # What a user's own npm settings may say otherwise:
    *("--global=false", "--engine-strict=false", "--include=optional", "--omit=dev"),
    *("--fetch-retry-mintimeout=2000", "--fetch-retry-factor=2"),
)


class Pin(Struct, frozen=True, kw_only=True):
    """A program of npm's registry, and the version that this clawpipe was tested with.

    `{arch}` in a name is npm's word for this machine's processor, `{machine}` the kernel's.
    """

    package: str
    version: str
    program: str  # below node_modules: a binary, or a script for node
    is_script: bool = False
    floor_bytes: int = 0  # of a sandbox's memory: with less it dies before its first call


NODE = Pin(package="node-linux-{arch}", version="24.21.0", program="node-linux-{arch}/bin/node")
PINS: Mapping[str, Pin] = {
    "openclaw": Pin(
        package="openclaw", version="2026.9.6", program="openclaw/openclaw.mjs", is_script=True, floor_bytes=512 * MIB
    ),
    "claude_code": Pin(
        package="@anthropic-ai/claude-code",
        version="2.1.328",
        program="@anthropic-ai/claude-code-linux-{arch}/claude",
        floor_bytes=256 * MIB,
    ),
    "codex": Pin(
        package="@openai/codex",
        version="0.169.0",
        program="@openai/codex-linux-{arch}/vendor/{machine}-unknown-linux-musl/bin/codex",
        floor_bytes=128 * MIB,
    ),
    # On x64 the binary for any processor: the other one needs AVX2.
    "opencode": Pin(
        package="opencode-ai",
        version="1.18.33",
        program="opencode-linux-{arch}{baseline}/bin/opencode",
        floor_bytes=768 * MIB,
    ),
    "qwen_code": Pin(
        package="@qwen-code/qwen-code",
        version="0.24.4",
        program="@qwen-code/qwen-code/cli-entry.js",
        is_script=True,
        floor_bytes=384 * MIB,
    ),
}


def root() -> Path:
    """Where the programs lie."""
    return cache_dir() / "harness"


def programs(kind: str, version: str = "") -> dict[str, str]:
    """The binds that a harness needs: node at /opt/node, the package at /opt/<kind>. Looks at no disk."""
    node = _folder("node", NODE.version) / "node_modules" / _here(NODE.package)
    return {NODE_INSIDE: str(node), f"/opt/{kind}": str(_folder(kind, version or PINS[kind].version))}


def command(kind: str) -> tuple[str, ...]:
    """How the program is called inside the sandbox, without arguments."""
    pin = PINS[kind]
    program = f"/opt/{kind}/node_modules/{_here(pin.program)}"
    return (f"{NODE_INSIDE}/bin/node", program) if pin.is_script else (program,)


def missing(kind: str, version: str = "") -> str | None:
    """What `clawpipe check` says of a program that is not in the cache; None when all is there."""
    wanted = f"{kind}@{version}" if version and version != PINS[kind].version else kind
    for name, folder in (("node", _folder("node", NODE.version)), (kind, _folder(kind, version or PINS[kind].version))):
        if not _is_whole(name, folder):
            state = "has lost its program" if folder.exists() else "is not installed"
            return f"{folder} {state}; run `clawpipe harness install {wanted}`"
    return None


def short_of_memory(kind: str, memory_bytes: int) -> str | None:
    """What `clawpipe check` says of a sandbox in which the program cannot live."""
    floor = PINS[kind].floor_bytes
    if memory_bytes >= floor:
        return None
    return f"[sandbox] memory_bytes = {memory_bytes} is too little for {kind}; set it to {floor} or more"


def _is_whole(kind: str, folder: Path) -> bool:
    """Whether the program lies in its folder, which a cleaner of caches may have emptied."""
    return (folder / "node_modules" / _here(_pin(kind).program)).is_file()


def _pin(kind: str) -> Pin:
    return NODE if kind == "node" else PINS[kind]


def _folder(kind: str, version: str) -> Path:
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{kind}: version {version!r} is no exact version; write it like {_pin(kind).version}")
    return root() / f"{kind}-{version}"


def _here(text: str) -> str:
    """A pin's name on this machine. ConfigError where the programs do not run."""
    machine = platform.machine()
    arch = {"x86_64": "x64", "aarch64": "arm64"}.get(machine)
    if platform.system() != "Linux" or arch is None:
        raise ConfigError(
            f"harness programs run on Linux with x86_64 or aarch64, this is {platform.system()} {machine}"
        )
    return text.format(arch=arch, machine=machine, baseline="-baseline" if arch == "x64" else "")


class Program(Struct, frozen=True, kw_only=True):
    """One installed or wanted program, as `clawpipe harness list` shows it."""

    kind: str
    version: str
    installed: bool
    works: bool | None = None  # None: not tried, since it is not there
    says: str = ""  # what it said of its version, or why it does not work
    size_bytes: int | None = None


def install(kind: str, version: str = "") -> bool:
    """Puts a program (or "node") into the cache; False when it was there. ConfigError says what npm could not do.

    A folder without its program is replaced.
    """
    pin = _pin(kind)
    target = _folder(kind, version or pin.version)
    if _is_whole(kind, target):
        return False
    _sweep(target.parent)
    staging = target.with_name(f"new-{kind}-{new_identity()}")
    try:
        staging.mkdir(parents=True)
        _run_npm(staging, f"{_here(pin.package)}@{version or pin.version}")
        if not _is_whole(kind, staging):
            raise ConfigError(f"{kind}: npm installed it without its program {_here(pin.program)}; try again")
        _start_once(kind, staging)
        _open_to_all(staging)
        _rename(kind, staging, target)
    except OSError as error:
        raise ConfigError(
            f"{kind}: cannot be written into {target.parent} ({error.strerror or error}); make it writable, with room "
            "for the programs, or set CLAWPIPE_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def _start_once(kind: str, staging: Path) -> None:
    """Some programs finish their set-up at their first start, which must not be in a sandbox: it is read-only there."""
    if _pin(kind).is_script:
        install("node")
    works, says = _try(kind, staging)
    if not works:
        raise ConfigError(f"{kind}: it is installed and does not start ({says}); try again, or another version")


def _sweep(folder: Path) -> None:
    """Takes away what installers left that were killed."""
    for left in folder.glob("new-*"):
        if is_dead(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _rename(kind: str, staging: Path, target: Path) -> None:
    """Puts the new folder where a broken one may lie, unless somebody else was quicker."""
    try:
        staging.rename(target)
    except OSError:
        if _is_whole(kind, target):
            return
        if not target.exists():
            raise
        broken = target.with_name(f"new-{kind}-{new_identity()}")
        target.rename(broken)
        staging.rename(target)
        shutil.rmtree(broken, ignore_errors=True)


def _run_npm(folder: Path, package: str) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"{package}: npm is not on PATH; install Node.js with npm, any version that is maintained")
    command = [npm, "install", "--prefix", str(folder), *_NPM_OPTIONS, package]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{package}: npm did not end within {INSTALL_TIMEOUT_S:.0f} s; check the network") from error
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace")
        raise ConfigError(f"{package}: npm could not install it ({_reason(errors)}); {_remedy(errors, folder)}")


def _remedy(errors: str, folder: Path) -> str:
    if "ENOSPC" not in errors:
        return "check the network, the version, and `npm config get registry`"
    return (
        f"the disk is full: make room in {folder.parent}, or set CLAWPIPE_CACHE to another folder; npm's own cache "
        "needs room too (`npm config get cache`)"
    )


def _reason(errors: str) -> str:
    """npm's own words: its error code, and what comes after it."""
    lines = [found[1] for found in _NPM_ERROR.finditer(errors)]
    return (
        ": ".join(lines[:MAX_REASON_LINES])[:MAX_REASON_CHARS].strip()
        or errors.strip()[-MAX_REASON_CHARS:]
        or "it said nothing"
    )


def _open_to_all(folder: Path) -> None:
    """Readable by the users of sandboxes, whatever the umask is."""
    for where, _, names in os.walk(folder):
        os.chmod(where, 0o755)
        for name in names:
            path = Path(where, name)
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o555 if os.access(path, os.X_OK) else 0o444))


def find() -> Iterator[Program]:
    """Every pinned program, and other versions that are in the cache."""
    found = {(kind, pin.version) for kind, pin in PINS.items()} | {("node", NODE.version)}
    for folder in root().glob("*-*"):
        kind, _, version = folder.name.partition("-")
        if kind in ("node", *PINS) and _VERSION.fullmatch(version):
            found.add((kind, version))
    order = ["node", *PINS]
    for kind, version in sorted(found, key=lambda one: (order.index(one[0]), one[1])):
        yield _look(kind, version)


def _look(kind: str, version: str) -> Program:
    folder = _folder(kind, version)
    if not folder.is_dir():
        return Program(kind=kind, version=version, installed=False)
    works, says = _try(kind, folder)
    return Program(kind=kind, version=version, installed=True, works=works, says=says, size_bytes=_size(folder))


def _try(kind: str, folder: Path) -> tuple[bool, str]:
    """Whether it tells its version, on this host, in an empty HOME."""
    pin = _pin(kind)
    node = _folder("node", NODE.version) / "node_modules" / _here(NODE.program)
    command = [str(folder / "node_modules" / _here(pin.program)), "--version"]
    with tempfile.TemporaryDirectory(prefix="clawpipe-") as home:
        env = {"HOME": home, "PATH": f"{node.parent}:/usr/bin:/bin", "TMPDIR": home}
        try:
            done = subprocess.run(
                [str(node), *command] if pin.is_script else command,
                cwd=home,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=WORKS_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, str(error)
    said = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).decode("utf-8", "replace").split("\n")
    return done.returncode == 0, said[0].strip()


def _size(folder: Path) -> int:
    """Bytes on the disk, a file with several names once."""
    blocks = {}
    for where, _, names in os.walk(folder):
        for name in names:
            info = os.lstat(os.path.join(where, name))
            blocks[info.st_ino] = info.st_blocks * 512
    return sum(blocks.values())


app = typer.Typer(no_args_is_help=True, help="Installs the harness programs, and shows what is there.")

Names = Annotated[
    list[str] | None, typer.Argument(help=f"Of {', '.join(PINS)}; NAME@VERSION for another version.", metavar="NAME")
]


@app.command("install")
def install_command(names: Names = None) -> None:
    """Puts pinned versions from npm, and node, into clawpipe's cache. Without names: all."""
    wanted = [_parse(name) for name in names or PINS]
    for kind, version in [("node", ""), *wanted]:
        shown = f"{kind} {version or _pin(kind).version}"
        typer.echo(f"{shown}: {'installed' if install(kind, version) else 'is there'}")


@app.command("list")
def list_command(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Shows what is there, and whether it starts."""
    if as_json:
        typer.echo(json.dumps([to_builtins(program) for program in find()], indent=2))
        return
    table = Table("kind", "version", "installed", "works", "size", "says", box=None)
    for program in find():
        works = {None: "", True: "yes", False: "NO"}[program.works]
        size = f"{program.size_bytes / 1024**2:.0f} MiB" if program.size_bytes is not None else ""
        table.add_row(program.kind, program.version, "yes" if program.installed else "no", works, size, program.says)
    Console().print(table)


def _parse(name: str) -> tuple[str, str]:
    """NAME or NAME@VERSION. ConfigError for an unknown name, and for a version that is none."""
    kind, at, version = name.partition("@")
    if kind not in PINS:
        raise ConfigError(f"there is no harness {kind!r} to install; choose of {', '.join(PINS)}")
    if at:
        _folder(kind, version)
    return kind, version
