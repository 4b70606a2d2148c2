"""The adapter of OpenCode: one `opencode run` per rollout, its trail of events on standard output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from clawpipe.actors.harness import install, mcp, prompt_file
from clawpipe.actors.harness.base import Launch, ModelCall
from clawpipe.actors.harness.launching import environment, error_text, events, last_words, require_room
from clawpipe.actors.harness.request import objects
from clawpipe.actors.sandbox.bubblewrap import HOME
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import ModelConfig, OpenCodeConfig
from clawpipe.pipeline.records import Role

KIND = "opencode"
CONFIG_FILE = ".clawpipe/opencode.json"
PARENT_HEADER = "x-parent-session-id"
RESERVED = frozenset({"OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT", "OPENCODE_CONFIG_DIR"})
_SETTINGS = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",  # it would fetch them from npm
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


class OpenCode:
    """One [[harness]] entry of kind "opencode"."""

    def __init__(self, config: OpenCodeConfig, model: ModelConfig) -> None:
        self._config = config
        self._model = model
        require_room(config.name, model, 2 * config.max_output_tokens)
        self._env = environment(
            {**_SETTINGS, "OPENCODE_CONFIG": f"{HOME}/{CONFIG_FILE}"}, config.env, RESERVED, config.name
        )

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """The program with the prompt on standard input: it puts arguments with blanks in quotation marks."""
        servers, binds = mcp.servers(self._config.mcp, task)
        command = (*install.command(KIND), "run", "--format", "json", "--auto")
        return Launch(
            argv=prompt_file.from_standard_input(command),
            port=self.port,
            env=self._env,
            binds={**install.programs(KIND, self._config.version), **binds},
            home_files={
                **prompt_file.prompt_file(task, "OpenCode"),
                CONFIG_FILE: json.dumps(self._settings(servers)).encode(),
            },
        )

    def _settings(self, servers: Sequence[McpServer]) -> dict[str, Any]:
        model = f"local/{self._model.name}"
        return {
            "model": model,
            "small_model": model,  # which writes the titles
            "provider": {"local": self._provider()},
            "mcp": {server.name: _mcp_server(server) for server in servers},
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }

    def _provider(self) -> dict[str, Any]:
        context, output = self._model.context_tokens, self._config.max_output_tokens
        # With `input`, it compacts when less than a turn is left beside the next one: room for what a tool gives back.
        limit = {"context": context, "input": context - output, "output": output}
        model = {"name": self._model.name, "tool_call": True, "reasoning": True, "limit": limit}
        return {
            "npm": "@ai-sdk/openai-compatible",  # comes with the program
            "name": "local",
            "options": {"baseURL": f"http://127.0.0.1:{self.port}/v1", "apiKey": "none", "timeout": False},
            "models": {self._model.name: model},
        }

    def classify(self, call: ModelCall) -> Role:
        """Without tools it is a title for what the user asked, or a summary of what was said since."""
        if not call.body.get("tools"):
            roles = [message.get("role") for message in objects(call.body.get("messages"))]
            return Role.TITLE if roles.count("user") > 1 else Role.COMPACTION
        return Role.SUBAGENT if PARENT_HEADER in call.headers else Role.MAIN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """The last error among its events, unless it went on after it; its exit code does not tell the difference."""
        ends = [event for event in events(output) if event.get("type") in ("error", "step_finish")]
        if ends and ends[-1]["type"] == "error":
            return f"OpenCode ended with an error: {_reason(ends[-1].get('error'))}"
        if exit_code and not (ends and _is_last_step(ends[-1])):
            return f"OpenCode ended with exit code {exit_code}: {last_words(output)}"
        return None


def _mcp_server(server: McpServer) -> dict[str, Any]:
    return {"type": "local", "command": list(server.command), "environment": dict(server.env), "enabled": True}


def _is_last_step(event: dict[str, Any]) -> bool:
    """Whether the model had nothing more to do."""
    part = event.get("part")
    return isinstance(part, dict) and part.get("reason") != "tool-calls"


def _reason(error: Any) -> str:
    """An error has a name, and most of them a message."""
    if not isinstance(error, dict):
        return error_text(error)
    data = error.get("data")
    return error_text(data.get("message") if isinstance(data, dict) else None, error.get("name"))
