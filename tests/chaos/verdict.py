"""What the kill matrix holds against a run: the stream, the engine's answers and the learner's checkpoints, read
plainly. Nothing here uses the code that keeps the run's own books; they are one more witness.

A rollout is settled when a manifest of it is in the stream, graded when that manifest has a reward. Each of these is
in the learner's last checkpoint, or ended in the books for a good reason, or waits: a run that is resumed from the
checkpoint's cursor reads it again.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats
import numpy as np
from nats.js.errors import NotFoundError

from chaos.learner_program import Checkpoint

GRADED = ("scored", "timed_out", "agent_failed")
STORED = re.compile(r'"event": "rollout closed", "rollout": "([^"]+)", "attempt": (\d+),')
GOOD_REASONS = ("stale",)  # all that may keep a graded rollout of the agentloop from being trained


@dataclass(frozen=True)
class Message:
    """One message of the record stream."""

    sequence: int
    kind: str  # call or manifest
    body: dict[str, Any]


@dataclass
class Found:
    """A rollout as the stream has it."""

    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # by id
    settled: int | None = None  # sequence of its first manifest
    listed: tuple[str, ...] = ()  # the calls that this manifest names
    attempts: set[int] = field(default_factory=set)  # that have a manifest
    graded: bool = False


@dataclass(frozen=True)
class Entry:
    """A rollout as the run's books have it."""

    state: str
    reason: str


async def read_stream(url: str, token: str, prefix: str) -> list[Message]:
    """Every message of the record stream, one by one from the first, over a connection of its own."""
    client = await nats.connect(url, token=token)
    try:
        stream = client.jetstream()
        last = (await stream.stream_info(f"{prefix}-RECORDS")).state.last_seq
        return [await _message(stream, f"{prefix}-RECORDS", sequence) for sequence in range(1, last + 1)]
    except NotFoundError as err:
        raise AssertionError("a record is gone: raise [nats] keep_records_bytes") from err
    finally:
        await client.close()


async def _message(stream: Any, name: str, sequence: int) -> Message:
    raw = await stream.get_msg(name, sequence)
    return Message(sequence, raw.subject.split(".")[2], msgspec.msgpack.decode(raw.data))


def read_books(path: Path) -> dict[str, Entry]:
    """State and reason of every rollout in ledger.sqlite."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as books:
        rows = books.execute("SELECT rollout_id, state, reason FROM rollouts").fetchall()
    books.close()
    return {rollout_id: Entry(state, reason or "") for rollout_id, state, reason in rows}


def rollouts(messages: Sequence[Message]) -> dict[str, Found]:
    """The stream by rollout; of records that came twice the first one counts, as for everybody who reads it."""
    found: dict[str, Found] = {}
    for message in messages:
        rollout = found.setdefault(message.body["rollout_id"], Found())
        if message.kind == "call":
            rollout.calls.setdefault(message.body["call_id"], message.body)
            continue
        rollout.attempts.add(message.body["attempt"])
        if rollout.settled is None:
            rollout.settled = message.sequence
            rollout.listed = tuple(entry["call_id"] for entry in message.body["calls"])
            rollout.graded = message.body["outcome"]["type"] in GRADED
    return found


def against_learning(
    found: Mapping[str, Found], checkpoints: Sequence[Checkpoint], books: Mapping[str, Entry]
) -> Iterator[str]:
    """Lost, or trained twice: in the last checkpoint, and for a run that would be resumed from any of them."""
    graded = {rollout_id for rollout_id, rollout in found.items() if rollout.graded}
    for checkpoint in checkpoints:
        name = f"checkpoint v{checkpoint.version} (update {checkpoint.updates})"
        trained, done = set(checkpoint.trained), set(checkpoint.cursor.done)
        for rollout_id, times in Counter(checkpoint.trained).items():
            if times > 1:
                yield f"{name}: {rollout_id} is trained {times} times"
        for rollout_id in sorted(trained - graded):
            yield f"{name}: {rollout_id} is trained, and never was settled and graded"
        for rollout_id in sorted(graded):
            settled = found[rollout_id].settled
            assert settled is not None
            is_over = rollout_id in done or settled < checkpoint.cursor.sequence
            if rollout_id in trained and not is_over:
                yield f"{name}: {rollout_id} is trained, and a resumed run would train it again"
            if is_over and rollout_id not in trained and not _ended_well(books.get(rollout_id)):
                yield f"{name}: {rollout_id} is lost: a resumed run would not read it; books: {books.get(rollout_id)}"


def _ended_well(entry: Entry | None) -> bool:
    return entry is not None and entry.state == "dropped" and entry.reason in GOOD_REASONS


def against_books(found: Mapping[str, Found], last: Checkpoint, books: Mapping[str, Entry]) -> Iterator[str]:
    """The run's own books against what the learner holds."""
    trained = set(last.trained)
    for rollout_id, entry in sorted(books.items()):
        if (entry.state == "trained") is not (rollout_id in trained):
            holds = "holds" if rollout_id in trained else "does not hold"
            yield f"the books say that {rollout_id} is {entry.state}, and the learner {holds} it"
        if entry.state == "dropped" and found.get(rollout_id, Found()).graded and not _ended_well(entry):
            yield f"{rollout_id} was graded, and dropped as {entry.reason}"
        if entry.reason == "lost":
            yield f"{rollout_id} was lost"
    for rollout_id in sorted(trained - books.keys()):
        yield f"the books do not know {rollout_id}, which is trained"


def against_broker(found: Mapping[str, Found], proxy_log: Path) -> Iterator[str]:
    """What the broker has acknowledged is there: every manifest that the proxy says is stored, and all its calls."""
    for rollout_id, attempt in STORED.findall(proxy_log.read_text()):
        if int(attempt) not in found.get(rollout_id, Found()).attempts:
            yield f"the manifest of {rollout_id}, attempt {attempt}, was stored, and is gone"
    for rollout_id, rollout in found.items():
        for call_id in rollout.listed:
            if call_id not in rollout.calls:
                yield f"{call_id} is named in the manifest of {rollout_id}, and is gone"


def against_records(found: Mapping[str, Found], answers: Path) -> Iterator[str]:
    """Every recorded call is what the engine said, to what the engine saw: nothing is mixed of two attempts."""
    said: dict[str, list[tuple[list[int], list[int]]]] = {}
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        call_id = answer["request_id"].rpartition(".t")[0]
        said.setdefault(call_id, []).append((answer["prompt"], answer["ids"]))
    for rollout in found.values():
        for call_id, call in rollout.calls.items():
            context = _prompt(rollout, call)
            if context is None:
                yield f"{call_id}: its parent {call['parent']} is not in the stream"
            elif (context, _ints(call["completion_ids"])) not in said.get(call_id, []):
                yield f"{call_id}: the engine never said this to that prompt"


def _prompt(rollout: Found, call: Mapping[str, Any]) -> list[int] | None:
    """The whole prompt, the parents' tokens included."""
    if call["parent"] is None:
        return _ints(call["prompt_delta"])
    parent = rollout.calls.get(call["parent"])
    before = None if parent is None else _prompt(rollout, parent)
    if parent is None or before is None:
        return None
    whole = [*before, *_ints(parent["completion_ids"])]
    return [*whole[: call["parent_tokens"]], *_ints(call["prompt_delta"])]


def _ints(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return found
