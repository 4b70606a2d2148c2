"""One sandbox: runs programs in it, and collects its workspace when they are dead."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import trio

from clawpipe.actors.sandbox import bubblewrap, collect, workspace
from clawpipe.actors.sandbox.bubblewrap import Programs
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.ground import Built, Ground, Plan, entries_of
from clawpipe.actors.sandbox.limits import Group, GroupRoot, Limits
from clawpipe.actors.sandbox.process import Exit, Process
from clawpipe.pipeline.config import SandboxConfig
from clawpipe.pipeline.errors import SandboxError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """What all sandboxes of a supervisor share."""

    config: SandboxConfig
    programs: Programs
    ground: Ground
    groups: GroupRoot
    root_options: Sequence[str]
    seccomp: bytes
    limiter: trio.CapacityLimiter

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work that can block for long. Not abandoned on cancelling: its result always has an owner."""
        return await trio.to_thread.run_sync(work, limiter=self.limiter)


class Box:
    """Made by `Supervisor.sandbox`, valid inside its block."""

    def __init__(
        self, host: Host, plan: Plan, built: Built, group: Group, limits: Limits, home_files: Mapping[str, bytes]
    ) -> None:
        self._host, self._plan, self._built = host, plan, built
        self._group, self._limits, self._home_files = group, limits, home_files
        self._is_running = False

    @property
    def listener(self) -> socket.socket | None:
        """Listens on 127.0.0.1:port inside, works here and, by SCM_RIGHTS, in other processes. May be closed."""
        return self._built.network.listener if self._built.network is not None else None

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        wall_clock_s: float,
        max_output_bytes: int | None = None,
        keep_errors_apart: bool = False,
    ) -> Exit:
        """Runs a program to its end, or ends it, and everything that it started with it.

        `env` is added to HOME, PATH, LANG, TZ, TMPDIR and USER; nothing of the host's is passed on.
        SandboxError when it could not be started.
        """
        assert not self._is_running, "one program at a time"
        self._is_running = True
        try:
            try:
                process = await self._start(argv, env or {}, keep_errors_apart)
            except (OSError, ValueError) as error:
                raise SandboxError(f"sandbox {self._plan.name}: {argv[0]} was not started: {error}") from error
            return await process.supervise(wall_clock_s, max_output_bytes or self._host.config.max_output_bytes)
        finally:
            self._is_running = False

    async def collect(self) -> Snapshot:
        """The workspace as it is now. WorkspaceRefused when it is over the configured limits, W0 not counted.

        SandboxError when it cannot be read.
        """
        assert not self._is_running, "collecting is for a sandbox in which everything is dead"
        num_bytes, num_files = workspace.size_of(entries_of(self._plan.contents))
        config = self._host.config
        walk = partial(
            collect.collect,
            self._built.workspace.root_fd,
            max_files=config.collect_max_files + num_files,
            max_bytes=config.collect_max_bytes + num_bytes,
        )
        try:
            return await self._host.in_thread(walk)
        except OSError as error:
            raise SandboxError(f"sandbox {self._plan.name}: its workspace cannot be read: {error}") from error

    async def _start(self, argv: Sequence[str], env: Mapping[str, str], keep_errors_apart: bool) -> Process:
        with ExitStack() as passed, ExitStack() as ours:
            status_fd, report_fd = os.pipe()
            ours.callback(os.close, status_fd)
            passed.callback(os.close, report_fd)
            os.set_blocking(status_fd, False)
            inherited = [report_fd]

            def blob(data: bytes) -> int:
                inherited.append(_memory_file(data))
                passed.callback(os.close, inherited[-1])
                return inherited[-1]

            command = [*self._prefix(), self._host.programs.bwrap, "--args"]
            command += [str(self._options(env, report_fd, blob)), "--", *self._inner_prefix(), *argv]

            def popen() -> tuple[subprocess.Popen[bytes], int]:
                return _popen(command, inherited, keep_errors_apart)

            popened, pidfd = await self._host.ground.start(self._built, popen)
            ours.pop_all()
        uid = self._plan.uid if os.geteuid() == 0 else None
        return Process(popened, pidfd, status_fd, self._group, uid)

    def _options(self, env: Mapping[str, str], report_fd: int, blob: Callable[[bytes], int]) -> int:
        view = replace(
            self._host.ground.view(self._built),
            env=env,
            home_files=self._home_files,
            scratch_bytes=self._host.config.scratch_bytes,
        )
        words = bubblewrap.options(view, self._host.root_options, self._host.seccomp, blob)
        return blob(bubblewrap.encode_options([*words, "--json-status-fd", str(report_fd)]))

    def _prefix(self) -> list[str]:
        programs = self._host.programs
        counted = "memory" in self._host.groups.controllers
        return [
            *bubblewrap.join_groups(programs, [folder / "cgroup.procs" for folder in self._group.folders]),
            *bubblewrap.limit_resources(
                programs, self._plan.quota.max_bytes, None if counted else self._limits.memory_bytes
            ),
            *self._host.ground.prefix(self._built, self._plan.uid),
        ]

    def _inner_prefix(self) -> list[str]:
        """Where no control group counts processes, a resource limit does: inside, where only the sandbox counts."""
        if "pids" in self._host.groups.controllers:
            return []
        return ["prlimit", f"--nproc={self._limits.max_processes + 1}", "--"]  # and pid 1


def _popen(command: list[str], inherited: list[int], keep_errors_apart: bool) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its pidfd. OSError, and then there is no process."""
    popened = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keep_errors_apart else subprocess.STDOUT,
        bufsize=0,
        env=bubblewrap.HOST_ENVIRONMENT,
        pass_fds=inherited,
        cwd="/",
    )
    try:
        return popened, os.pidfd_open(popened.pid)
    except OSError:
        popened.kill()
        popened.communicate()
        raise


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("clawpipe")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
