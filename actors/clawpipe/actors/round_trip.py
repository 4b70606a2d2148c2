"""One tool call there and back: through a model's chat template, tokenizer and parser, and through every dialect.

Part of `clawpipe check`. A wrong tool parser would otherwise show as an agent that never calls a tool. Making the
parser imports vLLM: some ten seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from msgspec import Struct

from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.dialects.dialect import Dialect
from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Head, Speaker, Turn
from clawpipe.pipeline.config import ModelConfig
from clawpipe.pipeline.errors import one_line

NAME = "write_file"
ARGUMENTS = {"path": "docs/a b.txt", "content": 'He said: "1 < 2"\n\té{}'}
_DESCRIPTION = "Writes a file."
_RESULT = "ok"
_PROMPT = {"role": "user", "content": "Write."}
_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}
_TOOL = {"type": "function", "function": {"name": NAME, "description": _DESCRIPTION, "parameters": _SCHEMA}}
_KNOWN_PARSERS = ("hermes", "")  # (tool_parser, reasoning_parser) of most configurations: no need to import vLLM
_HEAD = Head(id="probe", prompt_tokens=1, created_s=0.0)


class _Protocol(Struct, frozen=True, kw_only=True):
    """How a client of a protocol asks, and asks again with the answer in its history."""

    dialect: Dialect
    first: Mapping[str, Any]
    history: str  # the key that holds the conversation
    replay: Callable[[dict[str, Any]], list[Any]]  # a whole answer -> it and its calls' results, as they are sent


def require_parsers(model: ModelConfig) -> None:
    """ConfigError for a parser that vLLM does not know, by its name alone."""
    if (model.tool_parser, model.reasoning_parser) == _KNOWN_PARSERS:
        return
    from clawpipe.actors.proxy.parse import reasoning_parser_class, tool_parser_class

    tool_parser_class(model.tool_parser)
    reasoning_parser_class(model.reasoning_parser)


def round_trip(model: ModelConfig) -> list[str]:
    """What is lost of a call, one line per problem. ConfigError for a parser that vLLM does not know."""
    from clawpipe.actors.proxy.parse import TurnParser
    from clawpipe.actors.proxy.render import Renderer

    renderer = Renderer(Path(model.path))
    parser = TurnParser(renderer.tokenizer, model.tool_parser, model.reasoning_parser, renderer.generation_prompt)
    where = f"[model] path = {model.path}"
    try:
        said = _said(renderer.tokenizer, renderer.end_of_turn)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as err:
        return [f"{where}: its chat template refuses a tool call ({one_line(err)}); choose a model that calls tools"]
    ids = renderer.tokenizer.encode(said, add_special_tokens=False)
    text = renderer.tokenizer.decode(ids)

    def parse(ask: Ask) -> Turn:
        return parser.parse(text, ask.tools, "probe", truncated=False)

    found = _calls(parser.parse(text, [_TOOL], "probe", truncated=False))
    if found != [(NAME, ARGUMENTS)]:
        return [
            f"{where}: a tool call does not survive chat template, tokenizer and tool_parser = {model.tool_parser!r} "
            f"(the template writes {said!r}, the parser finds {found}); choose the tool_parser and reasoning_parser of "
            "this model"
        ]
    lost = {name: _lost(protocol, parse) for name, protocol in _protocols().items()}
    return [f"{where}: a tool call does not survive the {name} ({why})" for name, why in lost.items() if why]


def _lost(protocol: _Protocol, parse: Callable[[Ask], Turn]) -> str:
    """Why the call does not come back in the history of the protocol's next request; empty when it does."""
    try:
        ask = protocol.dialect.read(protocol.first)
        turn = parse(ask)
        answer = json.loads(protocol.dialect.whole(ask, Answer(head=_HEAD, turn=turn, completion_tokens=1)))
        history = [*protocol.first[protocol.history], *protocol.replay(answer)]
        again = protocol.dialect.read({**protocol.first, protocol.history: history})
    except CallError as err:
        return f"refused: {one_line(err)}"
    calls = [call for message in again.messages if message.speaker is Speaker.ASSISTANT for call in message.calls]
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    return "" if found == [(NAME, ARGUMENTS)] else f"it comes back as {found}"


def _protocols() -> dict[str, _Protocol]:
    """What harnesses speak."""
    flat = {"name": NAME, "description": _DESCRIPTION}
    return {
        "Chat Completions API": _Protocol(
            dialect=Chat(),
            first={"model": "m", "messages": [_PROMPT], "tools": [_TOOL]},
            history="messages",
            replay=_after_completion,
        ),
        "Messages API": _Protocol(
            dialect=Messages(),
            first={
                "model": "m",
                "max_tokens": 100,
                "messages": [_PROMPT],
                "tools": [{**flat, "input_schema": _SCHEMA}],
            },
            history="messages",
            replay=_after_message,
        ),
        "Responses API": _Protocol(
            dialect=Responses(),
            first={
                "model": "m",
                "input": [{"type": "message", **_PROMPT}],
                "tools": [{"type": "function", **flat, "parameters": _SCHEMA}],
            },
            history="input",
            replay=_after_response,
        ),
    }


def _after_completion(answer: dict[str, Any]) -> list[Any]:
    message = answer["choices"][0]["message"]
    called = message.get("tool_calls") or []
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": _RESULT} for call in called)]


def _after_message(answer: dict[str, Any]) -> list[Any]:
    called = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": _RESULT} for block in called]
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]


def _after_response(answer: dict[str, Any]) -> list[Any]:
    called = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": _RESULT} for item in called]
    return [*answer["output"], *results]


def _calls(turn: Turn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def _said(tokenizer: Any, end_of_turn: str) -> str:
    """The text of an assistant turn that calls the probe tool, as the model's template writes it."""
    call = {"id": "c", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    asked: list[dict[str, Any]] = [dict(_PROMPT)]
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False, add_generation_prompt=prompt)
        return text

    turn = render(answered, False).removeprefix(render(asked, False))
    opening = render(asked, True).removeprefix(render(asked, False))
    return turn.removeprefix(opening).rpartition(end_of_turn)[0]
