"""What this room's tests send as a harness, and how they read a streamed answer."""

from __future__ import annotations

import json

USER = {"role": "user", "content": "hello"}


def body(*messages, **fields):
    return {"model": "policy", "messages": list(messages) or [USER], **fields}


def events_of(text: str) -> list:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
