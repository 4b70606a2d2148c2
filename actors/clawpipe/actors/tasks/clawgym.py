"""ClawGym's row form: one task per line of a JSONL file, the hidden verifier among its input files.

A row is {prompt, hook_code, input_files: [{file_path, content}], rule | rules | rubrics, origin_template}.
Entries under reward/ (or listed in `reward_files`) are the grader; they are split off here, before any
workspace is built. The producers of the data set spell some keys differently; those spellings are accepted
and every other key is refused. Rubrics are not read: the reward is the grader's. `mcp_servers` is an addition, in
Harbor's form: tool servers that the task brings, whose programs are among its files or in the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from clawpipe.actors.tasks.task import McpServer, Task, inside_path, refuse_clashes
from clawpipe.pipeline.config import ClawGymTasksConfig
from clawpipe.pipeline.errors import TaskError
from clawpipe.pipeline.tables import MCP_NAME

HIDDEN_FOLDER = "reward"
# `python3 reward/test.py /root/.openclaw/workspace`: the interpreter's options and the workspace are optional.
_HOOK = re.compile(r"\s*python3?(?:\s+-\w+)*\s+(?:\./)?reward/(\S+)(?:\s+\S+)?\s*")
_ORIGIN_ID = re.compile(r"^id:[ \t]*(\S+)[ \t]*$", re.MULTILINE)


class InputFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a row, as text."""

    file_path: str
    content: str
    file_format: str | None = None


class RowServer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server of a row: started in the workspace, over stdio."""

    name: Annotated[str, Meta(pattern=MCP_NAME)]
    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    transport: Literal["stdio"] = "stdio"


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file, with every spelling of its keys that producers use."""

    prompt: str
    hook_code: str | None = None
    hook_lang: str | None = None
    input_files: tuple[InputFile, ...] = ()
    reward_files: tuple[InputFile, ...] = ()
    task_id: str | None = None
    origin_template: str | None = None
    rule: Any = None
    rules: Any = None
    rubrics: Any = None
    category: str | None = None
    macro_category: str | None = None
    action: Any = None
    validation_mode: str | None = None
    reward_aggregation: str | None = None
    mcp_servers: tuple[RowServer, ...] = ()


_decoder = msgspec.json.Decoder(Row)


def read_tasks(config: ClawGymTasksConfig) -> Iterator[Task]:
    """The source's tasks in the file's order, read line by line. TaskError with file and row (from 1)."""
    wanted = set(config.ids)
    taken = 0
    for number, line in _lines(Path(config.path)):
        if config.limit and taken == config.limit:
            return
        task = _parse(line, number, config)
        short_id = task.task_id.removeprefix(f"{config.name}/")
        if wanted and short_id not in wanted:
            continue
        wanted.discard(short_id)
        taken += 1
        yield task
        if config.ids and not wanted:
            return
    if wanted:
        raise TaskError(
            f"{config.path}: no row has the id {sorted(wanted)[0]!r}; correct `ids` of [[tasks]] {config.name}"
        )


def task_of_row(row: Row, task_id: str) -> Task:
    """The row as a task. ValueError, with what to do, when it cannot be used."""
    if not row.prompt.strip():
        raise ValueError("the prompt is empty; give the agent something to do")
    shown: dict[str, bytes] = {}
    hidden: dict[str, bytes] = {}
    files = [(inside_path(file.file_path), file) for file in (*row.input_files, *row.reward_files)]
    refuse_clashes(path for path, _ in files)
    given_as_hidden = {id(file) for file in row.reward_files}
    for path, file in files:
        folder, _, rest = path.partition("/")
        if folder == HIDDEN_FOLDER and rest:
            hidden[rest] = file.content.encode()
        elif id(file) in given_as_hidden:
            hidden[path] = file.content.encode()
        else:
            shown[path] = file.content.encode()
    return Task(
        task_id=task_id,
        prompt=row.prompt,
        files=shown,
        grader=hidden,
        grader_entry=_grader_entry(row, hidden),
        mcp=tuple(
            McpServer(name=server.name, command=(server.command, *server.args), env=server.env)
            for server in row.mcp_servers
        ),
    )


def row_id(row: Row, number: int) -> str:
    """The row's own id: `task_id`, or the id line of `origin_template`, or its position (`number`, from 1)."""
    origin = _ORIGIN_ID.search(row.origin_template or "")
    return row.task_id or (origin[1] if origin else f"task_{number - 1:05d}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as err:
        raise TaskError(f"{path}: cannot be read ({err.strerror}); correct `path` of [[tasks]]") from err


def _parse(line: bytes, number: int, config: ClawGymTasksConfig) -> Task:
    try:
        row = _decoder.decode(line)
        return task_of_row(row, f"{config.name}/{row_id(row, number)}")
    except msgspec.MsgspecError as err:
        raise TaskError(
            f"{config.path}: row {number}: {_explain(str(err))}; a row is a JSON object with prompt, hook_code "
            f"and input_files"
        ) from err
    except ValueError as err:
        raise TaskError(f"{config.path}: row {number}: {err}") from err


def _explain(message: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`", message)
    if unknown:
        return f"unknown key `{unknown[1]}`, remove it or correct its spelling"
    return message[:1].lower() + message[1:]


def _grader_entry(row: Row, hidden: Mapping[str, bytes]) -> str:
    if not hidden or not row.hook_code:
        raise ValueError(
            "no verifier: it needs an input_files entry under reward/ and a hook_code that runs it; add them, or "
            "leave the row out"
        )
    hook = _HOOK.fullmatch(row.hook_code)
    if hook is None:
        raise ValueError(
            f"hook_code {row.hook_code!r} is not of the form `python3 reward/<program>.py <workspace>`; bring it "
            "into this form"
        )
    entry = inside_path(hook[1])
    if entry not in hidden:
        raise ValueError(f"hook_code runs reward/{entry}, which is not among the row's files; add it or correct it")
    return entry
