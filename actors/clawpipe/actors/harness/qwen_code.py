"""The adapter of Qwen Code: one headless `qwen` per rollout, its trail of messages on standard output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from clawpipe.actors.harness import install, mcp, prompt_file
from clawpipe.actors.harness.base import Launch, ModelCall
from clawpipe.actors.harness.launching import environment, error_text, events, last_words, require_room
from clawpipe.actors.harness.request import objects, tool_names
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import ModelConfig, QwenCodeConfig
from clawpipe.pipeline.records import Role

KIND = "qwen_code"
CONFIG_FILE = ".qwen/settings.json"
MAIN_TOOL = "list_agents"
NEVER_MS = 1_000_000_000  # of a request; the wall clock of the rollout comes first
RESERVED = frozenset({"OPENAI_BASE_URL", "OPENAI_MODEL", "QWEN_MODEL", "QWEN_HOME"})
# With its full compiler for WebAssembly, node takes seconds and 2 GiB for the parser of shell commands.
_NODE_OPTIONS = ("--liftoff-only", "--expose-gc")
_SETTINGS = {
    "OPENAI_API_KEY": "none",
    "QWEN_CODE_NO_RELAUNCH": "true",  # it would start itself twice more, to set options of node
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
}


class QwenCode:
    """One [[harness]] entry of kind "qwen_code"."""

    def __init__(self, config: QwenCodeConfig, model: ModelConfig) -> None:
        self._config = config
        self._model = model
        require_room(config.name, model, 2 * config.max_output_tokens)
        address = {"OPENAI_BASE_URL": f"http://127.0.0.1:{config.port}/v1", "OPENAI_MODEL": model.name}
        self._env = environment({**_SETTINGS, **address}, config.env, RESERVED, config.name)

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """The program with the prompt on standard input: as an argument, one that begins with `-` is an option."""
        servers, binds = mcp.servers(self._config.mcp, task)
        node, entry = install.command(KIND)
        program = entry.replace("cli-entry.js", "cli.js")  # which the entry would start, with options of its own
        options = ("--yolo", "--auth-type", "openai", "--output-format", "stream-json", "--model", self._model.name)
        return Launch(
            argv=prompt_file.from_standard_input((node, *_NODE_OPTIONS, program, *options)),
            port=self.port,
            env=self._env,
            binds={**install.programs(KIND, self._config.version), **binds},
            home_files={
                **prompt_file.prompt_file(task, "Qwen Code"),
                CONFIG_FILE: json.dumps(self._settings(servers)).encode(),
            },
        )

    def _settings(self, servers: Sequence[McpServer]) -> dict[str, Any]:
        generation = {
            "contextWindowSize": self._model.context_tokens,
            "samplingParams": {"max_tokens": self._config.max_output_tokens},
            "timeout": NEVER_MS,
            "maxRetries": 3,
        }
        return {
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": self._model.name, "generationConfig": generation},
            "mcpServers": {server.name: {**mcp.started(server), "trust": True} for server in servers},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # What one session tells the next, and there is only one.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
            "tools": {"useRipgrep": False},  # its own copy of the program is not executable
        }

    def classify(self, call: ModelCall) -> Role:
        """Sub-agents lack the tool that looks after them; without any tool it is a summary of what was said."""
        tools = tool_names(call.body)
        if tools:
            return Role.MAIN if MAIN_TOOL in tools else Role.SUBAGENT
        said = any(message.get("role") == "assistant" for message in objects(call.body.get("messages")))
        return Role.COMPACTION if said else Role.UNKNOWN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """What its last result says; without one, the exit code."""
        results = [event for event in events(output) if event.get("type") == "result"]
        if results and results[-1].get("is_error"):
            return f"Qwen Code ended with an error: {_reason(results[-1])}"
        if exit_code:
            return f"Qwen Code ended with exit code {exit_code}: {last_words(output)}"
        return None


def _reason(result: dict[str, Any]) -> str:
    error = result.get("error")
    return error_text(error.get("message") if isinstance(error, dict) else error, result.get("subtype"))
