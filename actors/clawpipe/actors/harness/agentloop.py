"""The adapter of agentloop, the white-box tool loop that comes with clawpipe (`agentloop_program`)."""

from __future__ import annotations

from pathlib import Path

from clawpipe.actors.harness.base import Launch, ModelCall
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import AgentLoopConfig
from clawpipe.pipeline.errors import TaskError
from clawpipe.pipeline.records import Role

PROGRAM = Path(__file__).with_name("agentloop_program.py")
PROGRAM_INSIDE = "/opt/agentloop/agentloop.py"
PYTHON = ("/usr/bin/python3", "-I", "-S")  # neither site packages nor the workspace: a quick, clean start
MAX_PROMPT_BYTES = 128 * 1024 - 1  # what Linux takes as one argument (MAX_ARG_STRLEN)


class AgentLoop:
    """One [[harness]] entry of kind "agentloop"."""

    def __init__(self, config: AgentLoopConfig, model: str) -> None:
        self._config = config
        self._model = model

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """The program with the task's prompt as its argument."""
        if task.mcp:
            raise TaskError(f"task {task.task_id}: agentloop starts no MCP servers; give it another harness")
        size = len(task.prompt.encode())
        if size > MAX_PROMPT_BYTES or "\0" in task.prompt:
            raise TaskError(
                f"task {task.task_id}: agentloop takes a prompt of at most {MAX_PROMPT_BYTES} bytes without NUL, "
                f"this one has {size}; put the text into a file of the task"
            )
        return Launch(
            argv=(*PYTHON, PROGRAM_INSIDE, *self._options(), "--", task.prompt),
            port=self.port,
            env={
                "OPENAI_BASE_URL": f"http://127.0.0.1:{self.port}/v1",
                "OPENAI_API_KEY": "none",
                "OPENAI_MODEL": self._model,
            },
            binds={PROGRAM_INSIDE: str(PROGRAM)},
        )

    def _options(self) -> tuple[str, ...]:
        return (
            f"--system={self._config.system}",
            f"--max-turns={self._config.max_turns}",
            f"--max-tokens={self._config.max_tokens}",
        )

    def classify(self, call: ModelCall) -> Role:
        """agentloop has one conversation and no calls on the side."""
        return Role.MAIN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """The last line that the program wrote, when it did not end with 0."""
        if exit_code == 0:
            return None
        lines = output.decode("utf-8", "replace").strip().splitlines()
        return f"agentloop ended with exit code {exit_code}: {lines[-1] if lines else 'no output'}"
