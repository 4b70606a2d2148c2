"""The adapter of OpenClaw: one `openclaw agent exec` per rollout, without its Gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clawpipe.actors.harness import install, mcp, prompt_file
from clawpipe.actors.harness.base import Launch, ModelCall
from clawpipe.actors.harness.launching import environment, error_text, last_words, require_room
from clawpipe.actors.harness.request import objects, tool_names
from clawpipe.actors.sandbox.bubblewrap import HOME, WORKSPACE
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import ModelConfig, OpenClawConfig
from clawpipe.pipeline.records import Role

KIND = "openclaw"
FOLDER = ".openclaw"  # below HOME: its state, which must be there before it starts, and its configuration
CONFIG_FILE = f"{FOLDER}/openclaw.json"
NEVER_S = 1_000_000  # of a request, all in all; the wall clock of the rollout comes first
SUBAGENT_MARK = "session=agent:main:subagent:"
FLUSH_TOOLS = frozenset({"read", "write"})  # what a memory flush keeps of the tools that work on files
WORK_TOOLS = frozenset({"edit", "exec"})
MCP_TOOLS = "bundle-mcp"  # its name for the tools of all MCP servers
MAX_STARTS = 100  # of a result, that are looked at: the agent may write thousands, and each takes time
RESERVED = frozenset({"OPENCLAW_CONFIG_PATH", "OPENCLAW_STATE_DIR", "OPENCLAW_HOME"})
# A start and a shell command take 440 MiB with them and twice as much without: a short young generation, and the quick
# compiler alone for WebAssembly, which the parser of shell commands is.
_NODE_OPTIONS = ("--max-semi-space-size=4", "--liftoff-only")
_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "NODE_DISABLE_COMPILE_CACHE": "1",  # it would be written into /tmp, which is memory, and read by nobody
    "OPENCLAW_NO_RESPAWN": "1",  # else a second node does nothing but wait for the first
}


class OpenClaw:
    """One [[harness]] entry of kind "openclaw"."""

    def __init__(self, config: OpenClawConfig, model: ModelConfig) -> None:
        self._config = config
        self._model = model
        require_room(config.name, model, 2 * config.max_output_tokens)
        self._env = environment(_SETTINGS, config.env, RESERVED, config.name)
        self._work_tools = WORK_TOOLS & set(config.tools)

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """One turn of the embedded agent, with no deadline of its own."""
        servers, binds = mcp.servers(self._config.mcp, task)
        node, program = install.command(KIND)
        return Launch(
            argv=(
                *(node, *_NODE_OPTIONS, program, "agent", "exec", "--message-file", prompt_file.INSIDE),
                *("--config", f"{HOME}/{CONFIG_FILE}", "--state-dir", f"{HOME}/{FOLDER}", "--cwd", WORKSPACE),
                *("--timeout", "0", "--json"),
            ),
            port=self.port,
            env=self._env,
            binds={**install.programs(KIND, self._config.version), **binds},
            home_files={
                **prompt_file.prompt_file(task, "OpenClaw"),
                CONFIG_FILE: json.dumps(self._settings(servers)).encode(),
            },
        )

    def _settings(self, servers: Sequence[McpServer]) -> dict[str, Any]:
        """Its smallest tool profile and the tools that are allowed by name, so that every request extends the last.

        Skills and plugins are for accounts and devices that a sandbox has not; they cost half of the prompt.
        """
        compaction = {
            "midTurnPrecheck": {"enabled": self._config.precheck_compaction},
            "qualityGuard": {"enabled": False},  # it ends the run when the policy's summary lacks a heading
        }
        allowed = [*self._config.tools, *([MCP_TOOLS] if servers else [])]
        return {
            "agents": {
                "defaults": {"model": {"primary": f"local/{self._model.name}"}, "skills": [], "compaction": compaction}
            },
            "models": {"mode": "replace", "providers": {"local": self._provider()}},
            "tools": {
                "profile": "minimal",
                "alsoAllow": allowed,
                "toolSearch": False,
                "exec": {"applyPatch": {"enabled": "apply_patch" in allowed}},
            },
            "mcp": {"servers": {server.name: mcp.started(server) for server in servers}},
            "plugins": {"enabled": False},
            "session": {"maintenance": {"mode": "warn", "maxDiskBytes": 0}},  # else workers tidy an empty store
            "logging": {"audit": {"enabled": False}},
            "update": {"checkOnStart": False, "auto": {"enabled": False}},
        }

    def _provider(self) -> dict[str, Any]:
        base_url = f"http://127.0.0.1:{self.port}"
        model = {
            "id": self._model.name,
            "name": self._model.name,
            "reasoning": True,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": self._model.context_tokens,
            "maxTokens": self._config.max_output_tokens,
        }
        return {
            "baseUrl": base_url if self._config.api == "anthropic-messages" else f"{base_url}/v1",
            "apiKey": "none",
            "api": self._config.api,
            "timeoutSeconds": NEVER_S,
            "models": [model],
        }

    def classify(self, call: ModelCall) -> Role:
        """Without tools it is a summary, or, with no system prompt either, a last try for an answer in words."""
        tools = tool_names(call.body)
        if not tools:
            return Role.COMPACTION if _has_system(call.body) else Role.NUDGE
        if any(SUBAGENT_MARK in text for text in _opening_texts(call.body)):
            return Role.SUBAGENT
        if tools >= FLUSH_TOOLS and self._work_tools and not tools & self._work_tools:
            return Role.MEMORY
        return Role.MAIN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """What the result at the end of its output says; without one, the exit code."""
        result = _result(output)
        error = result.get("error")
        if isinstance(error, dict):
            return f"OpenClaw ended with an error: {error_text(error.get('message'), error.get('kind'))}"
        if exit_code:
            return f"OpenClaw ended with exit code {exit_code}: {last_words(output)}"
        return None


def _has_system(body: Mapping[str, Any]) -> bool:
    if body.get("system") or body.get("instructions"):
        return True
    return any(message.get("role") in ("system", "developer") for message in _messages(body)[:1])


def _opening_texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts before the first answer: system prompt and first user messages, one of which names the session."""
    yield from _texts(body.get("system"))
    for message in _messages(body):
        if message.get("role") not in ("system", "developer", "user"):
            return
        yield from _texts(message.get("content"))


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return objects(body.get("messages") or body.get("input"))


def _texts(content: Any) -> Iterator[str]:
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(text, str):
            yield text


def _result(output: bytes) -> dict[str, Any]:
    """The last JSON object that starts on a line of its own; log lines may stand before and after it."""
    text = output.decode("utf-8", "replace")
    starts = [match.start() for match in re.finditer(r"^\{$", text, re.MULTILINE)]
    for start in reversed(starts[-MAX_STARTS:]):
        try:
            found: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
        return found
    return {}
