"""OpenAI Chat Completions, as its clients speak it: request -> `Ask`, `Answer` -> response or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from clawpipe.actors.proxy.dialects.dialect import event, recorded
from clawpipe.actors.proxy.dialects.openai import STATUS, Content, convert, error_object, positive, text_of
from clawpipe.actors.proxy.messages import (
    Answer,
    Ask,
    Block,
    CallError,
    Fault,
    Head,
    Message,
    Speaker,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

DONE = b"data: [DONE]\n\n"
MAX_STOPS = 4
RECORDED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens",
    "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "tool_choice",
    "parallel_tool_calls", "response_format", "reasoning_effort", "verbosity",
)  # fmt: skip


class _Function(Struct):
    name: str
    arguments: str = ""


class _ToolCall(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _System(Struct, tag_field="role", tag="system"):
    content: Content


class _Developer(Struct, tag_field="role", tag="developer"):
    content: Content


class _User(Struct, tag_field="role", tag="user"):
    content: Content


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Tool(Struct, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str


class _Named(Struct):
    name: str


class _ToolObject(Struct):
    function: _Named
    type: Literal["function"]


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Request(Struct):
    messages: list[_System | _Developer | _User | _Assistant | _Tool]
    model: str = ""
    tools: list[_ToolObject] | None = None  # checked here; the template gets them as they were sent
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class Chat:
    """The dialect of POST /v1/chat/completions."""

    keepalive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in canonical form. CallError (INVALID) names the field that is wrong."""
        request = convert(body, _Request)
        _check(request)
        return Ask(
            model=request.model,
            messages=tuple(_message(message, f"messages[{n}].content") for n, message in enumerate(request.messages)),
            tools=tuple(body.get("tools") or ()),
            tools_allowed=request.tool_choice != "none",
            max_tokens=_limit(request),
            stop=_stops(request.stop),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            requested=recorded(body, RECORDED),
        )

    def whole(self, ask: Ask, answer: Answer) -> bytes:
        """The `chat.completion` object."""
        turn = answer.turn
        content = turn.text or (None if turn.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
        body = {**_head(ask, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
        return msgspec.json.encode(body)

    def opening(self, ask: Ask, head: Head) -> bytes:
        """Nothing: the first chunk says nothing that a client waits for."""
        return b""

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """`chat.completion.chunk` objects: role, reasoning, text, calls, finish reason, usage if asked for, end."""
        head = _head(ask, answer, "chat.completion.chunk")
        no_usage = {"usage": None} if ask.include_usage else {}
        for delta in _deltas(answer):
            yield event({**head, "choices": [_choice(delta, None)], **no_usage})
        yield event({**head, "choices": [_choice({}, _finish(answer))], **no_usage})
        if ask.include_usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield DONE

    def error(self, error: CallError) -> tuple[int, bytes]:
        """Status and error object."""
        return STATUS[error.fault], msgspec.json.encode({"error": error_object(error)})

    def error_event(self, error: CallError) -> bytes:
        """The error object as an event; no [DONE] follows, so that no client takes the turn for complete."""
        return event({"error": error_object(error)})


def _check(request: _Request) -> None:
    """What types cannot say."""
    if not request.messages:
        raise CallError(Fault.INVALID, "There must be at least one message.", "messages")
    if request.n not in (None, 1):
        raise CallError(Fault.INVALID, "Only n = 1 is supported.", "n")
    for field in ("functions", "function_call"):
        if getattr(request, field):
            raise CallError(Fault.INVALID, f"{field!r} is not supported; use 'tools' and 'tool_choice'.", field)


def _limit(request: _Request) -> int | None:
    """The token limit that was asked for; the newer of its two names counts first."""
    if request.max_completion_tokens is not None:
        return positive(request.max_completion_tokens, "max_completion_tokens")
    return positive(request.max_tokens, "max_tokens")


def _stops(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop texts; an empty one says nothing."""
    texts = (asked,) if isinstance(asked, str) else tuple(asked or ())
    if len(texts) > MAX_STOPS:
        raise CallError(Fault.INVALID, f"There may be at most {MAX_STOPS} stop texts, not {len(texts)}.", "stop")
    return tuple(text for text in texts if text)


def _message(message: _System | _Developer | _User | _Assistant | _Tool, where: str) -> Message:
    text = text_of(message.content, where)
    match message:
        case _System() | _Developer():
            return Message(Speaker.SYSTEM, (Text(text),))
        case _User():
            return Message(Speaker.USER, (Text(text),))
        case _Tool():
            return Message(Speaker.TOOL, (ToolResult(message.tool_call_id, text),))
        case _Assistant():
            return Message(Speaker.ASSISTANT, _blocks(message, text))


def _blocks(message: _Assistant, text: str) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if thinking := message.reasoning_content or message.reasoning:
        blocks.append(Thinking(thinking))
    if text:
        blocks.append(Text(text))
    for call in message.tool_calls or ():
        blocks.append(ToolCall(call.id, call.function.name, call.function.arguments))
    return tuple(blocks)


def _head(ask: Ask, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.head.id}",
        "object": kind,
        "created": int(answer.head.created_s),
        "model": ask.model,
        "system_fingerprint": None,
    }


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.head.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.head.prompt_tokens + answer.completion_tokens,
    }


def _finish(answer: Answer) -> str:
    if answer.turn.truncated:
        return "length"
    return "tool_calls" if answer.turn.calls else "stop"


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if answer.turn.thinking:
        yield {"reasoning_content": answer.turn.thinking}
    if answer.turn.text:
        yield {"content": answer.turn.text}
    for index, call in enumerate(answer.turn.calls):
        opened = _call(ToolCall(call.id, call.name, ""))
        yield {"tool_calls": [{"index": index, **opened}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}


def _choice(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
