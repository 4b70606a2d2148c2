"""The stream of weight versions that are staged, and of the engines' reports of taking them. A part of `broker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import anyio
import msgspec
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from clawpipe.pipeline.decoding import decoded
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.publishing import Publisher
from clawpipe.pipeline.records import PushReport, WeightVersion, encode
from clawpipe.pipeline.stream_reader import LOST, read_stream
from clawpipe.pipeline.streams import Names

POLL_S = 0.2

_decode_version = msgspec.msgpack.Decoder(WeightVersion).decode
_decode_report = msgspec.msgpack.Decoder(PushReport).decode


class Weights:
    """Announces, reports and follows."""

    def __init__(self, client: Client, js: JetStreamContext, names: Names, publisher: Publisher, log: EventLog) -> None:
        self._client = client
        self._js = js
        self._stream = names.weights
        self._staged = f"{names.prefix}.weights.staged"
        self._applied = f"{names.prefix}.weights.applied"
        self._publisher = publisher
        self._log = log

    async def announce(self, weights: WeightVersion) -> None:
        """A version is staged."""
        await self._publisher.publish(self._staged, encode(weights), f"v{weights.version}")

    async def last(self) -> WeightVersion | None:
        """The newest version, or None."""
        try:
            raw = await self._js.get_last_msg(self._stream, self._staged)
        except nats.js.errors.NotFoundError:
            return None
        return _decode_version(raw.data or b"")

    async def follow(self) -> AsyncIterator[WeightVersion]:
        """The newest version, then every newer one as it comes; a slow reader skips to the newest. Never ends."""
        seen: int | None = None
        while True:
            newest = None
            with suppress(*LOST):
                newest = await self.last()
            if newest is not None and (seen is None or newest.version > seen):
                seen = newest.version
                yield newest
            await anyio.sleep(POLL_S)

    async def report(self, report: PushReport) -> None:
        """An engine has taken a version."""
        message_id = f"{report.engine}.v{report.version}.{report.applied_s}"
        await self._publisher.publish(self._applied, encode(report), message_id)

    async def reports(self) -> AsyncIterator[PushReport]:
        """All reports of the run from its start, then new ones; never ends."""
        async with aclosing(read_stream(self._client, self._js, self._stream, self._applied)) as messages:
            async for _, msg in messages:
                report = decoded(_decode_report, msg.data, msg.subject, self._log)
                if report is not None:
                    yield report
