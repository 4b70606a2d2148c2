"""What this room's tests send as a client of Anthropic Messages, and recorded requests with stand-ins for the texts."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

RECORDINGS = Path(__file__).parents[3] / "shared" / "structure"
USER = {"role": "user", "content": "hello"}
EXEC = {
    "name": "exec",
    "description": "runs it",
    "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls -la", "n": 1.0}}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral"}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 100, "messages": list(messages) or [USER], **fields}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def events_of(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """(event name, data) of a stream."""
    found = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@asynccontextmanager
async def sdk(rollout: Any):
    """The official SDK as a client of a rollout's listener; no retries of its own."""
    port = rollout.listener.getsockname()[1]
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="any", max_retries=0, http_client=http
    ) as client:
        yield client


def recorded(name: str) -> list[dict[str, Any]]:
    """The lines of a recording that are requests for a turn. Skips the test where there are no recordings."""
    path = RECORDINGS / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["endpoint"] == "/v1/messages"]


def scenarios() -> list[str]:
    return sorted(path.stem for path in RECORDINGS.glob("claude-*.jsonl"))


def recorded_body(line: dict[str, Any]) -> dict[str, Any]:
    """The body of a recorded request: equal stand-ins where equal texts were."""
    return {
        **{key: {} for key in line["body_keys"]},
        "model": "policy",
        "max_tokens": line["max_tokens"],
        "stream": line["stream"],
        "system": [recorded_block(block) for block in line["system"]],
        "messages": [{"role": m["role"], "content": recorded_content(m["content"])} for m in line["messages"]],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in line["tools"]],
    }


def recorded_content(content: list[dict[str, Any]]) -> Any:
    if [part["t"] for part in content] == ["str"]:
        return _words(content[0])
    return [recorded_block(part) for part in content]


def recorded_block(block: dict[str, Any]) -> dict[str, Any]:
    """A block of a request, or of what the scripted server answered."""
    mark = CACHED if block.get("cc") else {}
    match block["t"]:
        case "text":
            return text(_words(block), **mark)
        case "thinking":
            return {"type": "thinking", "thinking": _words(block), "signature": block["sig"], **mark}
        case "tool_use" | "tool":
            arguments = dict.fromkeys(block["args"]["keys"] or (), 0)  # values may be re-written: 1.0 comes back as 1
            return {"type": "tool_use", "id": block["id"]["h"], "name": block["tool"], "input": arguments, **mark}
        case "tool_result":
            content = recorded_content(block["content"])
            return {
                "type": "tool_result",
                "tool_use_id": block["id"]["h"],
                "is_error": block["err"],
                "content": content,
                **mark,
            }
        case "tool_reference":
            return {"type": "tool_reference", "tool_name": "some_tool"}
    raise AssertionError(block)


def _words(block: dict[str, Any]) -> str:
    """Its hash; of a text that is all white space, white space."""
    blank = 0 < block["n"] <= max(block["ws"])
    return " " * block["n"] if blank else block["h"]
