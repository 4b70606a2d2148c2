"""OpenAI Responses, as its clients speak it: request -> `Ask`, `Answer` -> Response object or events.

An assistant's turn is several items here (reasoning, text, calls); those that stand together are one turn. The
history always comes with the request: nothing is stored, so nothing can be referred to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from clawpipe.actors.proxy.dialects import response_events, response_tools
from clawpipe.actors.proxy.dialects.dialect import recorded
from clawpipe.actors.proxy.dialects.openai import STATUS, Content, Part, convert, error_object, positive, text_of
from clawpipe.actors.proxy.dialects.response_events import DEFAULTS, ResponsesAsk
from clawpipe.actors.proxy.dialects.response_tools import Declared, ToolName, declared
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

RECORDED = (
    "temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls", "max_tool_calls", "reasoning",
    "text", "truncation", "top_logprobs", "service_tier", "stop",
)  # fmt: skip
STATE = ("previous_response_id", "conversation", "prompt")
SEALED = "reasoning.encrypted_content"


class _Message(Struct, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class _Reasoning(Struct, tag_field="type", tag="reasoning"):
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


class _FunctionCall(Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CustomCall(Struct, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _SearchCall(Struct, tag_field="type", tag="tool_search_call"):
    arguments: dict[str, Any]
    call_id: str | None = None


class _ShellCall(Struct, tag_field="type", tag="local_shell_call"):
    action: dict[str, Any]
    call_id: str | None = None
    id: str | None = None


class _FunctionOutput(Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[Part]


class _CustomOutput(Struct, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: str | list[Part]


class _ShellOutput(Struct, tag_field="type", tag="local_shell_call_output"):
    id: str
    output: str


class _SearchOutput(Struct, tag_field="type", tag="tool_search_output"):
    tools: list[dict[str, Any]]
    call_id: str | None = None


class _AgentPart(Struct):
    type: Literal["input_text", "encrypted_content"]
    text: str = ""
    encrypted_content: str = ""  # in the clear: it is what another agent's model wrote, which nobody encrypted


class _AgentMessage(Struct, tag_field="type", tag="agent_message"):
    content: list[_AgentPart]


class _MoreTools(Struct, tag_field="type", tag="additional_tools"):
    tools: list[dict[str, Any]]


class _Reference(Struct, tag_field="type", tag="item_reference"):
    id: str


_Said = _Reasoning | _FunctionCall | _CustomCall | _SearchCall | _ShellCall
_Heard = _FunctionOutput | _CustomOutput | _ShellOutput | _SearchOutput | _AgentMessage
_Item = _Message | _Said | _Heard | _MoreTools | _Reference


class _Request(Struct):
    input: str | list[_Item] | None = None
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class Responses:
    """The dialect of POST /v1/responses."""

    keepalive = response_events.KEEPALIVE

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in canonical form. CallError (INVALID) names the field that is wrong."""
        request = convert({**body, "input": _typed(body.get("input"))}, _Request)
        _check(request)
        items = [] if isinstance(request.input, str) or request.input is None else request.input
        tools = list(_tools(request, items))
        return ResponsesAsk(
            model=request.model,
            messages=tuple(_messages(request, items)),
            tools=tuple(tool.function for tool in tools),
            tools_allowed=request.tool_choice != "none",
            max_tokens=positive(request.max_output_tokens, "max_output_tokens"),
            stream=bool(request.stream),
            requested=recorded(body, RECORDED),
            names=response_tools.by_flat_name([*tools, *_found(items)]),
            seal_thinking=SEALED in (request.include or ()),
            echo={key: Raw(msgspec.json.encode(body[key])) for key in DEFAULTS if body.get(key) is not None},
        )

    def whole(self, ask: Ask, answer: Answer) -> bytes:
        """The Response object."""
        return msgspec.json.encode(response_events.whole(_own(ask), answer))

    def opening(self, ask: Ask, head: Head) -> bytes:
        """`response.created` and `response.in_progress`."""
        return response_events.opening(_own(ask), head)

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """The items' events, and the end."""
        return response_events.events(_own(ask), answer)

    def error(self, error: CallError) -> tuple[int, bytes]:
        """Status and error object."""
        return STATUS[error.fault], msgspec.json.encode({"error": error_object(_here(error))})

    def error_event(self, error: CallError) -> bytes:
        """The `error` event; without a finished response no client takes the turn for complete."""
        return response_events.failed(_here(error))


def _own(ask: Ask) -> ResponsesAsk:
    assert isinstance(ask, ResponsesAsk)
    return ask


def _here(error: CallError) -> CallError:
    """The error in this protocol's words: what the rest of the proxy calls messages is the input."""
    return CallError(error.fault, error.message, "input") if error.param == "messages" else error


def _typed(items: Any) -> Any:
    """An item without a type is a message."""
    if not isinstance(items, list):
        return items
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]


def _check(request: _Request) -> None:
    """What types cannot say."""
    for field in STATE:
        if getattr(request, field) is not None:
            message = f"{field!r} is not supported: no state is kept here. Send the whole conversation as 'input'."
            raise CallError(Fault.INVALID, message, field)
    if request.background:
        raise CallError(Fault.INVALID, "Background responses are not supported.", "background")
    if request.input is None or request.input == []:
        raise CallError(Fault.INVALID, "There must be an input.", "input")


def _tools(request: _Request, items: Sequence[_Item]) -> Iterator[Declared]:
    """The tools that the request declares, in the field of that name or in items."""
    yield from declared(request.tools or (), "tools")
    for number, item in enumerate(items):
        if isinstance(item, _MoreTools):
            yield from declared(item.tools, f"input[{number}].tools")


def _found(items: Sequence[_Item]) -> Iterator[Declared]:
    """Tools that searches have found: the model may call them, and knows them from the searches' results alone."""
    for number, item in enumerate(items):
        if isinstance(item, _SearchOutput):
            yield from declared(item.tools, f"input[{number}].tools")


def _messages(request: _Request, items: Sequence[_Item]) -> Iterator[Message]:
    """Consecutive items of the assistant are one message: two turns always have an output or a user between them."""
    if request.instructions:
        yield Message(Speaker.SYSTEM, (Text(request.instructions),))
    if isinstance(request.input, str):
        yield Message(Speaker.USER, (Text(request.input),))
    turn: list[Block] | None = None  # an empty list is a turn too: the model may have said nothing
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if isinstance(item, _Said) or (isinstance(item, _Message) and item.role == "assistant"):
            turn = [] if turn is None else turn
            turn.extend(_said(item, where))
        elif not isinstance(item, _MoreTools):
            if turn is not None:
                yield Message(Speaker.ASSISTANT, tuple(turn))
            turn = None
            yield _heard(item, where)
    if turn is not None:
        yield Message(Speaker.ASSISTANT, tuple(turn))


def _said(item: _Said | _Message, where: str) -> Iterator[Block]:
    """What the assistant said or did in one item."""
    match item:
        case _Message():
            if text := text_of(item.content, f"{where}.content"):
                yield Text(text)
        case _Reasoning():
            if thinking := _thinking(item, where):
                yield Thinking(thinking)
        case _FunctionCall():
            yield ToolCall(item.call_id, ToolName(item.name, item.namespace).flat, item.arguments)
        case _CustomCall():
            name = ToolName(item.name, item.namespace).flat
            yield ToolCall(item.call_id, name, response_tools.free_text(item.input))
        case _SearchCall():
            yield ToolCall(item.call_id or "", response_tools.SEARCH_NAME, json.dumps(item.arguments))
        case _ShellCall():
            yield ToolCall(item.call_id or item.id or "", "local_shell", json.dumps(item.action))


def _thinking(item: _Reasoning, where: str) -> str:
    """The reasoning as it was sampled if we sealed it, else whatever of it the client shows."""
    if item.encrypted_content and (sealed := response_events.unseal(item.encrypted_content)) is not None:
        return sealed
    return text_of(item.content, f"{where}.content") or text_of(item.summary, f"{where}.summary")


def _heard(item: _Heard | _Message | _Reference, where: str) -> Message:
    """What reaches the assistant in one item."""
    match item:
        case _Message():
            speaker = Speaker.USER if item.role == "user" else Speaker.SYSTEM
            return Message(speaker, (Text(text_of(item.content, f"{where}.content")),))
        case _AgentMessage():
            return Message(Speaker.USER, (Text("".join(part.text or part.encrypted_content for part in item.content)),))
        case _FunctionOutput() | _CustomOutput():
            result = ToolResult(item.call_id, text_of(item.output, f"{where}.output"))
        case _ShellOutput():
            result = ToolResult(item.id, item.output)
        case _SearchOutput():
            listed = [tool.function for tool in declared(item.tools, f"{where}.tools")]
            result = ToolResult(item.call_id or "", json.dumps(listed, ensure_ascii=False))
        case _Reference():
            message = "Items cannot be referred to: nothing is stored here. Send the item itself."
            raise CallError(Fault.INVALID, message, where)
    return Message(Speaker.TOOL, (result,))
