"""One program in a sandbox, from its start to the death of everything that it started.

The program's end is its pidfd becoming readable, not the end of its output, which a daemon may hold open.
Whatever ended it (its own exit, the wall clock, too much output, cancelling), everything in the sandbox is
dead before `Process.supervise` returns.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import trio

from clawpipe.actors.sandbox.identity import children_of_uid, parent_of
from clawpipe.actors.sandbox.limits import Group
from clawpipe.pipeline.errors import SandboxError

KEPT_OUTPUT_BYTES = 256 * 1024
KILL_TIMEOUT_S = 20.0
OUT_OF_MEMORY = 128 + signal.SIGKILL
_LEAVE_S = 1.0
_POLL_S = 0.002
_READ_BYTES = 64 * 1024


class Reason(StrEnum):
    """What ended a program."""

    EXITED = "exited"
    WALL_CLOCK = "wall_clock"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a program ended. All of its processes are dead."""

    reason: Reason
    code: int | None  # of the program, 128 + signal when a signal ended it; None when we ended it
    output: bytes  # the last KEPT_OUTPUT_BYTES of standard output, and of standard error unless kept apart
    errors: bytes  # the last KEPT_OUTPUT_BYTES of standard error, when kept apart
    output_bytes: int  # all that was written
    wall_s: float
    peak_memory_bytes: int | None  # of the sandbox until now, files in its tmpfs included; None: not counted
    oom_kills: int  # processes that the memory limit ended


@dataclass(slots=True)
class Process:
    """A started bubblewrap and our ends of its pipes."""

    popen: subprocess.Popen[bytes]
    pidfd: int
    status_fd: int  # what bubblewrap reports with --json-status-fd
    group: Group
    uid: int | None  # the host uid of everything in the sandbox, None when it has none of its own
    _status: bytearray = field(default_factory=bytearray)

    async def supervise(self, wall_clock_s: float, max_output_bytes: int) -> Exit:
        """Waits for the program's end, or brings it about, and closes everything. SandboxError."""
        started = trio.current_time()
        output = _Output(max_output_bytes)
        try:
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(wall_clock_s) as waiting:
                    for number, pipe in enumerate((self.popen.stdout, self.popen.stderr)):
                        if pipe is not None:
                            nursery.start_soon(output.drain, _stream(pipe.fileno()), number, waiting.cancel)
                    await trio.lowlevel.wait_readable(self.pidfd)
                if not await self.kill():  # once all are dead nobody holds the pipes, and draining ends by itself
                    nursery.cancel_scope.cancel()
        finally:
            is_dead = await self.kill()
            code = self._reports().get("exit-code")
            self._close()
        if not is_dead:
            raise SandboxError(
                f"sandbox: processes started by {self.popen.pid} are still there {KILL_TIMEOUT_S:g} s after SIGKILL; "
                "look for processes in state D on this host"
            )
        reason = Reason.WALL_CLOCK if waiting.cancelled_caught else Reason.EXITED
        if output.is_flooded:
            reason = Reason.OUTPUT
        if code is None and self.group.oom_kills():
            code = OUT_OF_MEMORY  # files in memory belong to no process, so the kernel ends one after the other
        if reason is Reason.EXITED and code is None:
            raise SandboxError(f"sandbox: the program could not be started: {output.text()}")
        return self._exit(reason, code, output, trio.current_time() - started)

    def _exit(self, reason: Reason, code: int | None, output: _Output, wall_s: float) -> Exit:
        return Exit(
            reason=reason,
            code=code if reason is Reason.EXITED else None,
            output=bytes(output.tails[0]),
            errors=bytes(output.tails[1]),
            output_bytes=output.num_bytes,
            wall_s=wall_s,
            peak_memory_bytes=self.group.peak_bytes(),
            oom_kills=self.group.oom_kills(),
        )

    async def kill(self) -> bool:
        """Ends everything in the sandbox and waits until it is gone; False when it will not go."""
        with trio.CancelScope(shield=True), trio.move_on_after(KILL_TIMEOUT_S) as patience:
            if self.popen.returncode is None:
                await self._end_first_process()
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                await trio.lowlevel.wait_readable(self.pidfd)
                self.popen.wait()
            while self.group.folders and self.group.populated():
                self.group.kill()
                await trio.sleep(_POLL_S)
            self._reap_first_process()
        return not patience.cancelled_caught

    async def _end_first_process(self) -> None:
        """Kills the sandbox's pid 1, if it is known: it ends after everything else in there has."""
        pid = self._reports().get("child-pid")
        if pid is None or parent_of(pid) not in (self.popen.pid, os.getpid()):
            return
        try:
            first = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(first, signal.SIGKILL)
            await trio.lowlevel.wait_readable(first)
        except ProcessLookupError:
            return
        finally:
            os.close(first)
        with trio.move_on_after(_LEAVE_S):
            await trio.lowlevel.wait_readable(self.pidfd)

    def _reap_first_process(self) -> None:
        """bubblewrap often ends before its child, the sandbox's pid 1, which then is ours (`subreaper`).

        When it was killed before it could name the child, the child is found by the uid that only it has.
        """
        pid = self._reports().get("child-pid")
        for orphan in [pid] if pid is not None else children_of_uid(self.uid):
            try:
                os.waitpid(orphan, 0)
            except ChildProcessError:
                continue

    def _reports(self) -> dict[str, int]:
        """What bubblewrap has reported until now: child-pid at the start, exit-code at the end."""
        try:
            while data := os.read(self.status_fd, _READ_BYTES):
                self._status += data
        except BlockingIOError:
            pass
        found: dict[str, int] = {}
        for line in self._status.splitlines():
            found.update(msgspec.json.decode(line, type=dict[str, int]))
        return found

    def _close(self) -> None:
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self.status_fd)
        os.close(self.pidfd)


@dataclass(slots=True)
class _Output:
    """What a program writes: counted, bounded, and its end kept."""

    max_bytes: int
    num_bytes: int = 0
    tails: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))

    @property
    def is_flooded(self) -> bool:
        return self.num_bytes > self.max_bytes

    async def drain(self, stream: trio.lowlevel.FdStream, number: int, stop: Callable[[], None]) -> None:
        """Until the end of the stream, or until there is too much: then calls `stop`."""
        async with stream:
            while not self.is_flooded and (data := await stream.receive_some(_READ_BYTES)):
                self.num_bytes += len(data)
                self.tails[number].extend(data)
                del self.tails[number][:-KEPT_OUTPUT_BYTES]
        if self.is_flooded:
            stop()

    def text(self) -> str:
        """Its end, for a message."""
        return b"".join(self.tails).decode("utf-8", "replace").strip()[-500:] or "it wrote nothing"


def _stream(fd: int) -> trio.lowlevel.FdStream:
    return trio.lowlevel.FdStream(os.dup(fd))
