"""The ground of root: a private mount namespace, quotas, overlays, a host uid and a network namespace per sandbox.

Everything is mounted below one folder of the forking thread's own mount namespace, laid over an existing one
(/mnt), because the sandboxes' users must be able to reach it whatever the modes of the folders above the cache
and the run folder. Host paths are cloned where they mean what the caller meant, and carried over as descriptors.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from clawpipe.actors.sandbox import kernel, network, workspace
from clawpipe.actors.sandbox.bubblewrap import ETC_FILES, HOST_ENVIRONMENT, Programs, View, become
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.forking import ForkingThread, open_thread
from clawpipe.actors.sandbox.ground import Built, Plan, entries_of
from clawpipe.actors.sandbox.workspace import Layers, Quota, Workspace
from clawpipe.pipeline.errors import SandboxError

_COVERED = ("/mnt", "/media", "/srv")  # the first that exists is laid over, in our namespace only
_PAGE_BYTES = 4096

T = TypeVar("T")


class RootGround:
    """Made by `open_root_ground`."""

    def __init__(
        self, forking: ForkingThread, programs: Programs, base: str, layers: Layers, limiter: trio.CapacityLimiter
    ) -> None:
        self._forking, self._programs, self._base = forking, programs, base
        self._layers, self._limiter = layers, limiter
        self._home_net = -1
        self._users: dict[int, int] = {}  # uid -> user namespace that maps host root's files to it
        self.has_overlay = True

    async def prepare(self, rootfs: Path) -> None:
        """Enters the namespaces. SandboxError when root may not do that here."""
        try:
            with ExitStack() as clones:
                rootfs_fd = kernel.clone_mount(str(rootfs), read_only=True)
                clones.callback(os.close, rootfs_fd)
                await self._forking.run(partial(_enter, self._base, rootfs_fd, rootfs))
        except OSError as error:
            raise SandboxError(
                f"sandbox: root may not make its own mounts here ({error.strerror or error}); give the process "
                "CAP_SYS_ADMIN on a kernel from 5.12 on, or run it as an ordinary user"
            ) from error
        self._home_net = await self._forking.run(partial(kernel.namespace, "net"))

    async def probe_overlay(self, uid: int) -> None:
        """Finds out once whether overlays over id-mapped layers work; without them, files are copied."""
        plan = Plan("probe", uid, {"probe": b""}, Quota(1 << 20, 16), None, {})
        try:
            async with self.built(plan):
                self.has_overlay = True
        except OSError as error:
            if not kernel.refused(error):
                raise
            self.has_overlay = False

    def close(self) -> None:
        """Lets go of the namespaces."""
        for fd in (self._home_net, *self._users.values()):
            if fd >= 0:
                os.close(fd)

    def view(self, built: Built) -> View:
        return View(
            rootfs=f"{self._base}/rootfs",
            etc=f"{self._base}/etc",
            workspace=built.workspace.path,
            binds=built.binds,
            has_network=built.network is not None,
        )

    def prefix(self, built: Built, uid: int) -> list[str]:
        return become(self._programs, uid)

    async def start(self, built: Built, fork: Callable[[], T]) -> T:
        net_fd = built.network.net_fd if built.network is not None else None

        def inside() -> T:
            with network.entered(net_fd, self._home_net):
                return fork()

        return await self._forking.run(inside)

    @asynccontextmanager
    async def built(self, plan: Plan) -> AsyncIterator[Built]:
        box = f"{self._base}/{plan.name}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._forking.run, partial(_clear, box))
            overlay = self.has_overlay and not isinstance(plan.contents, Snapshot)
            with ExitStack() as clones:
                layer_fd, binds = await self._in_thread(partial(self._clone, plan, overlay, clones))
                place = partial(_place, box, plan, layer_fd, binds, self._home_net)
                space, net = await self._forking.run(place)
            stack.callback(space.close)
            if net is not None:
                stack.callback(net.close)
            if layer_fd is None:
                fill = partial(workspace.write_entries, space.root_fd, entries_of(plan.contents), plan.uid)
                await self._in_thread(fill)
            sources = [(f"{box}/bind{index}", inside) for index, inside in enumerate(plan.binds)]
            yield Built(space, sources, net)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._limiter)

    def _clone(self, plan: Plan, overlay: bool, clones: ExitStack) -> tuple[int | None, list[int]]:
        """Detached mounts of the layer and of the read-only folders; `clones` closes them."""
        userns = self._users.get(plan.uid)
        if userns is None:
            userns = self._users[plan.uid] = _user_namespace(self._programs, plan.uid)
        layer_fd = None
        if overlay and not isinstance(plan.contents, Snapshot):
            layer = self._layers.get(plan.contents)
            layer_fd = kernel.clone_mount(str(layer), userns=userns, read_only=True, recursive=False)
            clones.callback(os.close, layer_fd)
        binds = []
        for host_path in plan.binds.values():
            binds.append(_clone_bind(host_path, userns))
            clones.callback(os.close, binds[-1])
        return layer_fd, binds


@asynccontextmanager
async def open_root_ground(
    programs: Programs, rootfs: Path, layers: Layers, limiter: trio.CapacityLimiter, first_uid: int
) -> AsyncIterator[RootGround]:
    """The ground, for as long as the block lasts. SandboxError."""
    async with open_thread() as forking:
        ground = RootGround(forking, programs, _covered_folder(), layers, limiter)
        try:
            await ground.prepare(rootfs)
            await ground.probe_overlay(first_uid)
            yield ground
        finally:
            ground.close()


def _covered_folder() -> str:
    for folder in _COVERED:
        if os.path.isdir(folder):
            return folder
    raise SandboxError(f"sandbox: none of the folders {', '.join(_COVERED)} exists; create {_COVERED[0]}")


def _enter(base: str, rootfs_fd: int, rootfs: Path) -> None:
    """In the forking thread, once: its own mounts, and what all sandboxes share."""
    kernel.unshare(kernel.CLONE_NEWNS)
    os.umask(0o022)  # this thread's alone since the line above; the sandboxes' users must get through
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    os.mkdir(f"{base}/rootfs")
    kernel.attach(rootfs_fd, f"{base}/rootfs")
    make_etc(Path(base, "rootfs"), Path(base, "etc"))


def make_etc(rootfs: Path, etc: Path) -> None:
    """The sandboxes' /etc: the rootfs's own, with names and users of ours."""
    if (rootfs / "etc").is_dir():
        shutil.copytree(rootfs / "etc", etc, symlinks=True)
    etc.mkdir(exist_ok=True)
    for name, text in ETC_FILES.items():
        (etc / name).unlink(missing_ok=True)
        (etc / name).write_text(text)


def _place(
    box: str, plan: Plan, layer_fd: int | None, binds: list[int], home_net: int
) -> tuple[Workspace, network.Network | None]:
    """In the forking thread: mounts and network of one sandbox. What fails is cleared by `_clear`."""
    os.mkdir(box)
    for index, fd in enumerate(binds):
        _attach_bind(fd, f"{box}/bind{index}")
    if layer_fd is not None:
        space = workspace.mount_overlay(box, layer_fd, plan.uid, plan.quota)
    else:
        num_bytes, num_files = workspace.size_of(entries_of(plan.contents))
        room = Quota(plan.quota.max_bytes + num_bytes + num_files * _PAGE_BYTES, plan.quota.max_files + num_files)
        space = workspace.mount_copy(box, plan.uid, room)
    try:
        return space, None if plan.port is None else network.create(plan.port, home_net)
    except Exception:
        space.close()
        raise


def _attach_bind(fd: int, target: str) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC))
    kernel.attach(fd, target)


def _clone_bind(host_path: str, userns: int) -> int:
    """Host root's files show as the sandbox's own, so their modes do not matter, where the file system can."""
    try:
        return kernel.clone_mount(host_path, userns=userns, read_only=True)
    except FileNotFoundError as error:
        raise SandboxError(f"sandbox: the path {host_path} is to be shown in it but does not exist") from error
    except OSError:
        return kernel.clone_mount(host_path, read_only=True)


def _clear(box: str) -> None:
    """In the forking thread: takes away whatever `_place` made. Never recursive: mounts lead to the host's files."""
    try:
        names = os.listdir(box)
    except FileNotFoundError:
        return
    for name in sorted(names):  # "merged" before the "tmpfs" that it stands on
        path = f"{box}/{name}"
        try:
            kernel.unmount(path)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: nothing is mounted there
                raise
        if os.path.isdir(path):
            os.rmdir(path)
        else:
            os.unlink(path)
    os.rmdir(box)


def _user_namespace(programs: Programs, uid: int) -> int:
    """A user namespace in which host root (0) stands for `uid`; no process stays in it."""
    argv = [programs.unshare, "--user", programs.sh, "-c", "echo ready; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=HOST_ENVIRONMENT, cwd="/") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SandboxError("sandbox: root may not make user namespaces here; raise user.max_user_namespaces")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"0 {uid} 1")
        fd = os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        process.stdin.close()
    return fd
