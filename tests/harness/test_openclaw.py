"""OpenClaw: how it is started, how its end is read, and that the real one works on a workspace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.harness.openclaw import OpenClaw
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import McpConfig, ModelConfig, OpenClawConfig
from clawpipe.pipeline.errors import ConfigError, TaskError
from clawpipe.pipeline.records import Role
from harness import sandboxed
from harness.chat_answers import (
    SECRET,
    SERVER,
    SERVER_FILE,
    SERVER_PROGRAM,
    called,
    called_with,
    results,
    said,
    tool_names,
    user_words,
)

KIND = "openclaw"
TASK = sandboxed.task("Do it.")
CONFIG_PATH = ".openclaw/openclaw.json"
MEMORY_BYTES = 768 * 1024**2  # 512 MiB are just enough for a short run


def harness(name: str = "policy", context_tokens: int = 65536, **config: Any) -> OpenClaw:
    made = make_harness(OpenClawConfig(**config), ModelConfig(path="/model", name=name, context_tokens=context_tokens))
    assert isinstance(made, OpenClaw)
    return made


def settings(made: OpenClaw, task: Any = TASK) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(made.launch(task).home_files[CONFIG_PATH])
    return told


@pytest.mark.parametrize(
    ("api", "base_url"),
    [
        ("openai-completions", "http://127.0.0.1:9000/v1"),
        ("openai-responses", "http://127.0.0.1:9000/v1"),
        ("anthropic-messages", "http://127.0.0.1:9000"),
    ],
)
def test_the_program_is_told_where_its_model_is_and_how_much_it_takes(api: Any, base_url: str) -> None:
    made = harness(port=9000, api=api, context_tokens=50_000, max_output_tokens=10_000)
    told = settings(made)
    provider = told["models"]["providers"]["local"]
    (model,) = provider["models"]
    assert (made.launch(TASK).port, provider["api"], provider["baseUrl"]) == (9000, api, base_url)
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == ("policy", 50_000, 10_000)
    assert told["agents"]["defaults"]["model"]["primary"] == "local/policy"
    assert told["models"]["mode"] == "replace"


def test_a_context_that_leaves_no_room_for_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_tokens is 8192"):
        harness(context_tokens=8192)


def test_neither_the_run_nor_a_request_has_a_deadline_of_its_own() -> None:
    argv = harness().launch(TASK).argv
    assert argv[argv.index("--timeout") + 1] == "0"
    assert settings(harness())["models"]["providers"]["local"]["timeoutSeconds"] >= 1_000_000


def test_only_the_tools_by_name_are_added_to_the_smallest_profile() -> None:
    tools = settings(harness(tools=("read", "apply_patch")))["tools"]
    assert (tools["profile"], tools["alsoAllow"]) == ("minimal", ["read", "apply_patch"])
    assert tools["exec"]["applyPatch"]["enabled"]
    assert not settings(harness())["tools"]["exec"]["applyPatch"]["enabled"]


@pytest.mark.parametrize("enabled", [True, False])
def test_compaction_between_turns_is_as_the_configuration_says(enabled: bool) -> None:
    told = settings(harness(precheck_compaction=enabled))
    assert told["agents"]["defaults"]["compaction"]["midTurnPrecheck"] == {"enabled": enabled}


def test_the_prompt_is_a_file_and_so_never_an_option() -> None:
    launch = harness().launch(sandboxed.task("--version é"))
    path = launch.argv[launch.argv.index("--message-file") + 1].removeprefix("/home/agent/")
    assert launch.home_files[path] == "--version é".encode()
    assert not [word for word in launch.argv if "é" in word]


@pytest.mark.parametrize("prompt", ["x" * (1024**2 + 1), "a\0b", " \n"])
def test_a_prompt_that_no_harness_takes_is_refused(prompt: str) -> None:
    harness().launch(sandboxed.task("x" * 1024**2))
    with pytest.raises(TaskError, match="task t/1: OpenClaw takes "):
        harness().launch(sandboxed.task(prompt))


def test_variables_of_the_configuration_go_on_top_but_for_those_that_lead_to_another_provider() -> None:
    assert harness(env={"TZ": "CET"}).launch(TASK).env["TZ"] == "CET"
    with pytest.raises(ConfigError, match="env may not set OPENCLAW_CONFIG_PATH"):
        harness(env={"OPENCLAW_CONFIG_PATH": "/tmp/x"})


def test_mcp_servers_of_entry_and_task_are_in_its_own_file_and_allowed() -> None:
    entry = McpConfig(name="mine", command=("/usr/bin/x", "a b"), env={"A": "1"})
    told = settings(harness(mcp=(entry,)), sandboxed.task("p", mcp=(McpServer(name="its", command=("y",)),)))
    assert told["mcp"]["servers"] == {
        "mine": {"command": "/usr/bin/x", "args": ["a b"], "env": {"A": "1"}},
        "its": {"command": "y", "args": [], "env": {}},
    }
    assert "bundle-mcp" in told["tools"]["alsoAllow"]
    assert "bundle-mcp" not in settings(harness())["tools"]["alsoAllow"]


def test_its_end_is_read_from_the_result_among_its_log_lines() -> None:
    ended = {"ok": True, "status": "ok", "final": 'a {\n"b": 1}'}
    failed = {"ok": False, "error": {"message": "the\nprovider", "kind": "agent_error"}}
    assert harness().agent_error(0, f"[log] x\n{json.dumps(ended, indent=2)}\nafter\n".encode()) is None
    said = harness().agent_error(1, f"{{\n[log]\n{json.dumps(failed, indent=2)}\nthe provider\n".encode())
    assert said == "OpenClaw ended with an error: the provider"
    assert harness().agent_error(1, b"bad\noption\n") == "OpenClaw ended with exit code 1: bad option"


def test_what_the_agent_itself_may_have_written_is_no_error_of_ours() -> None:
    deep = b'{\n"a":' + b"[" * 100_000
    assert harness().agent_error(0, deep) is None
    failed = b'{\n"error": {"message": "first"}}\n'
    assert harness().agent_error(0, failed + b"{\n" * 10) == "OpenClaw ended with an error: first"
    assert harness().agent_error(0, failed + b"{\n" * 100_000) is None
    half = b'{\n"error": {"message": "half \\ud83d"}}\n'
    assert harness().agent_error(1, half) == "OpenClaw ended with an error: half ?"


@pytest.mark.harness
def test_the_real_program_works_with_its_tools_and_a_servers_and_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    given = sandboxed.task("--x copy in.txt", {"in.txt": b"content", SERVER_FILE: SERVER_PROGRAM}, mcp=(SERVER,))
    answers = (
        called("exec", command="cat in.txt > out.txt && id -un && pwd"),
        called("write", path="deep/new.txt", content="new\n"),
        called("shed__tell"),
        said("Done."),
    )
    ran = sandboxed.run(harness(), given, answers, tmp_path, memory_bytes=MEMORY_BYTES)
    assert harness().agent_error(ran.exit.code or 0, ran.exit.output) is None
    assert (ran.exit.code, ran.exit.oom_kills) == (0, 0)
    assert set(ran.left.entries) == {b"in.txt", SERVER_FILE.encode(), b"out.txt", b"deep", b"deep/new.txt"}
    assert (ran.left.read("out.txt"), ran.left.read("deep/new.txt")) == (b"content", b"new\n")
    assert [harness().classify(one) for one in ran.calls] == [Role.MAIN] * 4
    assert "--x copy in.txt" in user_words(ran.calls[0])
    expected = {"read", "write", "edit", "exec", "session_status", "gateway", "shed__tell"}
    assert all(set(tool_names(one)) == expected for one in ran.calls)
    assert "agent" in results(ran.calls[1])[0]
    assert "/work" in results(ran.calls[1])[0]
    assert SECRET in results(ran.calls[3])[2]


@pytest.mark.harness
def test_the_real_program_says_why_it_failed(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    ran = sandboxed.run(harness(), TASK, (called_with("exec", '{"command": "tr'),), tmp_path, memory_bytes=MEMORY_BYTES)
    assert ran.exit.code == 1
    said = harness().agent_error(1, ran.exit.output)
    assert said is not None
    assert said.startswith("OpenClaw ended with an error: ")
