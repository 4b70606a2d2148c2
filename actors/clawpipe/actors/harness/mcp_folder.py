"""The stock MCP server as a folder that a sandbox's Python runs: the program, the package `mcp` and what it requires.

A sandbox has no site packages and must not see this host's. So the distributions are copied side by side, once per
machine, into the cache, and bound read-only; the folder's name is a digest, and it appears whole or not at all.
"""

from __future__ import annotations

import compileall
import hashlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path, PurePosixPath
from py_compile import PycInvalidationMode

from packaging.requirements import Requirement

from clawpipe.actors.sandbox.identity import is_dead, new_identity
from clawpipe.pipeline.errors import SandboxError
from clawpipe.pipeline.models import cache_dir

PROGRAM = Path(__file__).with_name("documents_program.py")
INSIDE = "/opt/clawpipe-mcp"  # what Python is given as its program: a folder with a __main__.py
_PACKAGE = "mcp"
_RECIPE = 1  # part of the digest: changed with what this module does


def folder() -> Path:
    """Where the server is, or will be."""
    made_from = f"{_RECIPE} {sys.version} {version(_PACKAGE)}".encode() + PROGRAM.read_bytes()
    return cache_dir() / "mcp" / hashlib.sha256(made_from).hexdigest()[:32]


def prepare() -> Path:
    """The server's folder, built in a few seconds if it is not there. Blocks. SandboxError."""
    target = folder()
    for left in target.parent.glob("new-*"):
        if is_dead(left.name):
            shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        return target
    temporary = target.with_name(f"new-{new_identity()}")
    try:
        _build(temporary)
        try:
            temporary.rename(target)
        except OSError:  # somebody else was quicker
            if not target.exists():
                raise
    except (OSError, PackageNotFoundError) as error:
        raise SandboxError(f"mcp: the stock server could not be built in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _build(place: Path) -> None:
    for source, path in _files(_required(_PACKAGE)):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place / path)
    shutil.copyfile(PROGRAM, place / "__main__.py")
    compileall.compile_dir(  # nobody inside could write a .pyc, and nobody changes the sources
        place, quiet=2, stripdir=place, prependdir=INSIDE, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH
    )


def _required(name: str) -> Iterable[Distribution]:
    """The distribution and all that it requires on this machine, with the extras that are asked for."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        key = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        name, extra = key
        found[name] = distribution(name)
        for need in map(Requirement, found[name].requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                waiting += [(need.name, wanted) for wanted in ("", *need.extras)]
    return found.values()


def _files(distributions: Iterable[Distribution]) -> Iterator[tuple[Path, PurePosixPath]]:
    """(file, its place in the folder); neither scripts, which lie outside of site-packages, nor compiled code."""
    for found in distributions:
        for path in found.files or ():
            if ".." not in path.parts and path.suffix != ".pyc":
                yield Path(str(found.locate_file(path))), PurePosixPath(path)
