"""The seam between the rollout side and an agent program: how it is started and how its traces are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.records import Role


class ModelCall(Struct, frozen=True, kw_only=True):
    """A request to the model as it came over the wire: all that a classifier may look at."""

    path: str
    headers: Mapping[str, str]  # names in lower case
    body: Mapping[str, Any]


class Launch(Struct, frozen=True, kw_only=True):
    """How a harness is started in a sandbox whose current folder is the workspace.

    The harness finds its model provider at 127.0.0.1:`port`, where the sandbox's listening socket is.
    """

    argv: tuple[str, ...]
    port: int
    env: Mapping[str, str] = {}
    binds: Mapping[str, str] = {}  # path inside the sandbox -> path on the host, a file or a folder; read-only
    home_files: Mapping[str, bytes] = {}  # path below HOME (`bubblewrap.HOME`) -> content; the harness may change them


class Harness(Protocol):
    """An agent program as the runner (launch, agent_error) and the proxy (classify) see it."""

    @property
    def name(self) -> str:
        """The entry's name in the configuration."""
        ...

    @property
    def port(self) -> int:
        """The port inside the sandbox on which the harness looks for its provider."""
        ...

    def launch(self, task: Task) -> Launch:
        """How to start it on this task. TaskError when the task cannot be given to it."""
        ...

    def classify(self, call: ModelCall) -> Role:
        """What a call is for, told from the request alone."""
        ...

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """The harness's own error, from its exit code and the end of its output; None when it ended well."""
        ...
