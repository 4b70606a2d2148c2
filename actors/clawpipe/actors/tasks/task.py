"""A task as the runner needs it: what the agent is told and given, and the hidden program that grades it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from msgspec import Struct


class McpServer(Struct, frozen=True, kw_only=True):
    """An MCP server as a harness starts it inside the sandbox, over stdio."""

    name: str
    command: tuple[str, ...]  # program and arguments
    env: Mapping[str, str] = {}


class Task(Struct, frozen=True, kw_only=True):
    """One task. Paths are relative, normalised and inside their folder.

    `files` is the workspace before the agent starts. `grader` is the hidden folder: it is laid out in the
    grader's sandbox and nowhere else. `grader_entry` names the Python program in it that is run with the
    workspace's path and prints a JSON object of checks.
    """

    task_id: str  # "<source name>/<id>"
    prompt: str
    files: Mapping[str, bytes]
    grader: Mapping[str, bytes]
    grader_entry: str
    mcp: tuple[McpServer, ...] = ()  # tool servers that this task brings along


def inside_path(text: str) -> str:
    """The normal form of a relative path. ValueError, with what to do, when it is none or could lead out."""
    path = PurePosixPath(text)
    if path.is_absolute():
        raise ValueError(f"the path {text!r} is absolute; make it relative to the workspace")
    if ".." in path.parts or not path.parts or "\0" in text:
        raise ValueError(f"the path {text!r} leads out of the workspace or nowhere; give a path inside it")
    return str(path)


def refuse_clashes(paths: Iterable[str]) -> None:
    """ValueError when one normalised path is there twice, or is a file and also the folder of another."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ValueError(f"the path {path!r} is there twice; keep one of the two")
        seen.add(path)
    for path in seen:
        for folder in map(str, PurePosixPath(path).parents):
            if folder in seen:
                raise ValueError(f"the path {folder!r} is a file and the folder of {path!r}; rename one of them")
