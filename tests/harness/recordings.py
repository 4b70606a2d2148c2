"""Reads the text-free recordings of real harnesses that lie beside the repository (../shared/structure).

A recording has a hash and a length where the program had a text. The calls that are built from it have the same
roles, blocks, cache marks, headers and keys, and stand-ins of the right length where the wording was: good for
whatever looks at structure, and for nothing else. Without the recordings the tests that ask for them are skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall

FOLDER = Path(__file__).parents[3] / "shared" / "structure"
USER_AGENT = "user-agent"


@dataclass(frozen=True)
class Recorded:
    """One model call: as a classifier sees it, and all that was recorded of it and its answer."""

    number: int
    call: ModelCall
    line: dict[str, Any]


def scenarios(harness: str) -> list[str]:
    """Names of the recorded scenarios of "claude", "codex", "openclaw", "opencode" or "qwen"."""
    prefix = f"{harness}-"
    return sorted(path.stem.removeprefix(prefix) for path in FOLDER.glob(f"{prefix}*.jsonl"))


def recorded(harness: str, scenario: str) -> list[Recorded]:
    """The model calls of a scenario in order of arrival. Skips the test where there are no recordings."""
    path = FOLDER / f"{harness}-{scenario}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return [Recorded(line["n"], model_call(line), line) for line in lines if line["body_keys"]]


def model_call(line: dict[str, Any]) -> ModelCall:
    """The call of one line, with stand-ins for its texts."""
    headers = {USER_AGENT: line["ua"], **line["hdr"], **line["hdr_ids"]}
    if line["trace"] is not None:
        headers["traceparent"] = f"00-{line['trace']}-0000000000000000-01"
    return ModelCall(path=line["endpoint"], headers=headers, body=_body(line))


def _body(line: dict[str, Any]) -> dict[str, Any]:
    """Keys whose value was not recorded are there, and empty."""
    body: dict[str, Any] = {key: {} for key in line["body_keys"]}
    body |= {"model": line["model"], "stream": line["stream"]}
    body |= {key: line["max_tokens"] for key in body if key in _MAX_TOKENS}
    history = "input" if "input" in body else "messages"
    body[history] = [_message(message) for message in line["messages"]]
    for key in {"system", "instructions"} & body.keys():
        body[key] = [_block(block) for block in line["system"]]
    if "tools" in body:
        body["tools"] = [_tool(name, line["endpoint"]) for name in line["tools"]]
    return body


_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _tool(name: str, endpoint: str) -> dict[str, Any]:
    if endpoint.endswith("/messages"):
        return {"name": name, "input_schema": {}}
    if endpoint.endswith("/chat/completions"):
        return {"type": "function", "function": {"name": name}}
    return {"type": "function", "name": name}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] in ("function_call", "custom_tool_call"):
        return {"type": message["role"], "call_id": _id(message), "name": message["tool"], "arguments": _json(message)}
    if message["role"] in ("function_call_output", "custom_tool_call_output"):
        return {"type": message["role"], "call_id": _id(message), "output": _text(message["out"])}
    made = {key: message[key] for key in ("role", "type") if key in message}
    if "content" in message:
        made["content"] = _content(message)
    for key in {"reasoning_content", "reasoning"} & message.keys():
        made[key] = _text(message[key])
    if "tool_calls" in message:
        made["tool_calls"] = [_called(call) for call in message["tool_calls"]]
    if "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]["h"]
    return made


def _content(message: dict[str, Any]) -> Any:
    blocks = message["content"]
    if blocks is None:
        return None
    return _text(blocks[0]) if message["form"] == "str" else [_block(block) for block in blocks]


def _called(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["tool"], "arguments": _json(call)}
    return {"id": _id(call), "type": "function", "function": function}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "text" if block["t"] == "str" else block["t"]}
    if "cc" in block:
        made["cache_control"] = {"type": "ephemeral"}
    match block["t"]:
        case "thinking":
            made |= {"thinking": _text(block), "signature": block["sig"]}
        case "tool_use":
            made |= {"id": _id(block), "name": block["tool"], "input": dict.fromkeys(block["args"]["keys"], "")}
        case "tool_result":
            made |= {"tool_use_id": _id(block), "content": [_block(part) for part in block["content"]]}
        case _:
            made["text"] = _text(block)
    return made


def _id(holder: dict[str, Any]) -> Any:
    return holder["id"]["h"] if holder.get("id") else None


def _json(holder: dict[str, Any]) -> str:
    return json.dumps(dict.fromkeys(holder["args"]["keys"] or [], ""))


def _text(text: dict[str, Any]) -> str:
    """A stand-in of the same length, with as many blanks at its ends; equal texts have equal stand-ins."""
    length, (before, after) = text["n"], text.get("ws", (0, 0))
    inner = (text["h"] * (length // len(text["h"]) + 1))[: max(0, length - before - after)]
    return (" " * before + inner + " " * after)[:length]
