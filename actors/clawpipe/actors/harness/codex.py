"""The adapter of Codex: one `codex exec` per rollout, its trail of events on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clawpipe.actors.harness import install, mcp, prompt_file
from clawpipe.actors.harness.base import Launch, ModelCall
from clawpipe.actors.harness.launching import environment, error_text, events, last_words, require_room
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import CodexConfig, ModelConfig
from clawpipe.pipeline.records import Role

KIND = "codex"
PROVIDER = "clawpipe"
KEY_VARIABLE = "CLAWPIPE_API_KEY"
SETTINGS_FILE = ".codex/config.toml"
TURN_HEADER = "x-codex-turn-metadata"
SUBAGENT_HEADERS = frozenset({"x-openai-subagent", "x-codex-parent-thread-id"})
RESERVED = frozenset({"CODEX_HOME", "OPENAI_BASE_URL"})
MCP_STARTUP_TIMEOUT_S = 60
WORKER_THREADS = 4  # else one for each of the host's cores, which may be more than [sandbox] max_processes


class Codex:
    """One [[harness]] entry of kind "codex"."""

    def __init__(self, config: CodexConfig, model: ModelConfig) -> None:
        require_room(config.name, model, config.max_output_tokens)
        self._config = config
        self._model = model
        ours = {KEY_VARIABLE: "none", "TOKIO_WORKER_THREADS": str(WORKER_THREADS)}
        self._env = environment(ours, config.env, RESERVED, config.name)

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def port(self) -> int:
        return self._config.port

    def launch(self, task: Task) -> Launch:
        """The program with the prompt on standard input, for which `-` stands."""
        servers, binds = mcp.servers(self._config.mcp, task)
        options = ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
        return Launch(
            argv=prompt_file.from_standard_input((*install.command(KIND), "exec", *options, "-")),
            port=self.port,
            env=self._env,
            binds={**install.programs(KIND, self._config.version), **binds},
            home_files={**prompt_file.prompt_file(task, "Codex"), SETTINGS_FILE: self._settings(servers).encode()},
        )

    def _settings(self, servers: Sequence[McpServer]) -> str:
        provider = {
            "name": PROVIDER,
            "base_url": f"http://127.0.0.1:{self.port}/v1",
            "env_key": KEY_VARIABLE,
            "wire_api": "responses",
        }
        top = {
            "model": self._model.name,
            "model_provider": PROVIDER,
            "model_context_window": self._model.context_tokens,
            # It asks for no limit of its turns, so what they may need is kept free of its history.
            "model_auto_compact_token_limit": self._model.context_tokens - self._config.max_output_tokens,
            "check_for_update_on_startup": False,
            "web_search": "disabled",
        }
        tables: list[tuple[str, Mapping[str, Any]]] = [
            ("analytics", {"enabled": False}),
            ("feedback", {"enabled": False}),
            (f"model_providers.{PROVIDER}", provider),
            *((f"mcp_servers.{_toml(server.name)}", _mcp_server(server)) for server in servers),
        ]
        return "\n".join([*_lines(top), *(line for name, table in tables for line in (f"[{name}]", *_lines(table)))])

    def classify(self, call: ModelCall) -> Role:
        """What the program says of the call in a header; without one, calls with tools are the conversation's.

        A sub-agent's compaction is the sub-agent's: it is not the main conversation that starts anew.
        """
        if not call.path.endswith("/responses"):
            return Role.UNKNOWN
        turn = _turn(call.headers)
        if turn.get("thread_source") == "subagent" or SUBAGENT_HEADERS & call.headers.keys():
            return Role.SUBAGENT
        match turn.get("request_kind"):
            case "turn":
                return Role.MAIN
            case "compaction":
                return Role.COMPACTION
            case None:
                return Role.MAIN if call.body.get("tools") else Role.COMPACTION
            case _:
                return Role.UNKNOWN

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        """The error of the last turn that failed, when the program did not end with 0."""
        if exit_code == 0:
            return None
        failed = [event for event in events(output) if event.get("type") in ("turn.failed", "error")]
        said = _reason(failed[-1]) if failed else last_words(output)
        return f"Codex ended with exit code {exit_code}: {said}"


def _mcp_server(server: McpServer) -> dict[str, Any]:
    """`required`: without it the first request can go out before the server's tools are known."""
    return {**mcp.started(server), "required": True, "startup_timeout_sec": MCP_STARTUP_TIMEOUT_S}


def _lines(table: Mapping[str, Any]) -> Iterable[str]:
    return (f"{key} = {_toml(value)}" for key, value in table.items())


def _toml(value: Any) -> str:
    """A value as TOML. Its strings are written like JSON's, but for DEL and characters over U+FFFF."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _turn(headers: Mapping[str, str]) -> dict[str, Any]:
    """What the header says; empty where it is not there or nothing that the program would write."""
    try:
        turn = json.loads(headers.get(TURN_HEADER, "{}"))
    except (ValueError, RecursionError):
        return {}
    return turn if isinstance(turn, dict) else {}


def _reason(event: dict[str, Any]) -> str:
    error = event.get("error")
    return error_text(error.get("message") if isinstance(error, dict) else event.get("message"))
