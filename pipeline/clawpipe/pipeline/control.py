"""The control bucket: one EngineState per engine, and the mark that asks a run to drain."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import anyio
import msgspec
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from clawpipe.pipeline.decoding import decoded
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.patience import Patience
from clawpipe.pipeline.records import EngineState, encode
from clawpipe.pipeline.stream_reader import LOST, RETRY_S, read_stream
from clawpipe.pipeline.streams import Names

POLL_S = 0.2
PUT_TIMEOUT_S = 30.0
DRAIN = "drain"

_decode_engine = msgspec.msgpack.Decoder(EngineState).decode


class Control:
    """Writes and watches the bucket."""

    def __init__(self, client: Client, js: JetStreamContext, names: Names, storing: Patience, log: EventLog) -> None:
        self._client = client
        self._js = js
        self._bucket = names.control
        self._storing = storing
        self._log = log

    async def set_engine(self, state: EngineState) -> None:
        """Writes the engine's entry."""
        await self._put(f"engine.{state.name}", encode(state))

    async def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        """All engines' entries now, which may be none, and again whenever one changes; never ends."""
        stream, subjects = f"KV_{self._bucket}", f"$KV.{self._bucket}.engine.>"
        states, position = await self._engine_states(stream, subjects)
        yield states
        async with aclosing(read_stream(self._client, self._js, stream, subjects, position + 1)) as messages:
            async for _, msg in messages:
                state = decoded(_decode_engine, msg.data, msg.subject, self._log)
                if state is not None and states.get(state.name) != state:
                    states = {**states, state.name: state}
                    yield states

    async def _engine_states(self, stream: str, subjects: str) -> tuple[dict[str, EngineState], int]:
        """(entries, the stream's last sequence when they were read)."""
        while True:
            try:
                state = (await self._js.stream_info(stream, subjects_filter=subjects)).state
                entries = [await self._js.get_last_msg(stream, subject) for subject in state.subjects or ()]
            except (*LOST, nats.js.errors.NotFoundError):
                await anyio.sleep(RETRY_S)
                continue
            found = [decoded(_decode_engine, entry.data or b"", entry.subject or "", self._log) for entry in entries]
            return {engine.name: engine for engine in found if engine is not None}, state.last_seq

    async def request_drain(self) -> None:
        """Writes the mark."""
        await self._put(DRAIN, str(time.time()).encode())

    async def clear_drain(self) -> None:
        """Removes the mark."""
        bucket = await self._js.key_value(self._bucket)
        await bucket.purge(DRAIN)

    async def drained(self) -> None:
        """Waits until the mark is there."""
        while True:
            with suppress(*LOST, nats.js.errors.NotFoundError):
                bucket = await self._js.key_value(self._bucket)
                await bucket.get(DRAIN)
                return
            await anyio.sleep(POLL_S)

    async def _put(self, key: str, value: bytes) -> None:
        async def attempt(timeout_s: float) -> None:
            with anyio.fail_after(timeout_s):
                bucket = await self._js.key_value(self._bucket)
                await bucket.put(key, value)

        await self._storing.until_done(attempt, f"store {key} in the control bucket", PUT_TIMEOUT_S)
