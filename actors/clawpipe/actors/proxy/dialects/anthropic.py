"""Anthropic Messages, as its clients speak it: `Answer` -> message or events, errors in its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from clawpipe.actors.proxy.dialects.anthropic_request import read_request
from clawpipe.actors.proxy.dialects.dialect import MAX_ERROR_CHARS, event
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault, Head, Turn

# 529 is what this provider says when it is overloaded: its clients wait and send the same request again.
STATUS = {
    Fault.INVALID: (400, "invalid_request_error"),
    Fault.OVERFLOW: (400, "invalid_request_error"),
    Fault.NOT_FOUND: (404, "not_found_error"),
    Fault.NO_MODEL: (404, "not_found_error"),
    Fault.TOO_LARGE: (413, "request_too_large"),
    Fault.NOT_JSON: (415, "invalid_request_error"),
    Fault.SLOW: (408, "invalid_request_error"),
    Fault.BUSY: (429, "rate_limit_error"),
    Fault.SETTLED: (503, "api_error"),
    Fault.UNAVAILABLE: (529, "overloaded_error"),
}
_EMPTY: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}  # a block before its deltas


class Messages:
    """The dialect of POST /v1/messages."""

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in canonical form. CallError (INVALID) names the field that is wrong."""
        return read_request(body)

    def whole(self, ask: Ask, answer: Answer) -> bytes:
        """The `message` object."""
        content = [block for block, _ in _content(answer)]
        usage = _usage(answer.head, answer.completion_tokens)
        return msgspec.json.encode({**_message(ask, answer.head), "content": content, **_ending(answer.turn), **usage})

    def opening(self, ask: Ask, head: Head) -> bytes:
        """The message without content: clients take the size of the prompt from here."""
        message = {**_message(ask, head), "content": [], **_stopped(None, None), **_usage(head, 1)}
        return _event("message_start", message=message) + self.keepalive

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """Each block from start to stop, then why the turn ended, then the end."""
        for index, (block, deltas) in enumerate(_content(answer)):
            empty = {key: _EMPTY.get(key, value) for key, value in block.items()}
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        usage = _usage(answer.head, answer.completion_tokens)
        yield _event("message_delta", delta=_ending(answer.turn), **usage)
        yield _event("message_stop")

    def error(self, error: CallError) -> tuple[int, bytes]:
        """Status and error object."""
        return STATUS[error.fault][0], msgspec.json.encode({"type": "error", **_error(error)})

    def error_event(self, error: CallError) -> bytes:
        """The error object as an event; no message_stop follows, so that no client takes the turn for complete."""
        return _event("error", **_error(error))


def counted(num_tokens: int) -> bytes:
    """The answer of POST /v1/messages/count_tokens."""
    return msgspec.json.encode({"input_tokens": num_tokens})


def _message(ask: Ask, head: Head) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": ask.model}


def _content(answer: Answer) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(block, the deltas that make it). White space alone is no block: clients would drop or refuse it.

    Clients take thinking without a signature for text, so it has one.
    """
    turn, signature = answer.turn, answer.head.id
    if turn.thinking.strip():
        said = {"type": "thinking_delta", "thinking": turn.thinking}
        signed = {"type": "signature_delta", "signature": signature}
        yield {"type": "thinking", "thinking": turn.thinking, "signature": signature}, [said, signed]
    if turn.text.strip():
        yield {"type": "text", "text": turn.text}, [{"type": "text_delta", "text": turn.text}]
    for call in turn.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(call.arguments.encode())}
        yield block, [{"type": "input_json_delta", "partial_json": call.arguments}]


def _ending(turn: Turn) -> dict[str, Any]:
    if turn.truncated:
        reason = "max_tokens"
    elif turn.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if turn.stop_text is None else "stop_sequence"
    return _stopped(reason, turn.stop_text if reason == "stop_sequence" else None)


def _stopped(reason: str | None, text: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": text, "stop_details": None}


def _usage(head: Head, completion_tokens: int) -> dict[str, Any]:
    """Nothing counts as cached: what a client adds up to the size of its context is `input_tokens` alone."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"usage": {"input_tokens": head.prompt_tokens, **cached, "output_tokens": completion_tokens}}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _error(error: CallError) -> dict[str, Any]:
    body = {"type": STATUS[error.fault][1], "message": _wording(error)[:MAX_ERROR_CHARS]}
    return {"error": body, "request_id": None}


def _wording(error: CallError) -> str:
    """Clients know some faults by the provider's words: they begin their own compaction, or try again."""
    if error.fault is Fault.UNAVAILABLE:
        return "Overloaded"
    if error.fault is Fault.OVERFLOW and error.tokens is not None:
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    named = error.param is None or error.message.startswith(error.param)
    return error.message if named else f"{error.param}: {error.message}"
