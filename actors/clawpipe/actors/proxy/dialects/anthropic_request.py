"""A body of Anthropic Messages -> `Ask`.

Harnesses merge later content into the last user message and move cache marks about, so two requests of one
conversation extend each other by content blocks, not by messages. Here every text block that is no assistant's
is a message of its own: what was a prefix on the wire stays one in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from clawpipe.actors.proxy.dialects.dialect import omitted, recorded
from clawpipe.actors.proxy.messages import (
    Ask,
    Block,
    CallError,
    Fault,
    Message,
    Speaker,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

FAILED = "[failed]"  # a tool that failed without a word
RECORDED = (
    "temperature", "top_p", "top_k", "stop_sequences", "max_tokens", "thinking", "tool_choice", "output_config",
    "output_format", "context_management", "metadata", "service_tier", "speed",
)  # fmt: skip
MAX_STOPS = 64

_Name = Annotated[str, Meta(pattern=r"\S")]


class _Text(Struct, tag="text"):
    text: str


class _Image(Struct, tag="image"):
    source: dict[str, Any]


class _Source(Struct):
    type: str
    data: str = ""
    content: str | list[_Text | _Image] = ""


class _Document(Struct, tag="document"):
    source: _Source
    title: str | None = None
    context: str | None = None


class _SearchResult(Struct, tag="search_result"):
    source: str
    title: str
    content: list[_Text]


class _ToolReference(Struct, tag="tool_reference"):
    tool_name: str


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: _Name
    content: str | list[_Text | _Image | _Document | _SearchResult | _ToolReference] | None = None
    is_error: bool | None = None


class _ToolUse(Struct, tag="tool_use"):
    id: _Name
    name: _Name
    input: dict[str, Any]


class _Thinking(Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(Struct, tag="redacted_thinking"):
    data: str


_Shown = _Text | _Image | _Document | _SearchResult | _ToolReference


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _Image | _Document | _SearchResult | _ToolResult]


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse]


class _Tool(Struct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z")]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None  # a provider's own tools have none


class _ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class _Request(Struct):
    model: _Name
    messages: Annotated[list[_User | _System | _Assistant], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: Annotated[list[_Name], Meta(max_length=MAX_STOPS)] | None = None
    mcp_servers: list[Any] | None = None
    stream: bool | None = None


def read_count(body: Mapping[str, Any]) -> Ask:
    """A request for the size of a prompt. CallError (INVALID) says where the body is wrong."""
    request = _convert(body)
    if request.mcp_servers:
        raise _wrong("mcp_servers", "servers of the provider's side are not supported; give their tools as tools")
    found = (*_system(request.system), *_messages(request.messages))
    if not found:
        raise _wrong("messages", "text content blocks must contain non-whitespace text")
    return Ask(
        model=request.model,
        messages=found,
        tools=tuple(_tool(f"tools.{n}", tool) for n, tool in enumerate(request.tools or ())),
        tools_allowed=request.tool_choice is None or request.tool_choice.type != "none",
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        stream=bool(request.stream),
        requested=recorded(body, RECORDED),
    )


def read_request(body: Mapping[str, Any]) -> Ask:
    """A request for a turn. CallError (INVALID) says where the body is wrong."""
    ask = read_count(body)
    if ask.max_tokens is None:
        raise _wrong("max_tokens", "Field required")
    last = len(body["messages"]) - 1
    if body["messages"][last]["role"] == "assistant":
        raise _wrong(f"messages.{last}.role", "the conversation must end with a user message, prefill is not supported")
    return ask


def _convert(body: Mapping[str, Any]) -> _Request:
    try:
        return msgspec.convert(body, _Request)
    except msgspec.ValidationError as err:
        what, _, where = str(err).partition(" - at `$")
        path = re.sub(r"\[(\w+)\]", r".\1", where.rstrip("`")).lstrip(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
            path, what = f"{path}.{missing[1]}".lstrip("."), "Field required"
        raise _wrong(path, what) from err


def _wrong(path: str, what: str) -> CallError:
    return CallError(Fault.INVALID, f"{path}: {what}" if path else what, path or None)


def _tool(path: str, tool: _Tool) -> dict[str, Any]:
    """As OpenAI writes it, which is what chat templates and vLLM's parsers expect."""
    if tool.type not in (None, "custom"):
        raise _wrong(f"{path}.type", f"tools of type {tool.type!r} are not supported, only those of type 'custom'")
    if tool.input_schema is None:
        raise _wrong(f"{path}.input_schema", "Field required")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _system(content: str | list[_Text] | None) -> tuple[Message, ...]:
    """One message: templates take the first, and only the first, for the system prompt."""
    blocks = [_Text(content)] if isinstance(content, str) else content or []
    texts = tuple(Text(block.text) for block in blocks if block.text.strip())
    return (Message(Speaker.SYSTEM, texts),) if texts else ()


def _messages(messages: Sequence[_User | _System | _Assistant]) -> Iterator[Message]:
    """An assistant's neighbouring messages are one turn, as the protocol says."""
    turn: list[Block] | None = None  # an empty list is a turn too: the model may have said nothing
    for message in messages:
        if isinstance(message, _Assistant):
            turn = [] if turn is None else turn
            turn.extend(_blocks(message))
            continue
        if turn is not None:
            yield Message(Speaker.ASSISTANT, tuple(turn))
        turn = None
        yield from _separate(message)
    if turn is not None:
        yield Message(Speaker.ASSISTANT, tuple(turn))


def _separate(message: _User | _System) -> Iterator[Message]:
    speaker = Speaker.SYSTEM if isinstance(message, _System) else Speaker.USER
    content: Sequence[_Shown | _ToolResult]
    content = [_Text(message.content)] if isinstance(message.content, str) else message.content
    for block in content:
        if isinstance(block, _ToolResult):
            yield Message(Speaker.TOOL, (ToolResult(block.tool_use_id, _result(block)),))
        elif (text := _shown(block)).strip():
            yield Message(speaker, (Text(text),))


def _blocks(message: _Assistant) -> Iterator[Block]:
    for block in [_Text(message.content)] if isinstance(message.content, str) else message.content:
        match block:
            case _Text(text=text) if text.strip():
                yield Text(text)
            case _Thinking(thinking=text) if text.strip():
                yield Thinking(text)
            case _ToolUse():
                yield ToolCall(block.id, block.name, msgspec.json.encode(block.input).decode())


def _result(block: _ToolResult) -> str:
    if block.content is None or isinstance(block.content, str):
        text = block.content or ""
    else:
        text = "\n".join(_shown(part) for part in block.content)
    return text or (FAILED if block.is_error else "")


def _shown(block: _Shown) -> str:
    """What a text model gets to see of a block."""
    match block:
        case _Text():
            return block.text
        case _Image():
            return omitted("image")
        case _Document():
            return "\n".join(part for part in (block.title, block.context, _source(block.source)) if part)
        case _SearchResult():
            return "\n".join([block.title, block.source, *(part.text for part in block.content)])
        case _ToolReference():
            return f"[tool {block.tool_name}]"


def _source(source: _Source) -> str:
    if source.type == "text":
        return source.data
    if source.type != "content":
        return omitted("document")
    return source.content if isinstance(source.content, str) else "\n".join(_shown(part) for part in source.content)
