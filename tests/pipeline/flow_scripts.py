"""A flow without a service: its records, requests and learner's messages in a line each; records that are bad."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec
from pipeline_scripts import configuration, entry

from clawpipe.pipeline import entries
from clawpipe.pipeline.books import Totals
from clawpipe.pipeline.entries import Entry
from clawpipe.pipeline.flow import Flow, Order
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    CallRecord,
    DeadLetter,
    Flaw,
    RolloutManifest,
    Stepped,
    encode,
    float_bytes,
    int_bytes,
)
from clawpipe.pipeline.report import summed

TASKS = [f"filing/{n}" for n in range(3)]

Message = Callable[[int], Entry]  # of the stream: its sequence -> what is read


def make_flow(leaf_caps=None, **tables):
    flow = configuration(**tables)
    return Flow(flow, TASKS, Ledger(), EventLog("pipeline"), uuid.uuid4().hex, leaf_caps)


class Stream:
    """Feeds records or messages to a flow with sequences of its own; keeps the dead letters."""

    def __init__(self, flow):
        self.flow = flow
        self.sequence = 0
        self.letters: list[DeadLetter] = []

    def __call__(self, *records, now=0.0):
        for record in records:
            self.sequence += 1
            message = record if callable(record) else good(record)
            self.flow.record(message(self.sequence), now)
            self.letters += self.flow.dead_letters
            self.flow.dead_letters.clear()

    @property
    def flaws(self):
        return [(letter.flaw.value, letter.message_id, letter.sequence) for letter in self.letters]


def started(flow):
    requests = flow.requests(0.0)
    for request in requests:
        flow.requested(request)
    return requests


def lease(flow, version=0):
    reply = flow.lease(version)
    if isinstance(reply, Order):
        return flow.leased(flow.recipe.build(reply.batch_id, reply.version, reply.groups))
    return reply


def step(flow, ready, **changes):
    message = Stepped(batch_id=ready.batch_id, version=flow.version + 1, updates=flow.updates + 1, metrics={})
    flow.stepped(msgspec.structs.replace(message, **changes), 0.0)


def totals(flow) -> Totals:
    return summed(flow.ledger.totals().values())


def _place(record):
    kind = "call" if isinstance(record, CallRecord) else "manifest"
    name = record.call_id if isinstance(record, CallRecord) else f"{record.rollout_id}.a{record.attempt}.manifest"
    return f"clawpipe.records.{kind}.{record.rollout_id}", name


def good(record: CallRecord | RolloutManifest) -> Message:
    return lambda sequence: entry(sequence, record)


def cut_short(record) -> Message:
    subject, name = _place(record)
    return lambda sequence: entries.read(sequence, subject, name, encode(record)[:-7])


def without_blob(record) -> Message:
    subject, name = _place(record)
    return lambda sequence: entries.bad(sequence, f"{subject}.claim", name, b"", Flaw.MISSING_BLOB, "it is gone")


def garbage(rollout_id) -> Message:
    return lambda sequence: entries.read(sequence, f"clawpipe.records.call.{rollout_id}", "", b"\xc1")


def newer(record):
    return msgspec.structs.replace(record, schema=2)


def unsound(record):
    if isinstance(record, RolloutManifest):
        return msgspec.structs.replace(record, calls=(*record.calls, record.calls[0]))
    return msgspec.structs.replace(record, logprobs=record.logprobs[:-4])


def orphaned(record):
    parent = f"{record.rollout_id}.a{record.attempt}.c99"
    whole = record.parent_tokens or 1
    delta = record.prompt_delta[4 * (whole - record.parent_tokens) :]
    return msgspec.structs.replace(record, parent=parent, parent_tokens=whole, prompt_delta=delta)


def altered(record):
    """The same call with one token more."""
    return msgspec.structs.replace(
        record,
        completion_ids=record.completion_ids + int_bytes([7]),
        logprobs=record.logprobs + float_bytes([-1.0]),
        versions=(msgspec.structs.replace(record.versions[0], end=record.versions[0].end + 1),),
    )


def reasons(flow):
    return {row.rollout_id: row.reason for row in flow.ledger.rows.values() if row.reason}
