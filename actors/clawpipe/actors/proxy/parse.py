"""A sampled turn's text -> canonical turn, by vLLM's own parsers. The only module here that imports vLLM.

The whole turn is parsed, once, when it is complete. What the parser does not take for a finished, well-formed
call goes to the harness as text and is flagged: a harness never sees a call with arguments that the model did
not write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from clawpipe.actors.proxy.messages import CallError, Fault, ToolCall, Turn, parse_object
from clawpipe.pipeline.errors import ConfigError

MARKS = (("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ("<parameter=", "</parameter>"))
CACHED_TOOL_BYTES = 16 * 1024**2  # as JSON, over all rollouts; the objects made of it take some ten times as much
MAX_TOOLS = 512  # of one request; vLLM makes an object of each
MAX_MARKS = 128  # of one kind in a turn; the parsers' time grows with their square
MAX_CACHED_TOOLS = 1024**2  # a larger set is checked every time: one rollout must not push out what the others use


class ToolSet(Struct, frozen=True, eq=False):
    """The tools of a request, checked; one object for all requests with the same ones."""

    tools: tuple[dict[str, Any], ...]
    request: Any  # vLLM's request object with these tools, which its parsers want to see
    demanding: frozenset[str]  # names of those that cannot be called without arguments


class Layout(Struct, frozen=True):
    """Where the parts of a turn stand in its text, by character."""

    thinking_end: int  # behind the mark that ends it; 0 without thinking
    text_start: int | None  # None: the text of the turn does not stand there in one piece
    call_ends: tuple[int, ...]  # empty when they cannot be told


class TurnParser:
    """vLLM's tool parser, and its reasoning parser where one is named, over one tokenizer.

    Making one imports vLLM (about ten seconds of work, 400 MB): do it once, in a thread. ConfigError for a name
    that vLLM does not know, or a tokenizer that the parser cannot use.
    """

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str, generation_prompt: str) -> None:
        self._tokenizer = _with_vocabulary_at_hand(tokenizer)
        self._make_tools = tool_parser_class(tool_parser)
        self._make_reasoning = reasoning_parser_class(reasoning_parser)
        self._tool_sets: OrderedDict[bytes, tuple[ToolSet, int]] = OrderedDict()  # with its size as JSON
        self._tool_room = CACHED_TOOL_BYTES
        self._marks = self._call_marks(tool_parser)
        self._thinking_marks = self._find_thinking_marks()
        self._starts_thinking = self._make_reasoning is not None and not _closed(
            generation_prompt, *self._thinking_marks
        )

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_id: str, *, truncated: bool) -> Turn:
        """`read` with tools that nobody has checked."""
        return self.read(text, self.accept(tools), call_id, truncated=truncated)

    def read(self, text: str, tools: ToolSet, call_id: str, *, truncated: bool) -> Turn:
        """The turn. `call_id` (letters and digits) makes the ids of its tool calls; `truncated`: by the limit.

        Without `tools` everything beside the reasoning is text. A turn with more than MAX_MARKS calls, or parts
        of calls, is malformed whatever the parser would make of it: it is not asked, and what was said is text.
        """
        thinking, said = self._split_thinking(text, tools.request)
        if tools.tools and _is_flooded(said, self._marks):
            return Turn(text=said, thinking=thinking, truncated=truncated, malformed=True)
        content, calls = self._extract(said, tools.request) if tools.tools else (said, [])
        if not calls:
            tried = bool(tools.tools) and any(opening in said for opening, _ in self._marks)
            return Turn(text=said, thinking=thinking, truncated=truncated, malformed=tried)
        whole = all(_closed(said, *marks) for marks in self._marks) and not self._cut_short(said)
        if not whole or not all(_well_formed(name, arguments, tools) for name, arguments in calls):
            return Turn(text=said, thinking=thinking, truncated=truncated, malformed=True)
        numbered = tuple(ToolCall(_tool_call_id(call_id, n), *call) for n, call in enumerate(calls))
        return Turn(text=content, thinking=thinking, calls=numbered, truncated=truncated)

    def accept(self, tools: Sequence[dict[str, Any]]) -> ToolSet:
        """Checks a request's tools before anything is sampled for it. CallError (INVALID) when they are none."""
        if len(tools) > MAX_TOOLS:
            raise CallError(
                Fault.INVALID, f"There are {len(tools)} tools, of {MAX_TOOLS} at most. Please send fewer.", "tools"
            )
        text = msgspec.json.encode(tools)
        key = hashlib.blake2b(text, digest_size=16).digest()
        if (known := self._tool_sets.get(key)) is not None:
            self._tool_sets.move_to_end(key)
            return known[0]
        try:
            made = _tool_set(tools)
        except ValueError as err:
            raise CallError(Fault.INVALID, f"The tools cannot be used: {err}", "tools") from err
        if len(text) <= MAX_CACHED_TOOLS:
            self._remember(key, made, len(text))
        return made

    def _remember(self, key: bytes, tools: ToolSet, size: int) -> None:
        self._tool_sets[key] = (tools, size)
        self._tool_room -= size
        while self._tool_room < 0:
            _, (_, freed) = self._tool_sets.popitem(last=False)
            self._tool_room += freed

    def layout(self, text: str, turn: Turn) -> Layout:
        """Where the parts of `turn` stand in the text that it was read from."""
        after = self._thinking_end(text) if turn.thinking else 0
        start = text.find(turn.text, after)
        return Layout(after, None if start < 0 else start, self._call_ends(text[after:], after, len(turn.calls)))

    def _thinking_end(self, text: str) -> int:
        mark = self._thinking_marks[1]
        found = text.find(mark)
        return len(text) if found < 0 else found + len(mark)

    def _call_ends(self, text: str, offset: int, num_calls: int) -> tuple[int, ...]:
        """The marks that end a call, if there are as many of one kind as there are calls."""
        for _, closing in self._marks:
            ends = [found.end() + offset for found in re.finditer(re.escape(closing), text)]
            if len(ends) == num_calls:
                return tuple(ends)
        return ()

    def _cut_short(self, said: str) -> bool:
        """Whether a value holds a mark that ends it before its end.

        XML, where the model cannot quote a mark: there are more closings than openings then.
        """
        return len(self._marks) > 1 and any(said.count(closing) > said.count(mark) for mark, closing in self._marks)

    def _extract(self, text: str, request: Any) -> tuple[str, list[tuple[str, str]]]:
        """(text beside the calls, [(name, arguments)]); no calls when the parser found none, or fell over the text."""
        try:
            parser = self._make_tools(self._tokenizer, request.tools)
            parser.skip_reasoning_parsing = True  # it is split off already; what is left of its marks is text
            found = parser.extract_tool_calls(text, request)
        except Exception:  # whatever a parser makes of what a model wrote, it is the model's malformed call
            return text, []
        if not found.tools_called:
            return text, []
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return found.content or "", calls

    def _split_thinking(self, text: str, request: Any) -> tuple[str, str]:
        """(thinking, the rest). vLLM takes a text without any mark for thinking; here it is an answer.

        A flood of marks is split at the first that ends thinking: the parser would take seconds to come to that.
        """
        if self._make_reasoning is None:
            return "", text
        if not self._starts_thinking and not any(mark in text for mark in self._thinking_marks):
            return "", text
        opening, closing = self._thinking_marks
        if _is_flooded(text, (*MARKS, *self._marks, self._thinking_marks)):
            before, found, after = text.partition(closing)
            return (before.replace(opening, ""), after) if found else ("", text)
        thinking, said = self._make_reasoning(self._tokenizer).extract_reasoning(text, request)
        return thinking or "", said or ""

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

    def _find_thinking_marks(self) -> tuple[str, str]:
        """(opening, closing) of what is thought; without a reasoning parser nothing is."""
        if self._make_reasoning is None:
            return "", ""
        parser = self._make_reasoning(self._tokenizer)
        return parser.reasoning_start_str or "", parser.reasoning_end_str or ""


def _is_flooded(text: str, marks: Sequence[tuple[str, str]]) -> bool:
    """Whether there are more of one mark than a parser can be asked to read."""
    return any(text.count(mark) > MAX_MARKS for pair in marks for mark in pair if mark)


def _closed(text: str, opening: str, closing: str) -> bool:
    """Whether the last thing opened is closed again."""
    return text.rfind(opening) <= text.rfind(closing)


def _well_formed(name: str, arguments: str, tools: ToolSet) -> bool:
    """A name, and arguments that are a JSON object; an empty one only where the tool requires nothing."""
    given = parse_object(arguments)
    if not name or given is None or not _is_unicode(name + arguments) or not _is_unicode_inside(arguments, given):
        return False
    return bool(given) or name not in tools.demanding


def _is_unicode(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which no protocol can carry."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_unicode_inside(arguments: str, given: dict[str, Any]) -> bool:
    """The same for the values: half of a pair may be written as an escape, at which some JSON readers fail."""
    return "\\u" not in arguments or _is_unicode(json.dumps(given, ensure_ascii=False))


def _tool_set(tools: Sequence[dict[str, Any]]) -> ToolSet:
    """ValueError when vLLM does not take these tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], tools=list(tools) or None)
    functions = [tool.get("function", {}) for tool in tools]
    demanding = (f.get("name") for f in functions if _requires_arguments(f.get("parameters")))
    return ToolSet(tuple(tools), request, frozenset(demanding))


def _requires_arguments(parameters: Any) -> bool:
    return isinstance(parameters, dict) and bool(parameters.get("required"))


def _tool_call_id(call_id: str, number: int) -> str:
    """Unique in the run, in the form that OpenAI's have; letters and digits behind the prefix."""
    return "call_" + hashlib.blake2b(f"{call_id}/{number}".encode(), digest_size=12).hexdigest()


def tool_parser_class(name: str) -> Any:
    """vLLM's class of that name; imports vLLM. ConfigError when there is none."""
    _quiet_vllm()
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as err:
        raise ConfigError(f"[model] tool_parser: vLLM has no {name!r}; see `vllm serve --help`") from err


def reasoning_parser_class(name: str) -> Any:
    """vLLM's class of that name, None for no name; imports vLLM. ConfigError when there is none."""
    if not name:
        return None
    from vllm.reasoning import ReasoningParserManager

    try:
        return ReasoningParserManager.get_reasoning_parser(name)
    except KeyError as err:
        raise ConfigError(f"[model] reasoning_parser: vLLM has no {name!r}; see `vllm serve --help`") from err


def _with_vocabulary_at_hand(tokenizer: Any) -> Any:
    """vLLM's parsers ask for the whole vocabulary whenever one is made, which otherwise takes a third of a second."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def _quiet_vllm() -> None:
    """vLLM logs a traceback for every call that a model wrote badly; here that is data."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
