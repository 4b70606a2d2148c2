"""What this room's tests send as a client of OpenAI's protocols, and recorded requests with stand-ins for the texts."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

RECORDINGS = Path(__file__).parents[3] / "shared" / "structure"
CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls -la", "n": 1.0}}\n</tool_call>'
THOUGHT = "<think>\nWhich files?\n</think>\n\n"
EXEC = {
    "type": "function",
    "name": "exec",
    "description": "runs it",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
CHAT_EXEC = {"type": "function", "function": {key: value for key, value in EXEC.items() if key != "type"}}


@asynccontextmanager
async def sdk(rollout: Any):
    """The official SDK as a client of a rollout's listener; no retries of its own."""
    port = rollout.listener.getsockname()[1]
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, http_client=http
    ) as client:
        yield client


def call(name: str, **arguments: Any) -> str:
    """What a model says to call a tool."""
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def output(call_id: str, text: str, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": text}


def events_of(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """(event name, data) of a stream of Responses."""
    found = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def scenarios(path: str) -> list[str]:
    """The recorded scenarios that have requests to this path."""
    harnesses = ("codex-*", "openclaw-*", "opencode-*", "qwen-*")
    files = [file for harness in harnesses for file in RECORDINGS.glob(f"{harness}.jsonl")]
    return sorted(file.stem for file in files if f'"{path}"' in file.read_text())


def recorded(name: str) -> list[dict[str, Any]]:
    """The lines of a recording. Skips the test where there are no recordings."""
    path = RECORDINGS / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["body_keys"]]


def recorded_chat(line: dict[str, Any]) -> dict[str, Any]:
    """The body of a recorded Chat Completions request: equal stand-ins where equal texts were."""
    tools = [{"type": "function", "function": {"name": name}} for name in line["tools"]]
    messages = [_chat_message(message) for message in line["messages"]]
    return {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message["role"], "content": _content(message)}
    for field in ("reasoning_content", "reasoning"):
        if message.get(field):
            body[field] = message[field]["h"]
    if message.get("tool_calls"):
        body["tool_calls"] = [
            {"id": made["id"]["h"], "type": "function", "function": _function(made)} for made in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        body["tool_call_id"] = message["tool_call_id"]["h"]
    return body


def recorded_responses(line: dict[str, Any]) -> dict[str, Any]:
    """The body of a recorded Responses request."""
    tools = [{"type": "function", "name": name} for name in line["tools"]]
    return {"model": "policy", "input": [_item(item) for item in line["messages"]], "tools": tools}


def _item(item: dict[str, Any]) -> dict[str, Any]:
    match item.get("type") or item["role"]:
        case "function_call":
            return {"type": "function_call", "call_id": item["id"]["h"], **_function(item)}
        case "function_call_output":
            return output(item["id"]["h"], item["out"]["h"])
        case "reasoning":
            return {
                "type": "reasoning",
                "summary": [_part(p) for p in item.get("summary", ())],
                "content": _content(item),
            }
        case "message" | "user" | "assistant" | "system" | "developer":
            return {"role": item["role"], "content": _content(item)}
    raise AssertionError(item)


def _function(made: dict[str, Any]) -> dict[str, Any]:
    return {"name": made["tool"], "arguments": json.dumps({"arguments": made["args"]["raw"]["h"]})}


def _content(message: dict[str, Any]) -> Any:
    if message.get("content") is None:
        return None
    parts = [_part(part) for part in message["content"]]
    return parts[0]["text"] if message["form"] == "str" else parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text" if part["t"] == "str" else part["t"], "text": words(part)}


def words(block: dict[str, Any]) -> str:
    """The stand-in of a recorded text: its hash; of a text that is all white space, white space."""
    return " " * block["n"] if 0 < block["n"] <= max(block["ws"]) else block["h"]
