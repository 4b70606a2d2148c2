"""The sandboxes of one host: builds them, runs programs in them, collects what they leave, takes all of it away.

One supervisor per process, under trio:

    async with Supervisor.open(config.sandbox, run_id, work_dir) as host:
        async with host.sandbox(task.files, name=rollout_id, port=8080, binds={"/opt/x": "/host/x"}) as box:
            box.listener                      # socket listening on 127.0.0.1:8080 inside; share it by SCM_RIGHTS
            exit = await box.run(argv, env, wall_clock_s=600.0)
            snapshot = await box.collect()    # WorkspaceRefused: the agent left too much

- `sandbox(contents, ...)`: contents is a mapping "a/b.txt" -> bytes (a task's files, cached as a layer) or a
  `Snapshot` (laid out as collected, for grading). Inside, the workspace is /work and the current folder, HOME
  is /home/agent (`home_files`: path relative to it -> bytes), the user is 1000, the root is read-only.
- `binds`: path inside -> host path, read-only, a folder or a file. For content that exists only in memory,
  `await host.folder(files)` gives the path of a cached folder: `binds={"/grader": await host.folder(files)}`.
- Without `port` the sandbox has a loopback device and nothing else, and `box.listener` is None.
- `run` returns an `Exit`: reason exited | wall_clock | output, the program's code, the end of its output. By
  then every process of the sandbox is dead, daemons included. `keep_errors_apart=True` gives standard error in
  `Exit.errors`, so that `Exit.output` is standard output alone. It may be called again: each call starts from
  the same workspace, with a new /tmp and HOME.
- `collect` only after `run` has returned. Leaving the block removes mounts, groups, namespaces; so does
  cancelling. Whatever kills this process kills its sandboxes; empty control groups stay behind, and the next
  supervisor on the host removes them.
- SandboxError is always infrastructure, never the agent's doing.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec
import trio
from clawpipe.pipeline.config import SandboxConfig
from clawpipe.pipeline.errors import SandboxError

from clawpipe.actors.sandbox import bubblewrap, collect, limits, rootfs, seccomp, workspace
from clawpipe.actors.sandbox.bubblewrap import Programs
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.ground import Built, Contents, Ground, Plan
from clawpipe.actors.sandbox.identity import is_alive, own_identity
from clawpipe.actors.sandbox.limits import Group, GroupRoot, Limits
from clawpipe.actors.sandbox.ordinary_ground import open_ordinary_ground, remove_tree
from clawpipe.actors.sandbox.process import Exit, Process
from clawpipe.actors.sandbox.root_ground import open_root_ground
from clawpipe.actors.sandbox.workspace import Layers, Quota

MAX_THREADS = 8
REMOVE_TIMEOUT_S = 20.0

T = TypeVar("T")


class Uids:
    """Host uids, one per living sandbox: what the kernel counts per user is then counted per sandbox."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._free: list[int] = []

    def take(self) -> int:
        """A uid that no living sandbox has."""
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def give_back(self, uid: int) -> None:
        """The sandbox is gone."""
        self._free.append(uid)


@dataclass(slots=True)
class _Shared:
    """What all sandboxes of a supervisor share."""

    config: SandboxConfig
    programs: Programs
    ground: Ground
    groups: GroupRoot
    root_options: list[str]
    seccomp: bytes
    limiter: trio.CapacityLimiter

    async def in_thread(self, work: partial[T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self.limiter)


class Supervisor:
    """Made by `Supervisor.open`. The module's docstring says how it is used."""

    def __init__(self, shared: _Shared, layers: Layers) -> None:
        self._shared, self._layers = shared, layers
        self._uids = Uids(shared.config.first_uid)
        self._numbers = count()

    @staticmethod
    @asynccontextmanager
    async def open(config: SandboxConfig, run_id: str, work_dir: Path) -> AsyncIterator[Supervisor]:
        """Sweeps what dead supervisors left, prepares the host and tries one sandbox. SandboxError.

        `work_dir` is this host's folder for layers; several supervisors may share it. As root, all that the
        facts of the host allow is used; as an ordinary user there are no quotas and no control groups.
        """
        limiter = trio.CapacityLimiter(MAX_THREADS)
        programs = await trio.to_thread.run_sync(bubblewrap.find_programs, limiter=limiter)
        folder = Path(config.rootfs) if config.rootfs else await trio.to_thread.run_sync(rootfs.prepare, limiter=limiter)
        async with AsyncExitStack() as stack:
            groups = stack.enter_context(_open_groups(run_id, work_dir))
            own = stack.enter_context(_own_folder(work_dir))
            layers = Layers(work_dir / "layers")
            ground: Ground
            if os.geteuid() == 0:
                context = open_root_ground(programs, folder, layers, limiter, config.first_uid)
            else:
                context = open_ordinary_ground(programs, own, folder, limiter)
            ground = await stack.enter_async_context(context)
            options = bubblewrap.root_options(folder)
            host = Supervisor(_Shared(config, programs, ground, groups, options, seccomp.build(), limiter), layers)
            await host._probe()
            yield host
