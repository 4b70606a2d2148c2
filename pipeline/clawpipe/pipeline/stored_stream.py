"""The record stream of a run that has ended, for reading again: `clawpipe replay`.

An embedded server's store is copied and a server is started on the copy, on a free port of the loopback: the
run's own store is only read, and nothing that happens to the copy reaches it. A server of the user's own
([nats] url) is asked as it stands; nothing is written to it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio.to_thread

from clawpipe.pipeline import nats_server
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import NatsConfig
from clawpipe.pipeline.entries import Entry
from clawpipe.pipeline.errors import BrokerError, ClawpipeError, ConfigError
from clawpipe.pipeline.processes import start
from clawpipe.pipeline.runtime import Runtime

START_TIMEOUT_S = 60.0  # of a server that recovers a store as it was left
OWNER = "clawpipe-replay"


@asynccontextmanager
async def stored_stream(runtime: Runtime, config: NatsConfig) -> AsyncIterator[Broker]:
    """A connection to the run's streams. ClawpipeError when there is no store, or no room to copy it.

    Nobody may be writing to the store: the caller has seen to it that the run is over.
    """
    if config.url:
        async with Broker.of_run(runtime, config) as broker:
            yield broker
        return
    store = runtime.path("nats", "store")
    if not store.is_dir():
        raise ConfigError(f"{store}: the run has no stored records; give the folder of a run that has begun")
    with tempfile.TemporaryDirectory(prefix=f"{OWNER}-") as name:
        await anyio.to_thread.run_sync(_copy, store, Path(name, "nats", "store"))
        async with _served(Path(name), config) as broker:
            yield broker


async def stored_entries(broker: Broker, last: int) -> AsyncGenerator[Entry, None]:
    """The records that the stream holds up to sequence `last`, its newest, in its order."""
    if not await broker.has_records(1):
        return
    async with aclosing(broker.records(1)) as found:
        async for entry in found:
            yield entry
            if entry.sequence >= last:
                return


def _copy(store: Path, to: Path) -> None:
    try:
        shutil.copytree(store, to)
    except (OSError, shutil.Error) as err:
        raise ClawpipeError(
            f"{store}: the stored records cannot be copied to {to} ({err}); "
            "make room there, or set TMPDIR to a folder that has it"
        ) from err


@asynccontextmanager
async def _served(folder: Path, config: NatsConfig) -> AsyncIterator[Broker]:
    """A server on the copy, gone at the end."""
    server = nats_server.prepare(folder, port=0, token="", max_store_bytes=config.max_store_bytes)
    log = folder / "nats.log"
    async with start(server.argv, log=log, owner=OWNER, name="nats"):
        if not await nats_server.answers(server.url, START_TIMEOUT_S):
            said = log.read_text(errors="replace").strip()[-500:]
            raise BrokerError(f"nats-server did not start on a copy of the run's store; it said: {said}")
        async with Broker.connect(server.url, server.token, prefix=config.prefix) as broker:
            yield broker
