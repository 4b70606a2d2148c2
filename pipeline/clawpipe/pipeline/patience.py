"""Waits until NATS has done what is asked of it: within a bound, and said in the log.

Waited for are a lost connection, a restarted server, a full stream and a full disk. A full disk shows as
silence: nats-server answers no publish to a stream that it could not write, until it is started anew.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from clawpipe.pipeline.errors import BrokerError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.stream_reader import LOST

T = TypeVar("T")

PAUSE_S = 0.1
MAX_PAUSE_S = 1.0

FULL = ("maximum bytes exceeded", "maximum messages exceeded")
NO_CONNECTION = "there is no connection to the server"
STREAM_FULL = "the stream is full"
NO_ANSWER = "the server does not answer in time, as one does whose disk is full"
NO_JETSTREAM = "there is no such stream, or the server's JetStream is switched off"
ADVICE = {
    NO_CONNECTION: "check [nats] url and that the server runs",
    STREAM_FULL: "raise [nats] max_store_bytes, lower keep_records_bytes, or let the learner write checkpoints more "
    "often: records are removed below them",
    NO_ANSWER: "make room on the server's disk and start the server again",
    NO_JETSTREAM: "look into the server's log; it must run with JetStream, and nobody may delete a run's streams",
}


@dataclass(frozen=True, slots=True)
class Pace:
    """When something is tried again. What was sent as the connection went down is never answered."""

    request_s: float = 5.0  # for the answer to a question
    first_try_s: float = 2.0  # for a message to be stored; then it is said that we wait
    try_s: float = 3.0  # for each later try of it
    say_again_s: float = 10.0
    fetch_s: float = 2.0  # for new records, until they are asked for anew


class Patience:
    """Tries until it is done, for all who wait on one connection; one of them speaks for all."""

    def __init__(self, client: Client, log: EventLog, purpose: str, pace: Pace) -> None:
        self._client = client
        self._pace = pace
        self._log = log
        self._purpose = purpose  # what the log says NATS is waited for
        self._num_waiting = 0
        self._since_s = 0.0
        self._said_s: float | None = None

    async def until_done(self, attempt: Callable[[float], Awaitable[T]], what: str, timeout_s: float) -> T:
        """The result of `attempt`, which is given its own time limit in seconds and may be repeated.

        `what` completes "NATS did not ...". BrokerError after `timeout_s`. What waiting does not change (not found,
        not allowed, too large) is raised as it is.
        """
        began_s = time.monotonic()
        try:
            return await attempt(min(self._pace.first_try_s, timeout_s))
        except (*LOST, nats.js.errors.APIError) as err:
            why = self._why(err)
        with self._waiting(began_s):
            return await self._insist(attempt, what, began_s, timeout_s, why)

    async def _insist(
        self, attempt: Callable[[float], Awaitable[T]], what: str, began_s: float, timeout_s: float, why: str
    ) -> T:
        pause_s = PAUSE_S
        while (left_s := began_s + timeout_s - time.monotonic()) > 0:
            self._say(what, why)
            await anyio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if not self._client.is_connected:  # what is sent now would only be sent again later
                why = NO_CONNECTION
                continue
            limit_s = min(self._pace.try_s, max(0.1, began_s + timeout_s - time.monotonic()))
            try:
                result = await attempt(limit_s)
            except (*LOST, nats.js.errors.APIError) as err:
                latest = self._why(err)
                if latest != NO_ANSWER or limit_s == self._pace.try_s:  # the last try is too short to tell
                    why = latest
            else:
                self._say_it_is_through()
                return result
        advice = ADVICE.get(why, ADVICE[NO_JETSTREAM])
        raise BrokerError(f"NATS did not {what} within {timeout_s:g} s: {why}; {advice}")

    def _why(self, err: Exception) -> str:
        """The reason for a person. Raises what does not pass."""
        if isinstance(err, nats.js.errors.NotFoundError | nats.js.errors.BadRequestError):
            raise err
        if not self._client.is_connected:
            return NO_CONNECTION
        if isinstance(err, nats.js.errors.NoStreamResponseError | nats.errors.NoRespondersError):
            return NO_JETSTREAM
        if isinstance(err, nats.js.errors.APIError):
            return STREAM_FULL if err.description in FULL else f"the server says: {err.description}"
        return NO_ANSWER

    @contextmanager
    def _waiting(self, since_s: float) -> Iterator[None]:
        if not self._num_waiting:
            self._since_s, self._said_s = since_s, None
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _say(self, what: str, why: str) -> None:
        now_s = time.monotonic()
        last_s = (
            self._since_s + self._pace.first_try_s - self._pace.say_again_s if self._said_s is None else self._said_s
        )
        if now_s - last_s < self._pace.say_again_s:
            return
        self._said_s = now_s
        self._log.warning(
            f"waiting for NATS to {self._purpose}",
            to=what,
            why=why,
            waited_s=round(now_s - self._since_s, 1),
            waiting=self._num_waiting,
        )

    def _say_it_is_through(self) -> None:
        if self._said_s is not None:
            waited_s = round(time.monotonic() - self._since_s, 1)
            self._log.info(f"no longer waiting for NATS to {self._purpose}", waited_s=waited_s)
        self._since_s, self._said_s = time.monotonic(), None
