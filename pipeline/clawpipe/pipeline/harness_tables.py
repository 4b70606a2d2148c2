"""The [[harness]] entries of the configuration: one Struct per agent program, told apart by `kind`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from clawpipe.pipeline.tables import MCP_NAME, Name, PortInside, Positive, Table, Variable


class AgentLoopConfig(Table, frozen=True, kw_only=True, tag_field="kind", tag="agentloop"):
    """[[harness]] kind = "agentloop": the white-box tool loop that comes with clawpipe."""

    name: Name = "agentloop"
    weight: Annotated[float, Meta(gt=0)] = 1.0
    port: PortInside = 8080  # inside the sandbox
    system: str = "You work on files. Call one tool per turn."
    max_turns: Positive = 20
    max_tokens: Positive = 1024  # per turn


class McpConfig(Table, frozen=True, kw_only=True):
    """[[harness.mcp]]: an MCP server that the harness starts inside the sandbox, in its own way, over stdio.

    Either a `command` of yours, or `documents`: the stock server that searches and reads a folder of this host.
    """

    name: Annotated[str, Meta(pattern=MCP_NAME)]
    command: tuple[str, ...] = ()  # program and arguments, as they are inside the sandbox
    documents: str = ""  # a folder on this host; the sandbox sees it read-only
    env: dict[Variable, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.documents):
            raise ValueError(f"set exactly one of `command` and `documents` for the server {self.name!r}")
        if self.command and not self.command[0]:
            raise ValueError(f"the `command` of the server {self.name!r} is empty; begin it with a program")


class _InstalledHarness(Table, frozen=True, kw_only=True):
    """What the entries of all harnesses from npm share; `clawpipe harness install` puts them into the cache."""

    weight: Annotated[float, Meta(gt=0)] = 1.0
    port: PortInside = 8080  # inside the sandbox
    version: str = ""  # of its npm package; empty: the one that this clawpipe was tested with
    max_output_tokens: Positive = 8192  # that the harness is told a turn may have
    env: dict[Variable, str] = field(default_factory=dict)  # on top of what the adapter sets
    mcp: tuple[McpConfig, ...] = ()

    def __post_init__(self) -> None:
        names = [server.name for server in self.mcp]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two [[harness.mcp]] entries are called {name!r}; give each server its own name")


class OpenClawConfig(_InstalledHarness, frozen=True, kw_only=True, tag_field="kind", tag="openclaw"):
    """[[harness]] kind = "openclaw": one `openclaw agent exec` per rollout."""

    name: Name = "openclaw"
    api: Literal["openai-completions", "anthropic-messages", "openai-responses"] = "openai-completions"
    tools: tuple[str, ...] = ("read", "write", "edit", "exec")  # beside those of its minimal profile
    precheck_compaction: bool = False  # compacts by its own count between turns, not only on an overflow


class ClaudeCodeConfig(_InstalledHarness, frozen=True, kw_only=True, tag_field="kind", tag="claude_code"):
    """[[harness]] kind = "claude_code": one `claude -p` per rollout."""

    name: Name = "claude_code"
    bare: bool = False  # its smallest system prompt and three tools
    background_tasks: bool = False  # sub-agents in the background; without, the main loop waits for them


class CodexConfig(_InstalledHarness, frozen=True, kw_only=True, tag_field="kind", tag="codex"):
    """[[harness]] kind = "codex": one `codex exec` per rollout."""

    name: Name = "codex"


class OpenCodeConfig(_InstalledHarness, frozen=True, kw_only=True, tag_field="kind", tag="opencode"):
    """[[harness]] kind = "opencode": one `opencode run` per rollout."""

    name: Name = "opencode"


class QwenCodeConfig(_InstalledHarness, frozen=True, kw_only=True, tag_field="kind", tag="qwen_code"):
    """[[harness]] kind = "qwen_code": one `qwen` per rollout."""

    name: Name = "qwen_code"


InstalledHarnessConfig = OpenClawConfig | ClaudeCodeConfig | CodexConfig | OpenCodeConfig | QwenCodeConfig
HarnessConfig = AgentLoopConfig | InstalledHarnessConfig
