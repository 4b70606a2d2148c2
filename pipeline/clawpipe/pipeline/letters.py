"""The dead letters of a run: publishes what the flow sets aside, and keeps what the status says of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import anyio

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.records import DeadLetter

NEWEST = 5  # letters that the status names


class Letters:
    """See the module. `waiting` is the flow's list; a letter leaves it when the broker has it."""

    def __init__(self, broker: Broker, waiting: list[DeadLetter]) -> None:
        self._broker = broker
        self._waiting = waiting
        self._publishing = anyio.Lock()
        self._newest: deque[DeadLetter] = deque(maxlen=NEWEST)
        self._counts: dict[str, int] = {}
        self._stale = True  # the counts are older than the last letter

    async def read(self) -> tuple[DeadLetter, ...]:
        """What was set aside so far, by earlier processes too."""
        letters = await self._broker.read_dead_letters()
        self._newest.extend(letters)
        return letters

    async def publish(self) -> None:
        """Returns when every letter that the flow has written is in the stream."""
        async with self._publishing:
            while self._waiting:
                letter = self._waiting[0]
                await self._broker.set_aside(letter)
                self._remember(letter)
                del self._waiting[0]

    async def status(self) -> dict[str, Any]:
        """How many of which flaw, and the newest of them."""
        if self._stale:
            self._stale = False
            self._counts = await self._broker.dead_letters()
        return {"counts": self._counts, "newest": [_line(letter) for letter in self._newest]}

    def _remember(self, letter: DeadLetter) -> None:
        """A letter that was set aside before takes the place of its first copy."""
        self._stale = True
        others = [each for each in self._newest if (each.sequence, each.flaw) != (letter.sequence, letter.flaw)]
        self._newest = deque([*others, letter], maxlen=NEWEST)


def _line(letter: DeadLetter) -> dict[str, Any]:
    return {
        "flaw": letter.flaw.value,
        "rollout": letter.rollout_id,
        "message_id": letter.message_id,
        "sequence": letter.sequence,
        "detail": letter.detail,
    }
