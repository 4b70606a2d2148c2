"""Writes down every call before its answer leaves: no reply without a record."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from msgspec import Struct

from clawpipe.actors.proxy.graft import Broken
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.upstream import Sampled
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.records import CallRecord, IntArray, Role, float_bytes, int_bytes


class Prompt(Struct, frozen=True, kw_only=True):
    """A call's prompt in tokens, with what the record says about it."""

    ids: IntArray  # int32 [P]
    max_tokens: int
    role: Role
    broken: Broken | None = None  # why the first turn that could not be grafted was not
    requested: dict[str, Any] = {}
    started_s: float = 0.0


class Recorder:
    """Stores call records in JetStream. A record has the call's id as its message id: twice stored is once."""

    def __init__(self, broker: Broker, timeout_s: float) -> None:
        self._broker = broker
        self._timeout_s = timeout_s

    async def store(self, session: Session, call: Call, prompt: Prompt, sampled: Sampled, *, malformed: bool) -> None:
        """Returns when the record is safe. BrokerError when it was not within the time for publishing."""
        record = delta_record(session, call, prompt, sampled, malformed=malformed)
        await self._broker.publish_call(record, self._timeout_s)
        call.recorded = sampled.finish_reason


def delta_record(session: Session, call: Call, prompt: Prompt, sampled: Sampled, *, malformed: bool) -> CallRecord:
    """The record: the prompt is what it shares with the call it shares most with, and the rest in full."""
    parent, shared = session.prefixes.longest(prompt.ids)
    assert len(sampled.ids) == len(sampled.logprobs)
    return CallRecord(
        rollout_id=session.rollout_id,
        attempt=session.attempt,
        call_id=session.call_id(call.index),
        index=call.index,
        parent=None if parent is None else session.call_id(parent),
        parent_tokens=shared,
        prompt_delta=int_bytes(prompt.ids[shared:]),
        prompt_tokens=len(prompt.ids),
        completion_ids=int_bytes(sampled.ids),
        logprobs=float_bytes(np.asarray(sampled.logprobs)),
        versions=sampled.versions,
        finish_reason=sampled.finish_reason,
        role=prompt.role,
        harness=session.harness,
        digest=call.digest,
        graft_broken=None if prompt.broken is None else prompt.broken.value,
        malformed_tool_call=malformed,
        requested=prompt.requested,
        started_s=prompt.started_s,
        ended_s=time.time(),
    )
