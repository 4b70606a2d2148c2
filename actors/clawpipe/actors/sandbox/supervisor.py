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
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import trio

from clawpipe.actors.sandbox import bubblewrap, kernel, limits, rootfs, seccomp
from clawpipe.actors.sandbox.box import Box, Host
from clawpipe.actors.sandbox.ground import Contents, Ground, Plan
from clawpipe.actors.sandbox.identity import is_dead, new_identity
from clawpipe.actors.sandbox.limits import Group, GroupRoot, Limits
from clawpipe.actors.sandbox.ordinary_ground import open_ordinary_ground, remove_tree
from clawpipe.actors.sandbox.root_ground import open_root_ground
from clawpipe.actors.sandbox.workspace import Layers, Quota
from clawpipe.pipeline.config import SandboxConfig
from clawpipe.pipeline.errors import SandboxError, one_line
from clawpipe.pipeline.observe import write_json

MAX_THREADS = 8
REMOVE_TIMEOUT_S = 20.0
PROBE_WALL_CLOCK_S = 60.0
_POLL_S = 0.005


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


class Supervisor:
    """Made by `Supervisor.open`. The module's docstring says how it is used."""

    def __init__(self, host: Host, layers: Layers) -> None:
        self._host, self._layers = host, layers
        self._uids = Uids(host.config.first_uid)
        self._numbers = count()

    @staticmethod
    @asynccontextmanager
    async def open(config: SandboxConfig, run_id: str, work_dir: Path) -> AsyncIterator[Supervisor]:
        """Sweeps what dead supervisors left, prepares the host and tries one sandbox. SandboxError.

        `work_dir` is a folder for this host's supervisors. As root all limits hold; an ordinary user has no
        quotas and no control groups, and `missing_limits` says so.
        """
        limiter = trio.CapacityLimiter(MAX_THREADS)
        programs = await trio.to_thread.run_sync(bubblewrap.find_programs, limiter=limiter)
        root = await trio.to_thread.run_sync(rootfs.find, config.rootfs, limiter=limiter)
        async with AsyncExitStack() as stack:
            # bubblewrap may end before the pid 1 that it started, and many containers have nobody to reap it.
            stack.enter_context(kernel.subreaper())
            identity = new_identity()
            own = stack.enter_context(_own_folder(work_dir, identity))
            groups = stack.enter_context(_own_groups(run_id, work_dir, identity))
            layers = Layers(own / "layers")
            ground: Ground
            if os.geteuid() == 0:
                ground = await stack.enter_async_context(
                    open_root_ground(programs, root, layers, limiter, config.first_uid)
                )
            else:
                ground = await stack.enter_async_context(open_ordinary_ground(programs, own, root, limiter))
            options = bubblewrap.root_options(root)
            host = Supervisor(Host(config, programs, ground, groups, options, seccomp.build(), limiter), layers)
            await host._probe()
            yield host

    @property
    def missing_limits(self) -> list[str]:
        """What cannot be bounded per sandbox on this host: some of "memory", "pids", "cpu", "workspace"."""
        missing = [name for name in limits.CONTROLLERS if name not in self._host.groups.controllers]
        return [*missing, *([] if os.geteuid() == 0 else ["workspace"])]

    @asynccontextmanager
    async def sandbox(
        self,
        contents: Contents,
        *,
        name: str,
        port: int | None = None,
        binds: Mapping[str, str] | None = None,
        home_files: Mapping[str, bytes] | None = None,
        memory_bytes: int | None = None,
        cpus: float | None = None,
        max_processes: int | None = None,
    ) -> AsyncIterator[Box]:
        """A sandbox for as long as the block lasts; limits not given are the configuration's. SandboxError."""
        config = self._host.config
        bounds = Limits(memory_bytes or config.memory_bytes, cpus or config.cpus, max_processes or config.max_processes)
        uid = self._uids.take()
        label = f"{next(self._numbers)}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}"
        quota = Quota(config.workspace_bytes, config.workspace_files)
        plan = Plan(label, uid, contents, quota, port, binds or {})
        try:
            async with AsyncExitStack() as stack:
                try:
                    built = await stack.enter_async_context(self._host.ground.built(plan))
                    group = await stack.enter_async_context(self._group(label, bounds))
                except (OSError, ValueError, OverflowError) as error:
                    raise SandboxError(f"sandbox {name}: could not be built: {one_line(error)}") from error
                yield Box(self._host, plan, built, group, bounds, home_files or {})
        finally:
            self._uids.give_back(uid)

    async def folder(self, files: Mapping[str, bytes]) -> str:
        """The path of a folder that holds exactly `files`, cached by content; for `binds`. Nobody may change it."""
        return str(await self._host.in_thread(partial(self._layers.get, files)))

    @asynccontextmanager
    async def _group(self, label: str, bounds: Limits) -> AsyncIterator[Group]:
        group = await self._host.in_thread(partial(self._host.groups.create, label, bounds))
        try:
            yield group
        finally:
            with trio.CancelScope(shield=True):
                await _remove_group(group)

    async def _probe(self) -> None:
        try:
            async with self.sandbox({}, name="probe", port=1) as box:
                exit = await box.run(["true"], wall_clock_s=PROBE_WALL_CLOCK_S)
        except SandboxError as error:
            raise SandboxError(
                f"{one_line(error)}; sandboxes do not work on this host. Check that user namespaces are allowed "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
            ) from error
        if exit.code != 0:
            raise SandboxError(f"sandbox: `true` ended with {exit.code} in a sandbox: {exit.output.decode()}")


async def _remove_group(group: Group) -> None:
    with trio.move_on_after(REMOVE_TIMEOUT_S):
        while not group.remove():
            group.kill()
            await trio.sleep(_POLL_S)
        return
    raise SandboxError(
        f"sandbox: the control group {group.folders[0]} stays busy; look for processes in state D on this host"
    )


@contextmanager
def _own_folder(work_dir: Path, identity: str) -> Iterator[Path]:
    """A folder of this supervisor's own; those of dead ones are removed."""
    work_dir.mkdir(parents=True, exist_ok=True)
    for path in work_dir.glob("host-*"):
        if is_dead(path.name):
            remove_tree(path)
    own = work_dir / f"host-{identity}"
    own.mkdir()
    try:
        yield own
    finally:
        remove_tree(own)


@contextmanager
def _own_groups(run_id: str, work_dir: Path, identity: str) -> Iterator[GroupRoot]:
    """This supervisor's control groups; those of dead ones are emptied and removed.

    The parents in use are recorded in `work_dir`: the group of a login or a job is another one next time.
    """
    record = work_dir / "groups.json"
    here = limits.find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    recorded = msgspec.json.decode(record.read_bytes(), type=list[str]) if record.exists() else []
    limits.sweep(here, map(Path, recorded))
    groups = limits.open_root(here, f"clawpipe-{re.sub(r'[^A-Za-z0-9_.-]', '_', run_id)}-{identity}")
    parents = {str(folder.parent) for folder in groups.folders} | {path for path in recorded if Path(path).exists()}
    write_json(record, sorted(parents))
    try:
        yield groups
    finally:
        groups.remove()
