"""The adapter of Claude Code: one `claude -p` per rollout, its trail of events on standard output."""

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
from clawpipe.pipeline.config import ClaudeCodeConfig, ModelConfig
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.records import Role

KIND = "claude_code"
AGENT_HEADER = "x-claude-code-agent-id"
MCP_FILE = ".claude/clawpipe-mcp.json"
COMPACTION_RESERVE_TOKENS = 13_000  # it compacts when less than this and one turn is left of the context
# Names that the program maps to models of its own provider.
ALIASES = frozenset({"default", "best", "fable", "haiku", "opus", "opusplan", "sonnet", "inherit"})
RESERVED = frozenset({"ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"})
_SETTINGS = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    # Its suffix changes with the first user message, and would part the system prompts of all tasks.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",
    "MCP_TIMEOUT": "60000",  # ms until a server answers; later the conversation begins without its tools
}


class ClaudeCode:
    """One [[harness]] entry of kind "claude_code"."""

    def __init__(self, config: ClaudeCodeConfig, model: ModelConfig) -> None:
        if "claude" in model.name.lower() or model.name.lower().partition("[")[0] in ALIASES:
            raise ConfigError(
                f"[[harness]] {config.name}: Claude Code takes [model] name = {model.name!r} for one of its provider's "
                "models and ignores context_tokens; choose another name, like 'policy'"
            )
        require_room(config.name, model, config.max_output_tokens + COMPACTION_RESERVE_TOKENS)
        self._config = config
        self._model = model
        self._env = environment(self._own_env(), config.env, RESERVED, config.name)

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """The program with the prompt on standard input."""
        servers, binds = mcp.servers(self._config.mcp, task)
        options = ["--bare"] if self._config.bare else []
        command = (
            *install.command(KIND),
            *("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions", *options),
            *("--model", self._model.name, "--strict-mcp-config", "--mcp-config", f"{HOME}/{MCP_FILE}"),
        )
        return Launch(
            argv=prompt_file.from_standard_input(command),
            port=self.port,
            env=self._env,
            binds={**install.programs(KIND, self._config.version), **binds},
            home_files={
                **prompt_file.prompt_file(task, "Claude Code"),
                MCP_FILE: json.dumps({"mcpServers": _mcp_servers(servers)}).encode(),
            },
        )

    def _own_env(self) -> dict[str, str]:
        name = self._model.name
        # The models that sub-agents and side jobs of the program may ask for: all of them are the policy.
        models = {f"ANTHROPIC_DEFAULT_{family}_MODEL": name for family in ("HAIKU", "SONNET", "OPUS", "FABLE")}
        background = {} if self._config.background_tasks else {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}
        return {
            **_SETTINGS,
            **models,
            **background,
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{self.port}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(self._model.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self._config.max_output_tokens),
        }

    def classify(self, call: ModelCall) -> Role:
        """Sub-agents say so; compaction is the call whose end the program does not want cached.

        Everything that it sends to the model it wants to build on, so the last user message, or what follows it,
        carries a cache mark. Only the request for a summary is appended to the conversation and then thrown away:
        there the mark stays on a message before it. Calls without tools of the program's own are side jobs, like a
        search that the provider would run.
        """
        if not call.path.endswith("/messages"):
            return Role.UNKNOWN
        if AGENT_HEADER in call.headers:
            return Role.SUBAGENT
        if not any(_is_own(tool) for tool in objects(call.body.get("tools"))):
            return Role.UNKNOWN
        messages = objects(call.body.get("messages"))
        marked = [index for index, message in enumerate(messages) if _is_marked(message)]
        asked = [index for index, message in enumerate(messages) if message.get("role") == "user"]
        return Role.COMPACTION if marked and marked[-1] < max(asked, default=0) else Role.MAIN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """What its last result says: background tasks give several, and an error may come with exit code 0."""
        results = [event for event in events(output) if event.get("type") == "result"]
        if results and results[-1].get("is_error"):
            return f"Claude Code ended with an error: {_reason(results[-1])}"
        if exit_code:
            return f"Claude Code ended with exit code {exit_code}: {last_words(output)}"
        return None


def _mcp_servers(servers: Sequence[McpServer]) -> dict[str, Any]:
    return {server.name: {"type": "stdio", **mcp.started(server)} for server in servers}


def _is_own(tool: dict[str, Any]) -> bool:
    """Whether the program runs the tool itself: those that its provider would run have a type of their own."""
    return tool.get("type") in (None, "custom")


def _is_marked(message: dict[str, Any]) -> bool:
    """Whether one of its blocks carries a cache mark."""
    return any("cache_control" in block for block in objects(message.get("content")))


def _reason(result: dict[str, Any]) -> str:
    errors = result.get("errors")
    return error_text(result.get("result"), *(errors if isinstance(errors, list) else ()), result.get("subtype"))
