"""The tools of a Responses request as the model sees them, and the way back from a call to what the client calls it.

The protocol has functions in namespaces, tools that take free text and a search for tools; a model knows one flat
list of functions. A flat name is the namespace and the name with two underscores between them. Tools that the
provider would run itself (web search and its like) are left out: nobody here runs them, and a model that is not
told of them does not call them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from clawpipe.actors.proxy.dialects.openai import convert
from clawpipe.actors.proxy.messages import CallError, Fault, ToolCall, parse_object

SEARCH_NAME = "tool_search"
RUN_BY_PROVIDER = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
        "local_shell", "mcp", "programmatic_tool_calling", "shell", "web_search", "web_search_preview",
    }
)  # fmt: skip
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

HALF_CHARACTER = re.compile("[\ud800-\udfff]")
ON_ONE_LINE = {ord("\n"): " ", ord("\r"): " "}  # line ends in JSON are white space, and would cut an event in two

Name = Annotated[str, Meta(min_length=1)]


class Kind(StrEnum):
    """How a call to a tool looks on the wire."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    SEARCH = "tool_search_call"


class ToolName(Struct, frozen=True):
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    kind: Kind = Kind.FUNCTION

    @property
    def flat(self) -> str:
        """What the model calls it."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


class _Tool(Struct):
    type: str


class _Function(Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(Struct):
    syntax: str = ""
    definition: str = ""


class _Custom(Struct):
    name: Name
    description: str | None = None
    format: _Format | None = None


class _Search(Struct):
    execution: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Namespace(Struct):
    name: Name
    tools: list[dict[str, Any]]
    description: str | None = None


class Declared(Struct, frozen=True):
    """A tool: its name on both sides, and what the chat template gets."""

    name: ToolName
    function: dict[str, Any]


def declared(tools: Iterable[Mapping[str, Any]], where: str, namespace: str | None = None) -> Iterator[Declared]:
    """The tools that the model can be told of, in order. CallError (INVALID) names the field that is wrong."""
    for number, tool in enumerate(tools):
        yield from _declared(tool, f"{where}[{number}]", namespace)


def _declared(tool: Mapping[str, Any], where: str, namespace: str | None) -> Iterator[Declared]:
    kind = convert(tool, _Tool, where).type
    if kind == "function":
        function = convert(tool, _Function, where)
        yield _tool(ToolName(function.name, namespace), function.description, function.parameters)
    elif kind == "custom":
        custom = convert(tool, _Custom, where)
        yield _tool(ToolName(custom.name, namespace, Kind.CUSTOM), _with_grammar(custom), FREE_TEXT)
    elif kind == "namespace" and namespace is None:
        yield from _space(convert(tool, _Namespace, where), where)
    elif kind == "tool_search":
        search = convert(tool, _Search, where)
        if search.execution == "client":
            yield _tool(ToolName(SEARCH_NAME, None, Kind.SEARCH), search.description, search.parameters)
    elif kind not in RUN_BY_PROVIDER and not kind.startswith("web_search_preview_"):
        raise CallError(Fault.INVALID, f"A tool of type {kind!r} is not supported.", f"{where}.type")


def _space(space: _Namespace, where: str) -> Iterator[Declared]:
    """A namespace's tools; what is said about all of them stands in front of the first one's own description."""
    for number, tool in enumerate(declared(space.tools, f"{where}.tools", space.name)):
        if number == 0 and space.description:
            own = tool.function["function"].get("description")
            said = f"{space.description}\n\n{own}" if own else space.description
            tool = _tool(tool.name, said, tool.function["function"].get("parameters"))
        yield tool


def _tool(name: ToolName, description: str | None, parameters: dict[str, Any] | None) -> Declared:
    function: dict[str, Any] = {"name": name.flat}
    if description:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return Declared(name, {"type": "function", "function": function})


def _with_grammar(tool: _Custom) -> str | None:
    """The description with the grammar of the free text, which no other field of a function could hold."""
    if tool.format is None or not tool.format.definition:
        return tool.description
    grammar = f"Grammar of the input ({tool.format.syntax}):\n{tool.format.definition}"
    return f"{tool.description}\n\n{grammar}" if tool.description else grammar


def by_flat_name(tools: Sequence[Declared]) -> dict[str, ToolName]:
    """The way back. CallError where the model could not say which of two tools it means."""
    found: dict[str, ToolName] = {}
    for tool in tools:
        if found.setdefault(tool.name.flat, tool.name) != tool.name:
            raise CallError(Fault.INVALID, f"Two tools would both be called {tool.name.flat!r}.", "tools")
    return found


def wire_call(call: ToolCall, names: Mapping[str, ToolName]) -> dict[str, Any]:
    """The output item of a call, under the name that the client knows.

    A call to a free-text tool or a search with other arguments than it takes goes out as the function call that
    it is: nothing that the model wrote is left out, and the client tells it what is wrong.
    """
    name = names.get(call.name, ToolName(call.name))
    bare = call.id.removeprefix("call_")
    space = {"namespace": name.namespace} if name.namespace else {}
    base = {"call_id": call.id, "status": "completed"}
    if name.kind is Kind.CUSTOM and (text := _free_text_of(call)) is not None:
        return {"id": f"ctc_{bare}", "type": Kind.CUSTOM.value, **base, "name": name.name, **space, "input": text}
    if name.kind is Kind.SEARCH and parse_object(call.arguments) is not None:
        asked = {"execution": "client", "arguments": Raw(call.arguments.translate(ON_ONE_LINE).encode())}
        return {"id": f"tsc_{bare}", "type": Kind.SEARCH.value, **base, **asked}
    named = {"name": name.name, **space, "arguments": call.arguments}
    return {"id": f"fc_{bare}", "type": Kind.FUNCTION.value, **base, **named}


def _free_text_of(call: ToolCall) -> str | None:
    """What a call gives a free-text tool. None when it gives anything else, or half a character, which no stream
    can hold."""
    given = parse_object(call.arguments) or {}
    text = given.get("input")
    return text if len(given) == 1 and isinstance(text, str) and not HALF_CHARACTER.search(text) else None


def free_text(text: str) -> str:
    """The arguments of a call to a free-text tool."""
    return json.dumps({"input": text}, ensure_ascii=False)
