"""Messages that anybody who has the server's token may have sent: one that cannot be read must end no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from clawpipe.pipeline.observe import EventLog

T = TypeVar("T")

# What a decoder raises; the second for data that is nested too deep.
UNREADABLE = (msgspec.MsgspecError, RecursionError)


def decoded(decode: Callable[[bytes], T], data: bytes, subject: str, log: EventLog) -> T | None:
    """What the message says; None, and a warning in the log, when it cannot be read."""
    try:
        return decode(data)
    except UNREADABLE as err:
        log.warning("a message cannot be read and is passed over", subject=subject, why=str(err), bytes=len(data))
        return None
