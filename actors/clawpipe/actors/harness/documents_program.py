"""The stock MCP server: searches and reads the text files of one folder, over stdio.

This file is a program of its own: `mcp_folder` puts it beside the package `mcp` and what that needs, and it runs
inside the sandbox, where the folder is bound read-only. It keeps no index: every search reads the files, a second for
some fifty megabytes, and nothing is held in memory while nobody asks.

    documents_program.py FOLDER
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_FILE_BYTES = 16 * 1024**2  # of one document; what is behind is neither found nor read
MAX_DOCUMENTS = 50_000
MAX_RESULTS = 20
MAX_QUERY_WORDS = 32
SNIPPETS = 3  # per document found
SNIPPET_CHARS = 200
LINE_CHARS = 1000  # a longer line counts as several
MAX_READ_LINES = 1000
MAX_READ_CHARS = 30_000
TF_SATURATION, LENGTH_WEIGHT = 1.2, 0.75  # BM25's k1 and b
NAME_WEIGHT = 3  # a word of the path counts like so many in the text

_WORD = re.compile(r"\w+")


class Search(BaseModel):
    """Finds documents by words of their text and name, best first, with the lines that match."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(description="Words to look for; a word also finds longer words that begin with it.")
    limit: int = Field(default=10, ge=1, le=MAX_RESULTS, description="How many documents at most.")


class Read(BaseModel):
    """Reads a document, or a part of it, with line numbers."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="A path as `search` shows it.")
    offset: int = Field(default=1, ge=1, description="The first line to read.")
    limit: int = Field(default=MAX_READ_LINES, ge=1, le=MAX_READ_LINES, description="How many lines at most.")


TOOLS: Mapping[str, type[Search] | type[Read]] = {"search": Search, "read": Read}


class Refusal(Exception):
    """What the caller did wrong, in words for the model."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a search needs to know of a document: how often it has which word of the query, and how long it is."""

    path: str  # relative to the folder
    counts: Mapping[str, int]
    size: int


class Documents:
    """The folder. Nothing outside of it is ever opened, whatever links lie in it."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)

    def search(self, query: str, limit: int) -> str:
        """The best documents as text. Refusal when there is nothing to look for."""
        words = query_words(query)
        if not words:
            raise Refusal("the query has no word in it; give some words to look for")
        found = rank(self._counted(words))
        if not found:
            return f"No document has any of: {' '.join(words)}"
        shown = [f"{len(found)} documents found."] + [self._shown(document, words) for document in found[:limit]]
        return "\n\n".join(shown)

    def read(self, path: str, offset: int, limit: int) -> str:
        """The lines from `offset` on. Refusal when there is no such document or no such line."""
        numbered = lines(self._text(path))
        if offset > max(1, len(numbered)):
            raise Refusal(f"{path} has only {len(numbered)} lines; give a smaller offset")
        taken: list[str] = []
        room = MAX_READ_CHARS
        for line in numbered[offset - 1 : offset - 1 + limit]:
            room -= len(line) + 1
            if room < 0:
                break
            taken.append(line)
        last = offset - 1 + len(taken)
        body = "\n".join(f"{number}: {line}" for number, line in enumerate(taken, start=offset))
        rest = f"\n(lines {offset} to {last} of {len(numbered)}; go on with offset {last + 1})"
        return (body or "(empty)") + (rest if last < len(numbered) else "")

    def _counted(self, words: Sequence[str]) -> Iterator[Document]:
        for path in self._paths():
            try:
                text = self._text(path)
            except Refusal:
                continue
            named = Counter({word: NAME_WEIGHT * times for word, times in count(path, words).items()})
            yield Document(path, named + count(text, words), len(text))

    def _shown(self, document: Document, words: Sequence[str]) -> str:
        numbered = lines(self._text(document.path))
        return "\n".join([f"{document.path} ({len(numbered)} lines)", *snippets(numbered, words)])

    def _paths(self) -> Iterator[str]:
        """The paths of all files, the same each time, MAX_DOCUMENTS at most."""
        left = MAX_DOCUMENTS
        for folder, folders, names in os.walk(self._folder):
            folders.sort()
            for name in sorted(names)[:left]:
                yield os.path.relpath(os.path.join(folder, name), self._folder)
            left = max(0, left - len(names))

    def _text(self, path: str) -> str:
        """The text of a document. Refusal when it is none of ours, or no text."""
        file = os.path.realpath(os.path.join(self._folder, path)) if "\0" not in path else ""
        if file != self._folder and not file.startswith(self._folder + os.sep):
            raise Refusal(f"{path!r} is outside the documents; give a path as search shows it")
        if os.path.isdir(file):
            raise Refusal(f"{path} is a folder; search finds the documents in it by its name")
        if not os.path.isfile(file):
            raise Refusal(f"there is no document {path}; search shows which there are")
        try:
            with open(file, "rb") as opened:
                data = opened.read(MAX_FILE_BYTES)
        except OSError as err:
            raise Refusal(f"{path} cannot be read: {err.strerror}") from err
        if b"\0" in data[:8192]:
            raise Refusal(f"{path} is not a text")
        return data.decode("utf-8", "replace")


def query_words(query: str) -> tuple[str, ...]:
    """The words to look for, each once, in lower case."""
    return tuple(dict.fromkeys(_WORD.findall(query.lower())))[:MAX_QUERY_WORDS]


def count(text: str, words: Sequence[str]) -> Counter[str]:
    """How many words of the text begin with which of `words`; with the longest that fits."""
    lower = text.lower()
    present = [word for word in words if word in lower]  # much quicker than the pattern, and most texts have none
    return Counter(_pattern(present).findall(lower)) if present else Counter()


def rank(documents: Iterable[Document]) -> list[Document]:
    """Those that have any of the words, best first, by BM25; equally good ones by path."""
    every = list(documents)
    mean_size = sum(document.size for document in every) / max(1, len(every)) or 1.0
    containing = Counter(word for document in every for word in document.counts)

    def score(document: Document) -> float:
        length = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * document.size / mean_size
        return sum(
            math.log(1 + (len(every) - containing[word] + 0.5) / (containing[word] + 0.5))
            * (times * (TF_SATURATION + 1) / (times + TF_SATURATION * length))
            for word, times in document.counts.items()
        )

    return sorted((each for each in every if each.counts), key=lambda each: (-score(each), each.path))


def lines(text: str) -> list[str]:
    """The lines of a document, none longer than LINE_CHARS."""
    return [
        line[start : start + LINE_CHARS]
        for line in text.splitlines()
        for start in range(0, max(1, len(line)), LINE_CHARS)
    ]


def snippets(numbered: Sequence[str], words: Sequence[str]) -> list[str]:
    """The lines with most of the words, in the document's order, each with its number."""
    matching = [(len(count(line, words)), -number) for number, line in enumerate(numbered, start=1)]
    best = sorted((-negative for hits, negative in sorted(matching, reverse=True)[:SNIPPETS] if hits))
    return [f"{number}: {_around(numbered[number - 1], words)}" for number in best]


def _around(line: str, words: Sequence[str]) -> str:
    """The line, cut to what stands round its first match."""
    found = _pattern(words).search(line.lower())
    start = max(0, found.start() - SNIPPET_CHARS // 2) if found and len(line) > SNIPPET_CHARS else 0
    return line[start : start + SNIPPET_CHARS].strip()


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})")


def listed() -> ListToolsResult:
    """The two tools as clients see them."""
    return ListToolsResult(
        tools=[Tool(name=name, description=model.__doc__, input_schema=_schema(model)) for name, model in TOOLS.items()]
    )


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {key: schema[key] for key in ("type", "properties", "required", "additionalProperties")}


def call(documents: Documents, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
    """Runs one call; what the model did wrong is a result too."""
    try:
        given = _given(name, arguments)
        if isinstance(given, Search):
            text = documents.search(given.query, given.limit)
        else:
            text = documents.read(given.path, given.offset, given.limit)
        return CallToolResult(content=[TextContent(text=text)])
    except Refusal as err:
        return CallToolResult(content=[TextContent(text=f"error: {err}")], is_error=True)


def _given(name: str, arguments: Mapping[str, Any]) -> Search | Read:
    if name not in TOOLS:
        raise Refusal(f"there is no tool {name}; there are {' and '.join(TOOLS)}")
    try:
        return TOOLS[name].model_validate(dict(arguments))
    except ValidationError as err:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in err.errors())
        raise Refusal(f"the arguments of {name} are wrong ({wrong})") from err


async def serve(documents: Documents) -> None:
    """Until the client closes our input."""

    async def on_list_tools(context: Any, params: Any) -> ListToolsResult:
        return listed()

    async def on_call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        return await anyio.to_thread.run_sync(call, documents, params.name, params.arguments or {})

    server = Server("documents", version="1", on_list_tools=on_list_tools, on_call_tool=on_call_tool)
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not os.path.isdir(argv[0]):
        sys.stderr.write(f"{__doc__}\ndocuments: give one folder\n")
        return 2
    anyio.run(serve, Documents(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
