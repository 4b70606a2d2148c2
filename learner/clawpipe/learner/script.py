"""What the learner does, in order: rank 0's script over the commands that all ranks carry out together.

The script talks to the pipeline service and yields one `Command` at a time; it is sent back what the command
gave. It holds the numbers - version, updates, cursor - and no tensors, so that it reads as the protocol does:
Hello, then lease, train, push, report, and now and then a checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from clawpipe.learner.conversation import ASK_TIMEOUT_S, Conversation
from clawpipe.pipeline.errors import BrokerError, LearnerError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    LEARNER_SECONDS,
    BatchReady,
    Committed,
    Finished,
    Stepped,
    StreamCursor,
    WeightVersion,
)

PATIENCE_S = 60.0  # the other ranks hear from rank 0 at least this often
LAST_WORDS_TIMEOUT_S = 5.0  # when told to stop, the pipeline service may be gone


class Stage(Struct, frozen=True, kw_only=True, tag="stage"):
    """Export the weights under this number. Gives a WeightVersion."""

    version: int


class Train(Struct, frozen=True, kw_only=True, tag="train"):
    """One update on this batch, by weights of `version` after so many `updates`. Gives a Trained."""

    version: int
    updates: int
    body: bytes


class Save(Struct, frozen=True, kw_only=True, tag="save"):
    """Write a checkpoint. Gives its path."""

    version: int
    updates: int
    cursor: StreamCursor


class Wait(Struct, frozen=True, kw_only=True, tag="wait"):
    """Nothing yet. Gives None."""


class Stop(Struct, frozen=True, kw_only=True, tag="stop"):
    """The end."""


Command = Stage | Train | Save | Wait | Stop


class Trained(Struct, frozen=True, kw_only=True):
    """What an update did."""

    num_steps: int = 0  # of the policy: none, and its version stays
    num_value_steps: int = 0
    num_nonfinite: int = 0
    metrics: dict[str, float] = {}
    masked_tokens: dict[str, int] = {}
    refused: str = ""  # the batch broke a rule: nothing was done

    @property
    def learned(self) -> bool:
        """Whether any weights moved: while the value model is pre-trained, its own alone."""
        return self.num_steps + self.num_value_steps > 0


@dataclass
class Position:
    """Where training stands."""

    version: int  # number of the weights as they are now
    updates: int  # batches that were learned from, by the value model alone too, or held nothing to learn from
    cursor: StreamCursor
    saved_updates: int | None = None  # of the newest checkpoint that this process wrote
    saved_path: str = ""  # of the newest checkpoint; empty: there is none
    good_path: str = ""  # of the newest one after which a step was made: its weights give a finite gradient


@dataclass
class Script:
    """See the module. `run` is the generator of commands."""

    conversation: Conversation
    position: Position
    push_every: int  # steps
    checkpoint_every: int  # updates
    max_nonfinite_in_row: int
    stop: Callable[[], bool]
    log: EventLog
    seconds: dict[str, float] = field(default_factory=dict)  # since the last report, by what they went into
    unpushed: int = 0  # steps since the last push
    nonfinite_in_row: int = 0

    def run(self) -> Generator[Command, Any, None]:
        """From Hello to the last checkpoint. LearnerError after too many updates without a finite gradient."""
        at = self.position
        self.conversation.hello(version=at.version, updates=at.updates, cursor=at.cursor)
        yield from self._push()
        while not self.stop():
            with self._timed("wait_s"):
                ready = self.conversation.lease(at.version, stop=self.stop, patience_s=PATIENCE_S)
            if isinstance(ready, Finished):
                break
            if ready is None:
                yield Wait()
                continue
            yield from self._update(ready)
            # Weights that give no finite gradient are not saved again, over those that do.
            if at.updates % self.checkpoint_every == 0 and not self.nonfinite_in_row:
                yield from self._checkpoint()
        try:
            yield from self._checkpoint(LAST_WORDS_TIMEOUT_S if self.stop() else ASK_TIMEOUT_S)
        except BrokerError as err:
            if not self.stop():
                raise
            self.log.warning("stopped without a last checkpoint", reason=str(err))

    def _update(self, ready: BatchReady) -> Generator[Command, Any, None]:
        at = self.position
        with self._timed("fetch_s"):
            body = self.conversation.fetch(ready)
        with self._timed("train_s"):
            train = Train(version=at.version, updates=at.updates, body=body)
            trained: Trained = (yield train) if _intact(ready, body) else _DAMAGED
        self._check(trained)
        if trained.learned or not (trained.refused or trained.num_nonfinite):
            at.updates += 1
        if trained.learned:
            at.good_path = at.saved_path
        if trained.num_steps:
            at.version += 1
            self.unpushed += 1
            if self.unpushed == self.push_every:
                yield from self._push()
        metrics = {**trained.metrics, **self.seconds}
        self.seconds = {}
        self.conversation.stepped(
            Stepped(
                batch_id=ready.batch_id,
                version=at.version,
                updates=at.updates,
                metrics=metrics,
                masked_tokens=trained.masked_tokens,
                refused=trained.refused,
            )
        )
        self._note(ready, trained, metrics)

    def _push(self) -> Generator[Command, Any, None]:
        with self._timed("push_s"):
            weights: WeightVersion = yield Stage(version=self.position.version)
            self.conversation.publish(weights)
        self.unpushed = 0

    def _checkpoint(self, timeout_s: float = ASK_TIMEOUT_S) -> Generator[Command, Any, None]:
        at = self.position
        if at.saved_updates == at.updates:
            return
        with self._timed("checkpoint_s"):
            cursor = self.conversation.cursor(timeout_s)
            path: str = yield Save(version=at.version, updates=at.updates, cursor=cursor)
            at.cursor, at.saved_updates, at.saved_path = cursor, at.updates, path
            done = Committed(version=at.version, updates=at.updates, cursor=cursor, path=path)
            self.conversation.committed(done, timeout_s)
        self.log.info("checkpoint written", version=at.version, updates=at.updates, path=path)

    def _check(self, trained: Trained) -> None:
        """Counts updates whose gradient was never finite; too many in a row mean that training is broken.

        What had no gradient at all, a refused batch for one, neither counts nor ends the row.
        """
        if trained.learned:
            self.nonfinite_in_row = 0
        elif trained.num_nonfinite:
            self.nonfinite_in_row += 1
        if self.nonfinite_in_row == self.max_nonfinite_in_row:
            raise LearnerError(
                f"the gradient was not finite in {self.nonfinite_in_row} updates in a row at version "
                f"{self.position.version}; {_way_on(self.position)}"
            )

    def _note(self, ready: BatchReady, trained: Trained, metrics: dict[str, float]) -> None:
        at = self.position
        if trained.refused:
            self.log.warning("batch refused", batch=ready.batch_id, reason=trained.refused)
            return
        shown = ("reward_mean", "loss", "value_loss", "grad_norm", "lr", "k1", "ess", "num_entries", *LEARNER_SECONDS)
        fields = {name: round(metrics[name], 6) for name in shown if name in metrics}
        self.log.info("update", batch=ready.batch_id, version=at.version, updates=at.updates, **fields)

    @contextmanager
    def _timed(self, name: str) -> Generator[None, None, None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def _way_on(at: Position) -> str:
    """What to do about weights that give no finite gradient."""
    change = "with a lower [learner] lr or clip_grad"
    if not at.saved_path:
        return f"there is no checkpoint yet: start again {change}"
    if at.good_path == at.saved_path:
        return f"the last good checkpoint, {at.good_path}, is kept: go on from it with --resume, {change}"
    before = f"the last good one, {at.good_path}" if at.good_path else "the one before, if there is one"
    return f"the newest checkpoint, {at.saved_path}, holds these weights: remove it to --resume from {before}, {change}"


_DAMAGED = Trained(refused="the body does not match its digest: it was damaged, or another batch came in its place")


def _intact(ready: BatchReady, body: bytes) -> bool:
    return hashlib.blake2b(body).hexdigest() == ready.digest
