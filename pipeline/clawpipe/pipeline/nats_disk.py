"""The disk of the embedded nats-server: waits until there is room on it, and notices when there is none left.

nats-server (2.15) answers no publish to a stream again once a write to it has failed, not even when there is room,
until it is started anew. What it had acknowledged is whole then. Nothing but its log says that a write has failed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from clawpipe.pipeline.processes import Child

NO_ROOM = b"no space left on device"  # the operating system's words, in every such line of the log
MIB = 1024**2
ROOM_BYTES = 64 * MIB  # the smallest store that [nats] allows
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class NatsDisk:
    """Where the server's store lies, its log, and whom to tell."""

    folder: Path
    log: Path
    say: Callable[[str], None]

    async def await_room(self) -> None:
        """Returns when ROOM_BYTES are free, and says so when that was not at once."""
        waits = False
        while (free_bytes := self._free_bytes()) < ROOM_BYTES:
            if not waits:
                self.say(
                    f"the disk of {self.folder} is full: NATS stores nothing, and the run stands still; make "
                    f"{ROOM_BYTES // MIB} MiB of room there (now {free_bytes // MIB}), and it goes on by itself"
                )
            waits = True
            await anyio.sleep(POLL_S)
        if waits:
            self.say(f"there is room again on the disk of {self.folder}")

    async def watch(self, server: Child) -> None:
        """Stops the server when a write has failed and there is room again: whoever keeps it starts it anew."""
        position = self._log_bytes()
        while NO_ROOM not in (lines := self._log_from(position)):
            position += max(0, len(lines) - len(NO_ROOM))  # the last line may be half written
            await anyio.sleep(POLL_S)
        await self.await_room()
        await server.stop()

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _log_bytes(self) -> int:
        return self.log.stat().st_size

    def _log_from(self, position: int) -> bytes:
        with self.log.open("rb") as log:
            log.seek(position)
            return log.read()
