"""From [[harness.mcp]] and a task's own servers to what an adapter writes into its harness's configuration.

`documents` becomes the stock server (`documents_program`, made ready by `mcp_folder`) over a read-only bind of
that folder; a `command` is the user's, and only has to exist inside the sandbox.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clawpipe.actors.harness import mcp_folder
from clawpipe.actors.sandbox.rootfs import find_python
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import AgentLoopConfig, HarnessConfig, McpConfig
from clawpipe.pipeline.errors import TaskError

DOCUMENTS = "/opt/documents"  # inside the sandbox, with a folder per entry
_PYTHON = ("/usr/bin/python3", "-I", "-S")  # as agentloop: neither site packages nor the workspace
_PYTHON_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"


def servers(configured: Sequence[McpConfig], task: Task) -> tuple[tuple[McpServer, ...], dict[str, str]]:
    """The servers of one rollout, the configured ones first, and the binds that they need.

    Does not look at the folders. TaskError when two servers share a name.
    """
    _refuse_shared_names(configured, task)
    binds = {inside(entry): entry.documents for entry in configured if entry.documents}
    if binds:
        binds[mcp_folder.INSIDE] = str(mcp_folder.folder())
    return (*map(_server, configured), *task.mcp), binds


def started(server: McpServer) -> dict[str, Any]:
    """How most programs want to be told of it in their configuration."""
    return {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}


def of(entry: HarnessConfig) -> tuple[McpConfig, ...]:
    """The servers of a [[harness]] entry; agentloop takes none."""
    return () if isinstance(entry, AgentLoopConfig) else entry.mcp


def inside(entry: McpConfig) -> str:
    """Where the sandbox sees the entry's documents."""
    return f"{DOCUMENTS}/{entry.name}"


def _server(entry: McpConfig) -> McpServer:
    command = (*_PYTHON, mcp_folder.INSIDE, inside(entry)) if entry.documents else entry.command
    return McpServer(name=entry.name, command=command, env=entry.env)


def _refuse_shared_names(configured: Sequence[McpConfig], task: Task) -> None:
    """Entries of one harness have names of their own: the configuration sees to it."""
    taken = {entry.name: "a [[harness.mcp]] entry" for entry in configured}
    for server in task.mcp:
        if server.name in taken:
            raise TaskError(
                f"task {task.task_id}: its MCP server {server.name!r} has the name of {taken[server.name]}; "
                "rename one of the two"
            )
        taken[server.name] = "another of its servers"


def problems(configured: Sequence[McpConfig], rootfs: str) -> Iterator[str]:
    """What keeps the configured servers from starting on this machine, one line each. Looks at the disk."""
    stock = [entry for entry in configured if entry.documents]
    for entry in stock:
        if not Path(entry.documents).is_dir():
            yield f"[[harness.mcp]] {entry.name}: documents = {entry.documents} is not a folder; correct the path"
    name = _python_name(rootfs) if stock else ""
    if name.startswith("python3.") and name != _PYTHON_NAME:
        yield (
            f"[[harness.mcp]] {stock[0].name}: the stock server comes with packages for {_PYTHON_NAME}, and the "
            f"sandbox's /usr/bin/python3 is {name}; set [sandbox] rootfs to one with {_PYTHON_NAME}, or run a server "
            "of your own by `command`"
        )


def _python_name(rootfs: str) -> str:
    """`python3.N` of the sandbox, since extension modules are built for one N; anything else if it cannot be told."""
    return (Path(rootfs, "usr/bin/python3").resolve() if rootfs else find_python().library).name


def prepare(configured: Sequence[McpConfig]) -> None:
    """Builds on this machine what their binds name and nobody else brings. Blocks. SandboxError."""
    if any(entry.documents for entry in configured):
        mcp_folder.prepare()
