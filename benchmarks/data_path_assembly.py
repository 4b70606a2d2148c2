"""Assembling alone, from the bytes of the messages to closed rollouts: its cost, and the naive reference's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from data_path_load import Conversation, Load, conversations
from data_path_naive import Kind, bodies, merged, same

from clawpipe.pipeline import entries
from clawpipe.pipeline.assembler import Assembler, Rollout
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.records import encode

LEAF_CAP = 10_000  # longer conversations have more retries, and none is to be dropped
TRIES = 5  # the cheapest counts: it is the one that was disturbed least

KINDS: tuple[Kind, ...] = (list[int], bytes)

Message = tuple[str, str, bytes]  # subject, message id, body


@dataclass(frozen=True, slots=True)
class Naives:
    """What the same rollouts cost: seconds of processor time."""

    ours_s: float
    lists_s: float
    bytes_s: float
    whole_bytes: int  # of the messages with whole prompts


def costs_s(loads: Sequence[Load]) -> list[float]:
    """By load, seconds of processor time per rollout, when all of its rollouts come at the same time.

    The loads take turns, so that what disturbs disturbs all.
    """
    streams = [_in_turns(load) for load in loads]
    rounds = [[_timed(partial(_assemble, stream)) for stream in streams] for _ in range(TRIES)]
    cheapest = [min(tries) for tries in zip(*rounds, strict=True)]
    return [spent / load.rollouts for spent, load in zip(cheapest, loads, strict=True)]


def _in_turns(load: Load) -> list[Message]:
    """The first message of each rollout, the second of each, and so on."""
    talks = [_messages(talk) for talk in conversations(load, load.requests())]
    return [message for turn in zip(*talks, strict=True) for message in turn]


def against_naive(load: Load) -> Naives:
    """Both references and we, one rollout after the other. AssertionError when they do not keep the same."""
    one_by_one = [_against_naive(talk) for talk in conversations(load, load.requests())]
    return Naives(
        ours_s=sum(each.ours_s for each in one_by_one),
        lists_s=sum(each.lists_s for each in one_by_one),
        bytes_s=sum(each.bytes_s for each in one_by_one),
        whole_bytes=sum(each.whole_bytes for each in one_by_one),
    )


def _against_naive(talk: Conversation) -> Naives:
    messages = _messages(talk)
    lists, as_bytes = (list(bodies(talk, kind)) for kind in KINDS)
    _compare(talk, messages, lists, as_bytes)
    return Naives(
        ours_s=min(_timed(lambda: _assemble(messages)) for _ in range(TRIES)),
        lists_s=_timed(lambda: merged(lists, talk.manifest, list[int])),
        bytes_s=min(_timed(lambda: merged(as_bytes, talk.manifest, bytes)) for _ in range(TRIES)),
        whole_bytes=sum(len(body) for body in as_bytes),
    )


def _compare(talk: Conversation, messages: Iterable[Message], *naive: Iterable[bytes]) -> None:
    [rollout] = _assemble(messages)
    for kind, calls in zip(KINDS, naive, strict=True):
        theirs = merged(calls, talk.manifest, kind)
        assert same(rollout.branches, theirs), f"{rollout.rollout_id}: naive merging keeps other tokens"


def _messages(talk: Conversation) -> list[Message]:
    """As they are in the stream."""
    rollout_id = talk.manifest.rollout_id
    calls = [(f"clawpipe.records.call.{rollout_id}", call.call_id, encode(call)) for call in talk.calls]
    return [*calls, (f"clawpipe.records.manifest.{rollout_id}", f"{rollout_id}.a1.manifest", encode(talk.manifest))]


def _assemble(messages: Iterable[Message]) -> list[Rollout]:
    """Reads every message, as the broker does, and adds it, as the flow does. All rollouts are closed and kept."""
    assembler = Assembler(close_timeout_s=60.0, leaf_caps=LeafCaps(LEAF_CAP), auxiliary=False)
    closed = []
    for sequence, (subject, message_id, body) in enumerate(messages, 1):
        record = entries.read(sequence, subject, message_id, body).record
        assert record is not None
        rollout = assembler.add(record, 0.0).rollout
        if rollout is not None:
            assert rollout.dropped is None, f"{rollout.rollout_id}: {rollout.dropped} {rollout.detail}"
            closed.append(rollout)
    return closed


def _timed(work: Callable[[], object]) -> float:
    """Seconds of processor time; what it gives is thrown away outside the time."""
    gc.collect()
    began = time.process_time()
    done = work()
    spent = time.process_time() - began
    del done
    return spent
