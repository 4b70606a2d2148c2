"""The service's clock, its wake-up call, and its watch over how promptly it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio


class StreamClock:
    """Seconds that pass only while records are taken from the stream."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._stopped_s = 0.0
        self._since: float | None = None

    def now(self) -> float:
        """The time; it stands still while stopped."""
        return (self._since if self._since is not None else self._read()) - self._stopped_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """For as long as nothing is taken."""
        self._since = self._read()
        try:
            yield
        finally:
            self._stopped_s += self._read() - self._since
            self._since = None


class Signal:
    """Wakes everybody who waits for a change of the flow."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def fire(self) -> None:
        """Something has changed."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next change, or the timeout."""
        with anyio.move_on_after(timeout_s):
            await self._event.wait()


class LoopLag:
    """How long the event loop was kept from running its tasks: by a blocking call, or for want of a processor."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._longest_s = 0.0

    async def watch(self) -> None:
        """Measures until cancelled: what a short sleep takes longer than it should."""
        while True:
            before = time.monotonic()
            await anyio.sleep(self._interval_s)
            self._longest_s = max(self._longest_s, time.monotonic() - before - self._interval_s)

    def take(self) -> float:
        """The longest time since the last take, seconds."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s
