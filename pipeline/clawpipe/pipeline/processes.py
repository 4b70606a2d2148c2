"""Child processes that do not outlive us: each in a session of its own, with a parent-death signal, and marked.

The mark is an environment variable CLAWPIPE_OWNER=<owner>, and the log that a child's output goes to: programs that
set their title, as vLLM's engine does, wipe their environment. A later start finds what a SIGKILL left behind (`sweep`)
by these marks alone, so nothing is ever ended by its name.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

OWNER = "CLAWPIPE_OWNER"
GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Child:
    """A started process."""

    name: str
    process: anyio.abc.Process

    @property
    def pid(self) -> int:
        """Its process id, which is its session's id too."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Waits for its end and returns its exit code (negative: the signal)."""
        return await self.process.wait()

    def send(self, sig: signal.Signals) -> None:
        """Sends a signal to the process alone, if it still runs."""
        if self.process.returncode is None:
            self.process.send_signal(sig)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM, `grace_s` later SIGKILL to its whole session; returns when it has ended."""
        with anyio.CancelScope(shield=True):
            self.send(signal.SIGTERM)
            with anyio.move_on_after(grace_s):
                await self.process.wait()
            kill_session(self.pid)
            await self.process.wait()


@asynccontextmanager
async def start(
    argv: Sequence[str],
    *,
    log: Path,
    owner: str,
    name: str,
    env: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> AsyncIterator[Child]:
    """Runs `argv` until the block ends; then stops it with everything in its session.

    Output is appended to `log`. `env` is added to ours. The child gets SIGTERM when our process dies.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await anyio.open_process(
            [*_die_with_parent(), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Compiled files halve the start of everything that imports torch.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **(env or {}), OWNER: owner},
            start_new_session=True,
        )
    child = Child(name, process)
    try:
        yield child
    finally:
        await child.stop(grace_s)


def _die_with_parent() -> list[str]:
    """A prefix of the command line that asks the kernel for SIGTERM when the parent dies (util-linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


@asynccontextmanager
async def until_stopped() -> AsyncIterator[None]:
    """Cancels the block on SIGTERM or SIGINT; what comes after it cleans up."""

    async def watch(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch, group.cancel_scope)
        yield
        group.cancel_scope.cancel()


def raise_file_limit() -> None:
    """As many open files as we may have: proxy and supervisor hold several per rollout."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def kill_session(session: int) -> None:
    """SIGKILL to every process whose session is `session`."""
    for pid in _pids():
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def owned(owner: str, output: Path | None = None) -> list[int]:
    """Pids of the processes marked with `owner` or with anything below it ("run" finds "run/engine").

    `output`: also those that write to this log, or to one in this folder.
    """
    return [pid for pid in _pids() if pid != os.getpid() and (_is_marked(pid, owner) or _writes_to(pid, output))]


def _is_marked(pid: int, owner: str) -> bool:
    mark = f"{OWNER}={owner}".encode()
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(entry == mark or entry.startswith(mark + b"/") for entry in environ)


def _writes_to(pid: int, output: Path | None) -> bool:
    if output is None:
        return False
    try:
        target = Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return False
    return target == output or output in target.parents


def sweep(owner: str, output: Path | None = None, timeout_s: float = 10.0) -> int:
    """SIGKILLs what `owned` finds until nothing is left; returns how many there were."""
    first = left = owned(owner, output)
    deadline = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = [pid for pid in owned(owner, output) if not _zombie(pid)]
    return len(first)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether somebody could listen on 127.0.0.1:`port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
