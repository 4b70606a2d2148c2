"""What OpenAI's two protocols share: the form of errors, and content that is text or a list of parts."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from clawpipe.actors.proxy.dialects.dialect import MAX_ERROR_CHARS, omitted
from clawpipe.actors.proxy.messages import CallError, Fault

T = TypeVar("T")

STATUS = {
    Fault.INVALID: 400,
    Fault.OVERFLOW: 400,
    Fault.NOT_FOUND: 404,
    Fault.NO_MODEL: 404,
    Fault.SLOW: 408,
    Fault.TOO_LARGE: 413,
    Fault.NOT_JSON: 415,
    Fault.BUSY: 429,
    Fault.SETTLED: 503,
    Fault.UNAVAILABLE: 503,
}
CODES = {
    Fault.OVERFLOW: "context_length_exceeded",
    Fault.NOT_FOUND: "not_found",
    Fault.NO_MODEL: "model_not_found",
    Fault.BUSY: "rate_limit_exceeded",
}
UNSEEN = {"image_url": "image", "input_image": "image", "input_audio": "audio", "file": "file", "input_file": "file"}
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")


class Part(Struct):
    """A part of a message's content; only what is text is kept of it."""

    type: str
    text: str = ""
    refusal: str = ""


Content = str | list[Part] | None


def text_of(content: Content, where: str) -> str:
    """The content as one text, a part per line. CallError names the part (below `where`) that is none of these."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    if part.type in UNSEEN:
        return omitted(UNSEEN[part.type])
    if part.type not in TEXTS:
        raise CallError(Fault.INVALID, f"Content of type {part.type!r} is not supported.", f"{where}.type")
    return part.text or part.refusal


def convert(value: Any, to: type[T], where: str = "") -> T:
    """`value` as this struct. CallError (INVALID) names the field that is wrong, below `where`."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as err:
        what, _, path = str(err).partition(" - at `$")
        param = (where + path.rstrip("`")).removeprefix(".")
        raise CallError(Fault.INVALID, f"{what}.", param or None) from err


def positive(limit: int | None, param: str) -> int | None:
    """A token limit that was asked for."""
    if limit is not None and limit < 1:
        raise CallError(Fault.INVALID, "The token limit must be at least 1.", param)
    return limit


def error_object(error: CallError) -> dict[str, Any]:
    """The object that stands under "error"."""
    kind = "server_error" if STATUS[error.fault] >= 500 else "invalid_request_error"
    said = error.message[:MAX_ERROR_CHARS]
    return {"message": said, "type": kind, "param": error.param, "code": CODES.get(error.fault)}
