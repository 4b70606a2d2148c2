"""A sampled turn's text -> canonical turn, by vLLM's own parsers. The only module here that imports vLLM.

The whole turn is parsed, once, when it is complete. What the parser does not take for a finished, well-formed
call goes to the harness as text and is flagged: a harness never sees a call with arguments that the model did
not write.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from clawpipe.actors.proxy.messages import CallError, Fault, ToolCall, Turn, parse_object
from clawpipe.pipeline.errors import ConfigError

MARKS = (("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ("<parameter=", "</parameter>"))
CACHED_TOOL_SETS = 64


class TurnParser:
    """vLLM's tool parser, and its reasoning parser where one is named, over one tokenizer.

    Making one imports vLLM (about ten seconds of work, 400 MB): do it once, in a thread. ConfigError for a name
    that vLLM does not know, or a tokenizer that the parser cannot use.
    """

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str, generation_prompt: str) -> None:
        self._tokenizer = tokenizer
        self._make_tools = _tool_parser(tool_parser)
        self._make_reasoning = _reasoning_parser(reasoning_parser)
        self._requests: OrderedDict[bytes, Any] = OrderedDict()
        self._marks = self._call_marks(tool_parser)
        self._starts_thinking = self._opens_thinking(generation_prompt)

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_id: str, *, truncated: bool) -> Turn:
        """The turn. `call_id` (letters and digits) makes the ids of its tool calls; `truncated`: by the limit.

        Without `tools` everything beside the reasoning is text.
        """
        request = self._request(tools)
        thinking, said = self._split_thinking(text, request)
        content, calls = self._extract(said, request) if tools else (said, [])
        if not calls:
            tried = bool(tools) and any(opening in said for opening, _ in self._marks)
            return Turn(text=said, thinking=thinking, truncated=truncated, malformed=tried)
        closed = all(_closed(said, *marks) for marks in self._marks)
        if not closed or not all(_well_formed(name, arguments, tools) for name, arguments in calls):
            return Turn(text=said, thinking=thinking, truncated=truncated, malformed=True)
        numbered = tuple(ToolCall(_tool_call_id(call_id, n), *call) for n, call in enumerate(calls))
        return Turn(text=content, thinking=thinking, calls=numbered, truncated=truncated)

    def accept(self, tools: Sequence[dict[str, Any]]) -> None:
        """Checks a request's tools before anything is sampled for it. CallError (INVALID) when they are none."""
        try:
            self._request(tools)
        except ValueError as err:
            raise CallError(Fault.INVALID, f"The tools cannot be used: {err}", "tools") from err

    def _extract(self, text: str, request: Any) -> tuple[str, list[tuple[str, str]]]:
        """(text beside the calls, [(name, arguments)]); no calls when the parser found none, or fell over the text."""
        try:
            found = self._make_tools(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # whatever a parser makes of what a model wrote, it is the model's malformed call
            return text, []
        if not found.tools_called:
            return text, []
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return found.content or "", calls

    def _split_thinking(self, text: str, request: Any) -> tuple[str, str]:
        """(thinking, the rest). vLLM takes a text without any mark for thinking; here it is an answer."""
        if self._make_reasoning is None:
            return "", text
        parser = self._make_reasoning(self._tokenizer)
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        if not self._starts_thinking and start not in text and end not in text:
            return "", text
        thinking, said = parser.extract_reasoning(text, request)
        return thinking or "", said or ""

    def _request(self, tools: Sequence[dict[str, Any]]) -> Any:
        """vLLM's request object with these tools, which its parsers want to see."""
        key = hashlib.blake2b(msgspec.json.encode(tools), digest_size=16).digest()
        if key not in self._requests:
            self._requests[key] = _vllm_request(tools)
            if len(self._requests) > CACHED_TOOL_SETS:
                self._requests.popitem(last=False)
        return self._requests[key]

    def _call_marks(self, name: str) -> tuple[tuple[str, str], ...]:
        """(opening, closing) of what the parser takes for a call."""
        try:
            parser = self._make_tools(self._tokenizer, [])
            if self._make_reasoning is not None:
                self._make_reasoning(self._tokenizer)
        except (RuntimeError, ValueError, KeyError) as err:
            raise ConfigError(
                f"[model] tool_parser {name!r} or reasoning_parser: not usable with this tokenizer ({err})"
            ) from err
        own = (getattr(parser, "tool_call_start_token", None), getattr(parser, "tool_call_end_token", None))
        return (own,) if isinstance(own[0], str) and isinstance(own[1], str) else MARKS  # type: ignore[return-value]

    def _opens_thinking(self, generation_prompt: str) -> bool:
        if self._make_reasoning is None:
            return False
        parser = self._make_reasoning(self._tokenizer)
        return not _closed(generation_prompt, parser.reasoning_start_str, parser.reasoning_end_str)


def _closed(text: str, opening: str, closing: str) -> bool:
    """Whether the last thing opened is closed again."""
    return text.rfind(opening) <= text.rfind(closing)


def _well_formed(name: str, arguments: str, tools: Sequence[dict[str, Any]]) -> bool:
    """A name, and arguments that are a JSON object; an empty one only where the tool requires nothing."""
    given = parse_object(arguments)
    if not name or given is None or _has_half_surrogate(name + arguments):
        return False
    return bool(given) or not _requires_arguments(name, tools)


def _has_half_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text) if not text.isascii() else False


def _requires_arguments(name: str, tools: Sequence[dict[str, Any]]) -> bool:
    for tool in tools:
        function = tool.get("function", {})
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, dict):
            return bool(parameters.get("required"))
    return False


def _tool_call_id(call_id: str, number: int) -> str:
    """Unique in the run, in the form that OpenAI's have; letters and digits behind the prefix."""
    return "call_" + hashlib.blake2b(f"{call_id}/{number}".encode(), digest_size=12).hexdigest()


def _tool_parser(name: str) -> Any:
    _quiet_vllm()
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as err:
        raise ConfigError(f"[model] tool_parser: vLLM has no {name!r}; see `vllm serve --help`") from err


def _reasoning_parser(name: str) -> Any:
    if not name:
        return None
    from vllm.reasoning import ReasoningParserManager

    try:
        return ReasoningParserManager.get_reasoning_parser(name)
    except KeyError as err:
        raise ConfigError(f"[model] reasoning_parser: vLLM has no {name!r}; see `vllm serve --help`") from err


def _vllm_request(tools: Sequence[dict[str, Any]]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], tools=list(tools) or None)


def _quiet_vllm() -> None:
    """vLLM logs a traceback for every call that a model wrote badly; here that is data."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
