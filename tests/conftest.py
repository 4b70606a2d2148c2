"""Fixtures shared by all rooms: a real nats-server, and a log that every test finds untouched."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawpipe.pipeline.nats_server import binary, configuration
from clawpipe.pipeline.processes import free_port

pytest_plugins = ["engine_fixture"]
TOKEN = "test-token"


@pytest.fixture(autouse=True)
def _a_log_of_nobody() -> None:
    """A role that ran in this process has taken the log for itself."""
    log = logging.getLogger("clawpipe")
    log.propagate, log.level, log.handlers = True, logging.NOTSET, []


@dataclass
class RunningNats:
    """A nats-server that a test may kill and start again on the same store and port."""

    url: str
    token: str
    argv: list[str]
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        _await_ready(self.url)


def _await_ready(url: str) -> None:
    host, port = url.removeprefix("nats://").split(":")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=1) as probe:
                probe.recv(1)
                return
        except OSError:
            time.sleep(0.02)
    raise TimeoutError(f"no nats-server at {url}")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[RunningNats]:
    """A fresh nats-server with JetStream on a free port; gone with its store after the test."""
    port = free_port()
    folder = tmp_path / "nats"
    folder.mkdir()
    config = folder / "server.conf"
    config.write_text(configuration(port, TOKEN, folder / "store", 1024**3))
    argv = [binary(), "-c", str(config)]
    server = RunningNats(f"nats://127.0.0.1:{port}", TOKEN, argv, folder / "nats.log", None)  # type: ignore[arg-type]
    server.start()
    yield server
    server.kill()
