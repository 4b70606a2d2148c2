"""The seam between a sandbox's life (`supervisor`) and what the host allows: root's ground or an ordinary user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from clawpipe.actors.sandbox.bubblewrap import View
from clawpipe.actors.sandbox.collect import Entry, File, Snapshot
from clawpipe.actors.sandbox.network import Network
from clawpipe.actors.sandbox.workspace import Quota, Workspace

T = TypeVar("T")
Contents = Mapping[str, bytes] | Snapshot


def entries_of(contents: Contents) -> Mapping[bytes, Entry]:
    """What a workspace holds at the start, by relative path."""
    if isinstance(contents, Snapshot):
        return contents.entries
    return {os.fsencode(path): File(data) for path, data in contents.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sandbox is built from."""

    name: str
    uid: int
    contents: Contents
    quota: Quota
    port: int | None
    binds: Mapping[str, str]  # path inside -> host path


@dataclass(frozen=True, slots=True)
class Built:
    """What stands ready on the ground before a program starts."""

    workspace: Workspace
    binds: Sequence[tuple[str, str]]  # (source where bubblewrap is started, path inside)
    network: Network | None


class Ground(Protocol):
    """Builds the surroundings of sandboxes and starts processes in them."""

    def view(self, built: Built) -> View:
        """What the sandbox sees, without files and variables of its own."""
        ...

    def built(self, plan: Plan) -> AbstractAsyncContextManager[Built]:
        """The surroundings, for as long as the block lasts. SandboxError."""
        ...

    def prefix(self, built: Built, uid: int) -> list[str]:
        """The command that leads to bubblewrap, after control groups and resource limits are set."""
        ...

    async def start(self, built: Built, fork: Callable[[], T]) -> T:
        """Runs `fork` where the process must be forked, and returns what it returns."""
        ...
