"""The ground of an ordinary user: bubblewrap alone, with plain folders and without quotas or control groups."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from clawpipe.actors.sandbox import network, workspace
from clawpipe.actors.sandbox.bubblewrap import Programs, View
from clawpipe.actors.sandbox.forking import ForkingThread, open_thread
from clawpipe.actors.sandbox.ground import Built, Plan, entries_of
from clawpipe.actors.sandbox.root_ground import make_etc

T = TypeVar("T")


class OrdinaryGround:
    """Made by `open_ordinary_ground`."""

    def __init__(
        self, forking: ForkingThread, programs: Programs, folder: Path, rootfs: Path, limiter: trio.CapacityLimiter
    ) -> None:
        self._forking, self._programs, self._limiter = forking, programs, limiter
        self._folder, self._rootfs = folder, rootfs

    def view(self, built: Built) -> View:
        return View(
            rootfs=str(self._rootfs),
            etc=str(self._folder / "etc"),
            workspace=built.workspace.path,
            binds=built.binds,
            has_network=built.network is not None,
        )

    def prefix(self, built: Built, uid: int) -> list[str]:
        """Into the network's namespaces, by the descriptors that this process holds: none is passed on."""
        if built.network is None:
            return []
        held = f"/proc/{os.getpid()}/fd"
        spaces = [f"--user={held}/{built.network.user_fd}", f"--net={held}/{built.network.net_fd}"]
        return [self._programs.nsenter, *spaces, "--preserve-credentials", "--"]

    async def start(self, built: Built, fork: Callable[[], T]) -> T:
        return await self._forking.run(fork)

    @asynccontextmanager
    async def built(self, plan: Plan) -> AsyncIterator[Built]:
        box = self._folder / plan.name
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._remove, box)
            await self._in_thread(partial(box.mkdir, mode=0o700))
            space = workspace.plain_folder(str(box))
            stack.callback(space.close)
            entries = entries_of(plan.contents)
            await self._in_thread(partial(workspace.write_entries, space.root_fd, entries))
            net = None
            if plan.port is not None:
                net = await trio.to_thread.run_sync(network.create_unprivileged, plan.port, limiter=self._limiter)
                stack.callback(net.close)
            yield Built(space, [(host_path, inside) for inside, host_path in plan.binds.items()], net)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(work, limiter=self._limiter)

    async def _remove(self, box: Path) -> None:
        with trio.CancelScope(shield=True):
            await self._in_thread(partial(remove_tree, box))


@asynccontextmanager
async def open_ordinary_ground(
    programs: Programs, folder: Path, rootfs: Path, limiter: trio.CapacityLimiter
) -> AsyncIterator[OrdinaryGround]:
    """The ground, for as long as the block lasts; `folder` is its own."""
    make_etc(rootfs, folder / "etc")
    async with open_thread() as forking:
        yield OrdinaryGround(forking, programs, folder, rootfs, limiter)


def remove_tree(folder: Path) -> None:
    """Removes a folder in which an agent may have closed folders to their owner. Nothing if it is not there."""
    if not folder.exists():
        return
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):  # chmod would follow it
                os.chmod(inner, stat.S_IRWXU)
    shutil.rmtree(folder)
