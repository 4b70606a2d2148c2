"""OpenAI Chat Completions, as its clients speak it: request -> `Ask`, `Answer` -> response or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

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
STATUS = {
    Fault.INVALID: 400,
    Fault.OVERFLOW: 400,
    Fault.NOT_FOUND: 404,
    Fault.TOO_LARGE: 413,
    Fault.SETTLED: 503,
    Fault.UNAVAILABLE: 503,
}
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens",
    "frequency_penalty", "presence_penalty", "logprobs", "tool_choice", "parallel_tool_calls",
    "response_format", "reasoning_effort",
)  # fmt: skip
MAX_REQUESTED_CHARS = 1000  # of one value in a record, which must fit into a message of NATS whatever is asked for


class _Part(Struct):
    type: str
    text: str = ""
    refusal: str = ""


_Content = str | list[_Part] | None


class _Function(Struct):
    name: str
    arguments: str = ""


class _ToolCall(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _System(Struct, tag_field="role", tag="system"):
    content: _Content


class _Developer(Struct, tag_field="role", tag="developer"):
    content: _Content


class _User(Struct, tag_field="role", tag="user"):
    content: _Content


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: _Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Tool(Struct, tag_field="role", tag="tool"):
    content: _Content
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
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class Chat:
    """The dialect of POST /v1/chat/completions."""

    keepalive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in canonical form. CallError (INVALID) names the field that is wrong."""
        try:
            request = msgspec.convert(body, _Request)
        except msgspec.ValidationError as err:
            what, _, where = str(err).partition(" - at `$")
            raise CallError(Fault.INVALID, f"{what}.", where.strip("`.") or None) from err
        limit = _check(request)
        return Ask(
            model=request.model,
            messages=tuple(_message(message) for message in request.messages),
            tools=tuple(body.get("tools") or ()),
            tools_allowed=request.tool_choice != "none",
            max_tokens=limit,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            requested={key: _plain(body[key]) for key in SAMPLING if body.get(key) is not None},
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
        for delta in _deltas(answer):
            yield _event({**head, "choices": [_choice(delta, None)]})
        yield _event({**head, "choices": [_choice({}, _finish(answer))]})
        if ask.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(answer)})
        yield DONE

    def error(self, error: CallError) -> tuple[int, bytes]:
        """Status and error object."""
        return STATUS[error.fault], msgspec.json.encode(_error(error))

    def error_event(self, error: CallError) -> bytes:
        """The error object as an event; no [DONE] follows, so that no client takes the turn for complete."""
        return _event(_error(error))


def models(name: str) -> bytes:
    """The body of GET /v1/models: the policy is the only model."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "clawpipe"}
    return msgspec.json.encode({"object": "list", "data": [model]})


def _check(request: _Request) -> int | None:
    """What types cannot say; returns the token limit that was asked for."""
    if not request.messages:
        raise CallError(Fault.INVALID, "There must be at least one message.", "messages")
    if request.n not in (None, 1):
        raise CallError(Fault.INVALID, "Only n = 1 is supported.", "n")
    limit = request.max_completion_tokens
    limit = request.max_tokens if limit is None else limit
    if limit is not None and limit < 1:
        raise CallError(Fault.INVALID, "The token limit must be at least 1.", "max_tokens")
    return limit


def _message(message: _System | _Developer | _User | _Assistant | _Tool) -> Message:
    match message:
        case _System() | _Developer():
            return Message(Speaker.SYSTEM, (Text(_text(message.content)),))
        case _User():
            return Message(Speaker.USER, (Text(_text(message.content)),))
        case _Tool():
            return Message(Speaker.TOOL, (ToolResult(message.tool_call_id, _text(message.content)),))
        case _Assistant():
            return Message(Speaker.ASSISTANT, _blocks(message))


def _blocks(message: _Assistant) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if thinking := message.reasoning_content or message.reasoning:
        blocks.append(Thinking(thinking))
    if text := _text(message.content):
        blocks.append(Text(text))
    for call in message.tool_calls or ():
        blocks.append(ToolCall(call.id, call.function.name, call.function.arguments))
    return tuple(blocks)


def _text(content: _Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal"):
            raise CallError(Fault.INVALID, f"Content of type {part.type!r} is not supported.", "messages")
    return "\n".join(part.text or part.refusal for part in content)


def _plain(value: Any) -> Any:
    """A value that any record can hold: integers of 64 bits, everything composite as its JSON text, text cut off."""
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text[:MAX_REQUESTED_CHARS]


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


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error(error: CallError) -> dict[str, Any]:
    codes = {Fault.OVERFLOW: "context_length_exceeded", Fault.NOT_FOUND: "not_found"}
    kind = "server_error" if STATUS[error.fault] >= 500 else "invalid_request_error"
    body = {"message": error.message, "type": kind, "param": error.param, "code": codes.get(error.fault)}
    return {"error": body}
