"""Answers of a Chat Completions provider for real programs, and an MCP server whose tool tells the test's secret."""

from __future__ import annotations

import json
import uuid
from typing import Any

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.tasks.task import McpServer

TOOL = "tell"
SECRET = "the kettle is blue"
SERVER_FILE = "server.py"  # in the workspace
SERVER = McpServer(name="shed", command=("/usr/bin/python3", "-I", "-S", f"/work/{SERVER_FILE}"), env={"TOLD": SECRET})
# Just enough of the protocol, one JSON object per line, for a server of one tool without arguments.
SERVER_PROGRAM = b"""\
import json, os, sys
TOOL = {"name": "tell", "description": "Tells.", "inputSchema": {"type": "object", "properties": {}}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answers = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "shed", "version": "1"},
        },
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": os.environ["TOLD"]}]},
    }
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers.get(asked["method"], {})}), flush=True)
"""


def said(text: str) -> bytes:
    """A streamed turn of words."""
    return _turn({"content": text}, "stop")


def called(tool: str, /, **arguments: Any) -> bytes:
    """A streamed turn with one call."""
    return called_with(tool, json.dumps(arguments))


def called_with(name: str, arguments: str) -> bytes:
    """The same with the arguments as a text, right or wrong."""
    function = {"name": name, "arguments": arguments}
    call = {"index": 0, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
    return _turn({"content": None, "tool_calls": [call]}, "tool_calls")


def _turn(delta: dict[str, Any], reason: str) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    usage = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
    chunks = (
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {**head, "choices": [], "usage": usage},
    )
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def tool_names(call: ModelCall) -> list[str]:
    """What the program offers the model."""
    return [tool["function"]["name"] for tool in call.body.get("tools") or []]


def results(call: ModelCall) -> list[str]:
    """What the tools gave back so far."""
    return [json.dumps(message["content"]) for message in call.body["messages"] if message["role"] == "tool"]


def user_words(call: ModelCall) -> str:
    """All that the user's side has said."""
    return json.dumps([message["content"] for message in call.body["messages"] if message["role"] == "user"])
