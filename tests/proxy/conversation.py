"""A rollout's calls without sockets: what a harness asks in Chat Completions, and the records that come of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.messages import Answer, Ask
from clawpipe.actors.proxy.render import Renderer
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import CallRecord, Role, ints
from clawpipe.pipeline.segments import Selection, select
from clawpipe.pipeline.tree import build, resolve

USER = {"role": "user", "content": "go"}
EXEC = {
    "type": "function",
    "function": {
        "name": "exec",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}


class Stream:
    """A broker that keeps what is published."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    async def publish_call(self, record: CallRecord, timeout_s: float) -> None:
        self.records.append(record)


@dataclass
class Talk:
    """One rollout's conversation with the proxy."""

    calls: Calls
    session: Session
    stream: Stream
    tools: list[dict[str, Any]] = field(default_factory=lambda: [EXEC])

    async def call(self, *messages: dict[str, Any], **fields: Any) -> tuple[Ask, Call]:
        """A call that has its outcome."""
        body = {"model": "m", "messages": list(messages), "tools": self.tools, **fields}
        ask = Chat().read(body)
        call = await self.calls.start(self.session, ask, ModelCall(path="", headers={}, body=body))
        await call.done.wait()
        return ask, call

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The assistant's message, as the harness gets it and as it would replay it."""
        ask, call = await self.call(*messages, **fields)
        assert isinstance(call.outcome, Answer), call.outcome
        return json.loads(Chat().whole(ask, call.outcome))["choices"][0]["message"]

    def prompt(self, number: int) -> list[int]:
        """A call's prompt as a reader of the records rebuilds it."""
        made = {call.index: call for call in resolve(self.stream.records)}[number]
        before: list[int] = []
        if made.parent is not None:
            before = self.prompt(made.parent.index) + made.parent.completion.tolist()
        return before[: made.parent_tokens] + made.delta.tolist()

    def completion(self, number: int) -> list[int]:
        return next(ints(r.completion_ids).tolist() for r in self.stream.records if r.index == number)

    def broken(self) -> list[str | None]:
        return [record.graft_broken for record in self.stream.records]

    def selection(self, *undelivered: int) -> Selection:
        """What would be trained, when the harness got every answer but those of the calls given."""
        delivered = {r.call_id for r in self.stream.records if r.index not in undelivered}
        return select(build(resolve(self.stream.records)), leaf_cap=16, delivered=delivered)


@asynccontextmanager
async def conversation(
    renderer: Renderer, parser: Any, sampler: Any, *, keep_thinking: bool = True, encoder: Any = None, **limits: Any
) -> AsyncIterator[Talk]:
    stream = Stream()
    async with anyio.create_task_group() as group:
        calls = Calls(
            renderer=renderer,
            encoder=encoder or Encoder(renderer.tokenizer, end_of_turn=renderer.end_of_turn),
            parser=parser,
            sampler=sampler,
            recorder=Recorder(stream, 1.0),
            limits=Limits(
                **{"context_tokens": 10**6, "max_completion_tokens": 4096, "retry_window_s": 0.0, **limits},
            ),
            group=group,
            log=EventLog("proxy"),
            keep_thinking=keep_thinking,
        )
        yield Talk(calls, Session("r", 1, "agentloop", lambda wire: Role.MAIN), stream)


def replayed_call(call: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A call of an answer as it comes back, with what the harness changed of its function."""
    return {**call, "function": {**call["function"], **changed}}


def result(call: dict[str, Any], content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}
