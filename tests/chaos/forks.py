"""The test's end of `forks_program`: starts processes, and hears how they end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawpipe.pipeline.processes import OWNER

PROGRAM = Path(__file__).with_name("forks_program.py")
PATIENCE_S = 120.0  # its imports take four seconds when the machine has nothing else to do


class Forks:
    """One warm process. `codes` holds the exit code of every fork that has ended."""

    def __init__(self, model_dir: Path, log: Path, owner: str) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(model_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, OWNER: owner, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
            )
        self.owner = owner
        self._log = log
        self._heard = b""
        self.codes: dict[int, int] = {}
        if self._next(PATIENCE_S) != {"ready": True}:
            self.close()
            raise AssertionError(log.read_text())

    @property
    def pid(self) -> int:
        """Of the warm process itself."""
        return self._process.pid

    def start(self, argv: Sequence[str], log: Path) -> int:
        """Starts a process and gives its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"argv": list(argv), "log": str(log)}).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            message = self._next(PATIENCE_S)
            assert message is not None, self._log.read_text()
            if "code" not in message:
                return int(message["pid"])
            self.codes[message["pid"]] = message["code"]

    def listen(self) -> None:
        """Takes in which processes have ended."""
        while (message := self._next(0.0)) is not None:
            self.codes[message["pid"]] = message["code"]

    def close(self) -> None:
        """Ends the warm process, and what is left of its forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None when there is none within the time."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            readable, _, _ = select.select([output], [], [], timeout_s)
            data = os.read(output, 65536) if readable else b""
            if not data:
                return None
            self._heard += data
        line, self._heard = self._heard.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message
