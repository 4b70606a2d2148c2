"""An answer in the Responses protocol: the Response object, its output items, and the events of a stream."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from msgspec import Raw

from clawpipe.actors.proxy.dialects.dialect import event
from clawpipe.actors.proxy.dialects.openai import error_object
from clawpipe.actors.proxy.dialects.response_tools import Kind, ToolName, wire_call
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Head

OPENING_EVENTS = 2
# OpenAI's own sign of life: an event, since some clients time out over comments alone. Its number is that of the
# event before it, so that numbers never fall.
KEEPALIVE = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":1}\n\n'
SEAL = b"clawpipe:"
DEFAULTS: dict[str, Any] = {  # what a Response repeats of its request, where the request does not say it
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class ResponsesAsk(Ask, frozen=True, kw_only=True):
    """A request with what its answer must know of it: names of tools, and what the answer repeats.

    The repeated values are JSON already: they can be nested as deep as JSON is read, and walking them again could
    need more frames than there are.
    """

    names: Mapping[str, ToolName] = {}
    seal_thinking: bool = False
    echo: Mapping[str, Raw] = {}


class Stream:
    """Numbers and writes the events of one stream, from `first` on."""

    def __init__(self, first: int) -> None:
        self._numbers = count(first)

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)


def whole(ask: ResponsesAsk, answer: Answer) -> dict[str, Any]:
    """The finished Response object."""
    truncated = answer.turn.truncated
    return {
        **begun(ask, answer.head),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _output(ask, answer),
        "usage": _usage(answer),
    }


def begun(ask: ResponsesAsk, head: Head) -> dict[str, Any]:
    """The Response object before anything is sampled."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": int(head.created_s),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": [],
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "usage": None,
        **DEFAULTS,
        **ask.echo,
    }


def opening(ask: ResponsesAsk, head: Head) -> bytes:
    """The first events: the response exists, and is under way."""
    stream, response = Stream(0), begun(ask, head)
    return stream.event("response.created", response=response) + stream.event("response.in_progress", response=response)


def events(ask: ResponsesAsk, answer: Answer) -> Iterator[bytes]:
    """What follows the opening: each item opened, filled and closed, then the whole response."""
    stream, response = Stream(OPENING_EVENTS), whole(ask, answer)
    for index, item in enumerate(response["output"]):
        yield from _item(stream, index, item)
    yield stream.event(f"response.{response['status']}", response=response)


def failed(error: CallError) -> bytes:
    """The `error` event. Its fields stand in it and below "error" too: clients look in either place."""
    said = error_object(error)
    flat = {key: said[key] for key in ("code", "message", "param")}
    return Stream(OPENING_EVENTS).event("error", **flat, error=said)


def seal(thinking: str) -> str:
    """Reasoning as `encrypted_content`. It is no secret; the mark tells it from what other providers encrypted."""
    return base64.b64encode(SEAL + thinking.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning again, or None where the text is not one of ours."""
    try:
        data = base64.b64decode(sealed, validate=True)
        return data.removeprefix(SEAL).decode() if data.startswith(SEAL) else None
    except (binascii.Error, ValueError):
        return None


def _output(ask: ResponsesAsk, answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, then text, then calls. White space alone is no item, but in a turn that has no other."""
    turn, items = answer.turn, []
    if turn.thinking.strip():
        items.append(_reasoning(ask, answer))
    if turn.text.strip() or not (items or turn.calls):
        items.append(_message(answer))
    return [*items, *(wire_call(call, ask.names) for call in turn.calls)]


def _reasoning(ask: ResponsesAsk, answer: Answer) -> dict[str, Any]:
    thinking = answer.turn.thinking
    content = [{"type": "reasoning_text", "text": thinking}]
    item = {"id": f"rs_{answer.head.id}", "type": "reasoning", "summary": [], "content": content}
    return {**item, "encrypted_content": seal(thinking)} if ask.seal_thinking else item


def _message(answer: Answer) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": answer.turn.text}
    cut = answer.turn.truncated and not answer.turn.calls
    return {
        "id": f"msg_{answer.head.id}",
        "type": "message",
        "status": "incomplete" if cut else "completed",
        "role": "assistant",
        "content": [part],
    }


def _usage(answer: Answer) -> dict[str, Any]:
    """Tokens in and out. Cached tokens and those of the reasoning are not counted apart: they are in the sums."""
    prompt, completion = answer.head.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _item(stream: Stream, index: int, item: dict[str, Any]) -> Iterator[bytes]:
    inside = {"item_id": item["id"], "output_index": index}
    yield stream.event("response.output_item.added", output_index=index, item=_opened(item))
    match item["type"]:
        case "reasoning":
            yield from _part(stream, inside, item["content"][0], "response.reasoning_text", {})
        case "message":
            yield from _part(stream, inside, item["content"][0], "response.output_text", {"logprobs": []})
        case Kind.FUNCTION:
            given = {"arguments": item["arguments"], "name": item["name"]}
            yield stream.event("response.function_call_arguments.delta", **inside, delta=item["arguments"])
            yield stream.event("response.function_call_arguments.done", **inside, **given)
        case Kind.CUSTOM:
            yield stream.event("response.custom_tool_call_input.delta", **inside, delta=item["input"])
            yield stream.event("response.custom_tool_call_input.done", **inside, input=item["input"])
    yield stream.event("response.output_item.done", output_index=index, item=item)


def _opened(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is before its first delta."""
    empty = {"content": [], "input": "", "status": "in_progress"} | (
        {"arguments": ""} if item["type"] == Kind.FUNCTION else {}
    )
    return {key: empty.get(key, value) for key, value in item.items() if key != "encrypted_content"}


def _part(
    stream: Stream, inside: dict[str, Any], part: dict[str, Any], kind: str, extra: dict[str, Any]
) -> Iterator[bytes]:
    """A message's or reasoning's only part of content."""
    at = {**inside, "content_index": 0}
    yield stream.event("response.content_part.added", **at, part={**part, "text": ""})
    yield stream.event(f"{kind}.delta", **at, delta=part["text"], **extra)
    yield stream.event(f"{kind}.done", **at, text=part["text"], **extra)
    yield stream.event("response.content_part.done", **at, part=part)
