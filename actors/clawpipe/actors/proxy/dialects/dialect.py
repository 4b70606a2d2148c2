"""The seam between the proxy and a provider's protocol: one implementation per protocol that harnesses speak."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault, Head

MAX_ERROR_CHARS = 2000  # of a message, which may repeat what is wrong in a request
MAX_REQUESTED_CHARS = 1000  # of one value in a record, which must fit into a message of NATS whatever is asked for


class Dialect(Protocol):
    """A protocol: request in, answer out, errors in its own form. Pure: bytes to structs and back."""

    @property
    def keepalive(self) -> bytes:
        """What may be sent in a stream at any time without meaning anything."""
        ...

    def read(self, body: Mapping[str, Any]) -> Ask:
        """The request in canonical form. CallError (INVALID) when it is none of this protocol's."""
        ...

    def whole(self, ask: Ask, answer: Answer) -> bytes:
        """The answer to a request that did not ask for a stream."""
        ...

    def opening(self, ask: Ask, head: Head) -> bytes:
        """The stream's first events, sent as soon as the turn is being sampled; empty when there is nothing to say."""
        ...

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """The events that follow the opening; the last one ends the stream."""
        ...

    def error(self, error: CallError) -> tuple[int, bytes]:
        """HTTP status and body of an error."""
        ...

    def error_event(self, error: CallError) -> bytes:
        """The event that ends a stream with an error."""
        ...


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. CallError (INVALID) when there is none.

    JavaScript may cut a string between the halves of a surrogate pair; the half becomes U+FFFD.
    """
    try:
        body = _mend(json.loads(data)) if may_hold_halves(data) else msgspec.json.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError) as err:
        raise CallError(Fault.INVALID, f"The body is not valid JSON: {err}") from err
    if not isinstance(body, dict):
        raise CallError(Fault.INVALID, "The body must be a JSON object.")
    return body


def may_hold_halves(data: bytes) -> bool:
    """Whether there may be a half of a surrogate pair in a body, which takes far longer to be read then."""
    return b"\\ud" in data or b"\\uD" in data


def recorded(body: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """What a request says in these fields, for its record."""
    return {field: _plain(body[field]) for field in fields if body.get(field) is not None}


def omitted(what: str) -> str:
    """Stands for what a text model cannot see, since it should know that there was something."""
    return f"[{what} omitted]"


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """An event of a stream. A line end would cut it in two: JSON has none, and Raw JSON in `data` must have none."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: ".encode() + msgspec.json.encode(data) + b"\n\n"


def _plain(value: Any) -> Any:
    """A value that any record can hold: integers of 64 bits, everything composite as its JSON text, text cut off."""
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text[:MAX_REQUESTED_CHARS]


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value
