"""A rollout as the proxy knows it: its listener is its identity, and everything about its calls hangs here.

States: OPEN takes calls; SETTLING takes none and waits for those in flight; SETTLED has a list of calls that will
not change any more.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import anyio
import numpy as np

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.graft import Broken, Said, SampledTurns
from clawpipe.actors.proxy.messages import Answer, CallError, Fault, Head, Message
from clawpipe.actors.proxy.prefixes import PrefixIndex
from clawpipe.pipeline.records import CallEntry, FinishReason, IntArray, Role

Classify = Callable[[ModelCall], Role]


class SessionState(StrEnum):
    """Where a rollout stands."""

    OPEN = "open"
    SETTLING = "settling"
    SETTLED = "settled"


class Call:
    """One model call. `prepared` is set once it is certain that it will be sampled, `done` when it has an outcome."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.index = -1  # set when it is prepared, and `head` with it
        self.head: Head | None = None
        self.prepared = anyio.Event()
        self.cut = anyio.Event()  # set: end sampling now
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.outcome: Answer | CallError | None = None
        self.finished_s = 0.0
        self.recorded: FinishReason | None = None  # None: no record of it exists
        self.said: Said | None = None  # its turn, once it can be found in a history
        self.delivered_s: float | None = None  # when its last byte first went to a client that was there

    def finish(self, outcome: Answer | CallError) -> None:
        """Wakes everybody who waits for the outcome."""
        self.outcome = outcome
        self.finished_s = time.monotonic()
        self.prepared.set()
        self.done.set()

    def deliver(self) -> None:
        """A client has the answer."""
        if self.delivered_s is None:
            self.delivered_s = time.monotonic()

    def answers_again(self, window_s: float) -> bool:
        """Whether it has not failed, and is in flight or finished `window_s` ago at most."""
        if isinstance(self.outcome, CallError):
            return False
        return self.outcome is None or time.monotonic() - self.finished_s <= window_s


class Session:
    """One attempt at a rollout, from its listener's opening to the fixed list of its calls."""

    def __init__(self, rollout_id: str, attempt: int, harness: str, classify: Classify) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.harness = harness
        self.classify = classify
        self.state = SessionState.OPEN
        self.prefixes = PrefixIndex()
        self.turns = SampledTurns()
        self.num_aborted = 0  # calls that ended in an error of ours
        self._last_aborted = -1  # index of the newest of them
        self.broken: Counter[Broken] = Counter()  # turns that could not be grafted, by reason, each counted once
        self.entries: tuple[CallEntry, ...] = ()  # fixed when the state becomes SETTLED
        self._broken_turns: set[int] = set()  # by hash: they may be large
        self._calls: list[Call] = []
        self._num_prepared = 0
        self._num_counting = 0
        self._latest: dict[str, Call] = {}  # by digest, those that an equal request may be a repeat of
        self._continued: set[Said] = set()  # turns that a later request goes on from
        self._newest_s = 0.0  # when the last new request came
        self._replies = 0
        self._quiet = anyio.Event()

    def call_id(self, index: int) -> str:
        """Unique in the run."""
        return f"{self.rollout_id}.a{self.attempt}.c{index}"

    def require_open(self) -> None:
        """CallError (SETTLED) when no call is taken any more."""
        if self.state is not SessionState.OPEN:
            raise CallError(Fault.SETTLED, "This endpoint takes no more calls.")

    def repeated(self, digest: str, window_s: float) -> Call | None:
        """The call that an identical request repeats: one in flight, or answered within `window_s`.

        Once the rollout went on from the answer the same request is a new one: after a compaction a conversation
        may come to the very words that it had before, and must not be told the same for ever.
        """
        self._latest = {key: call for key, call in self._latest.items() if self._is_current(call, window_s)}
        return self._latest.get(digest)

    def _is_current(self, call: Call, window_s: float) -> bool:
        """Nothing continues it, and nothing else was asked since its answer was delivered."""
        if not call.answers_again(window_s) or call.said in self._continued:
            return False
        return call.delivered_s is None or self._newest_s <= call.delivered_s

    def begin(self, digest: str) -> Call:
        """A new call, from now on found by requests that repeat it."""
        call, self._newest_s = Call(digest), time.monotonic()
        self._calls.append(call)
        self._latest[digest] = call
        return call

    def forget(self, call: Call) -> None:
        """It was refused: nothing of it is kept, or a loop of bad requests would fill the memory."""
        self._calls.remove(call)
        if self._latest.get(call.digest) is call:
            del self._latest[call.digest]

    def goes_on_from(self, turns: Iterable[Said]) -> None:
        """A request's history holds these turns."""
        self._continued.update(turns)

    def prepared(self, call: Call, prompt_tokens: int, started_s: float) -> str:
        """The call will be sampled; returns its id."""
        call.index = self._num_prepared
        answer_id = hashlib.blake2b(self.call_id(call.index).encode(), digest_size=12).hexdigest()
        call.head = Head(id=answer_id, prompt_tokens=prompt_tokens, created_s=started_s)
        self._num_prepared += 1
        call.prepared.set()
        return self.call_id(call.index)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While a prompt is counted, which costs what the prompt of a call costs."""
        self._num_counting += 1
        try:
            yield
        finally:
            self._num_counting -= 1

    def put_aside(self, call: Call) -> Call:
        """Takes the number of a call whose turn nobody will get; `call` itself is sampled again under the next one."""
        aside = Call(call.digest)
        aside.index = call.index
        aside.finish(CallError(Fault.UNAVAILABLE, "The turn was sampled again."))
        self._calls.append(aside)
        call.index = self._num_prepared
        self._num_prepared += 1
        return aside

    def sampled(self, call: Call, prompt: IntArray, completion: IntArray) -> None:
        """The call's record is stored: from now on its tokens can be shared."""
        self.prefixes.insert(np.concatenate((prompt, completion)), call.index)

    def aborted(self, call: Call) -> None:
        """The call ended in an error of ours."""
        self.num_aborted += 1
        self._last_aborted = max(self._last_aborted, call.index)

    @property
    def ends_aborted(self) -> bool:
        """Whether the newest call is one that ended in an error of ours: after it the harness went on to nothing."""
        recorded = (call.index for call in self._calls if call.recorded is not None)
        return self._last_aborted > max(recorded, default=-1)

    def count_broken(self, turn: Message, reason: Broken) -> None:
        """A turn of a replayed history could not be grafted; however often it is replayed, it counts once."""
        if (key := hash(turn)) not in self._broken_turns:
            self._broken_turns.add(key)
            self.broken[reason] += 1

    def reply_begins(self) -> None:
        """A response is under way."""
        self._replies += 1

    def reply_ends(self) -> None:
        """It is out, or its client is gone."""
        self._replies -= 1
        self._quiet.set()

    @property
    def num_in_flight(self) -> int:
        """How many calls have no outcome yet, and how many prompts are being counted."""
        return len(self.in_flight) + self._num_counting

    @property
    def in_flight(self) -> tuple[Call, ...]:
        """The calls without an outcome."""
        return tuple(call for call in self._calls if not call.done.is_set())

    async def settle(self, timeout_s: float) -> None:
        """Takes no new call; lets those in flight finish for `timeout_s`, cuts the rest and awaits their records."""
        self.state = SessionState.SETTLING
        with anyio.move_on_after(timeout_s):
            for call in self.in_flight:
                await call.done.wait()
            await self._all_replied()
        late = self.in_flight
        for call in late:
            call.cut.set()
        for call in late:
            await call.done.wait()
        recorded = sorted((call for call in self._calls if call.recorded is not None), key=lambda call: call.index)
        self.entries = tuple(self._entry(call) for call in recorded)
        self.state = SessionState.SETTLED

    async def _all_replied(self) -> None:
        while self._replies:
            self._quiet = anyio.Event()
            await self._quiet.wait()

    def drop(self) -> None:
        """The slot is gone: nothing of this attempt will ever be used."""
        self.state = SessionState.SETTLED
        for call in self.in_flight:
            call.scope.cancel()

    def _entry(self, call: Call) -> CallEntry:
        cut = call.recorded is FinishReason.CUT
        return CallEntry(call_id=self.call_id(call.index), delivered=call.delivered_s is not None, cut=cut)
