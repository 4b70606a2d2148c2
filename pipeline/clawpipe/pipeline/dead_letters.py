"""The stream of messages that cannot be used, each with its reason. A part of `broker`."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import nats.js.errors
from nats.js import JetStreamContext

from clawpipe.pipeline import entries
from clawpipe.pipeline.decoding import UNREADABLE
from clawpipe.pipeline.publishing import Publisher
from clawpipe.pipeline.records import DeadLetter, encode
from clawpipe.pipeline.streams import Names

NEWEST_LETTERS = 1000

_decode_letter = msgspec.msgpack.Decoder(DeadLetter).decode


class DeadLetters:
    """Writes, counts and reads them."""

    def __init__(self, js: JetStreamContext, names: Names, publisher: Publisher) -> None:
        self._js = js
        self._names = names
        self._publisher = publisher

    async def set_aside(self, letter: DeadLetter) -> None:
        """Stores the letter; its subject names the message, so that a second one takes the place of the first."""
        place = letter.sequence if letter.subject != self._names.request_subject else f"request-{letter.sequence}"
        subject = f"{self._names.prefix}.dead.{letter.flaw}.{place}"
        await self._publisher.publish(subject, encode(entries.cut(letter)), subject)

    async def counts(self) -> dict[str, int]:
        """How many there are, by flaw."""
        found: dict[str, int] = {}
        state = (await self._js.stream_info(self._names.dead_letters, self._names.dead_subjects)).state
        for subject, count in (state.subjects or {}).items():
            flaw = subject.split(".")[2]
            found[flaw] = found.get(flaw, 0) + count
        return found

    async def newest(self) -> tuple[DeadLetter, ...]:
        """The newest NEWEST_LETTERS that can be read, oldest first."""
        state = (await self._js.stream_info(self._names.dead_letters)).state
        found: list[DeadLetter] = []
        start = max(state.first_seq, state.last_seq - NEWEST_LETTERS + 1)
        while state.messages and start <= state.last_seq:
            try:
                raw = await self._js.get_msg(self._names.dead_letters, start, self._names.dead_subjects, next=True)
            except nats.js.errors.NotFoundError:
                break
            with suppress(*UNREADABLE):
                found.append(_decode_letter(raw.data or b""))
            start = (raw.seq or start) + 1
        return tuple(found)
