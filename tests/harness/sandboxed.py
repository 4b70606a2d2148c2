"""Runs a real harness in a real sandbox against a provider that says what the test wrote down, and remembers calls.

The provider is no proxy: it speaks just enough HTTP for one program, so that what an adapter says of its program
(arguments, files, variables) is tested without anything else that could fail.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import pytest
import trio

from clawpipe.actors.harness import install
from clawpipe.actors.harness.base import Harness, ModelCall
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.process import Exit
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import SandboxConfig

FIRST_UID = 330_000
WALL_CLOCK_S = 600.0  # far more than any run needs: a loaded machine fails no test
READ_BYTES = 64 * 1024


@dataclass
class Provider:
    """Answers each call with the next of `answers`, a stream of events, and the last one again and again.

    Or with what the function `answers` makes of the call.
    """

    answers: Sequence[bytes] | Callable[[ModelCall], bytes]
    calls: list[ModelCall] = field(default_factory=list)

    async def serve(self, stream: trio.abc.Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        async with stream:
            while True:
                request, body = await _receive(connection, stream)
                if request is None:
                    return
                await stream.send_all(self._reply(connection, request, body))
                connection.start_next_cycle()

    def _reply(self, connection: h11.Connection, request: h11.Request, body: bytes) -> bytes:
        path = request.target.decode().partition("?")[0]
        if request.method != b"POST":
            return _whole(connection, 404, b"{}", "application/json")
        headers = {name.decode(): value.decode() for name, value in request.headers}
        self.calls.append(ModelCall(path=path, headers=headers, body=json.loads(body)))
        return _whole(connection, 200, self._answer(), "text/event-stream")

    def _answer(self) -> bytes:
        if callable(self.answers):
            return self.answers(self.calls[-1])
        return self.answers[min(len(self.calls), len(self.answers)) - 1]


async def _receive(connection: h11.Connection, stream: trio.abc.Stream) -> tuple[h11.Request | None, bytes]:
    request, body = None, b""
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(READ_BYTES))
            case h11.Request() as request:
                pass
            case h11.Data() as part:
                body += part.data
            case h11.EndOfMessage():
                return request, body
            case _:
                return None, body


def _whole(connection: h11.Connection, status: int, body: bytes, kind: str) -> bytes:
    headers = [("content-type", kind), ("content-length", str(len(body)))]
    parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    return b"".join(connection.send(part) or b"" for part in parts)


@dataclass(frozen=True)
class Ran:
    """How it went."""

    exit: Exit
    left: Snapshot
    calls: list[ModelCall]


def require(kind: str) -> None:
    """Skips the test where the program or the sandbox is not to be had."""
    if (problem := install.missing(kind)) is not None:
        pytest.skip(problem)
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("needs root and bubblewrap")


def run(
    harness: Harness,
    task: Task,
    answers: Sequence[bytes] | Callable[[ModelCall], bytes],
    work_dir: Path,
    **sandbox: Any,
) -> Ran:
    """One run; `sandbox` replaces fields of [sandbox]."""
    provider = Provider(answers)
    config = SandboxConfig(first_uid=FIRST_UID, **sandbox)

    async def main() -> Ran:
        launch = harness.launch(task)
        inside = {"port": launch.port, "binds": launch.binds, "home_files": launch.home_files}
        async with (
            Supervisor.open(config, "test", work_dir) as host,
            host.sandbox(task.files, name="one", **inside) as box,
        ):
            async with trio.open_nursery() as nursery:
                listener = trio.SocketListener(trio.socket.from_stdlib_socket(box.listener))
                nursery.start_soon(trio.serve_listeners, provider.serve, [listener])
                exit = await box.run(launch.argv, launch.env, wall_clock_s=WALL_CLOCK_S)
                nursery.cancel_scope.cancel()
            return Ran(exit, await box.collect(), provider.calls)

    ran: Ran = trio.run(main)
    return ran


def task(prompt: str, files: Mapping[str, bytes] | None = None, **fields: Any) -> Task:
    """A task without a grader."""
    return Task(task_id="t/1", prompt=prompt, files=files or {}, grader={}, grader_entry="", **fields)


def sse(*events: Mapping[str, Any]) -> bytes:
    """Server-sent events whose names are their types."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
