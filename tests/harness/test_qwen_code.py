"""Qwen Code: how it is started, how its end is read, and that the real one works on a workspace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.harness.qwen_code import QwenCode
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import McpConfig, ModelConfig, QwenCodeConfig
from clawpipe.pipeline.errors import ConfigError, TaskError
from clawpipe.pipeline.records import Role
from harness import sandboxed
from harness.chat_answers import SECRET, SERVER, SERVER_FILE, SERVER_PROGRAM, called, results, said, user_words

KIND = "qwen_code"
TASK = sandboxed.task("Do it.")
CONFIG_PATH = ".qwen/settings.json"


def harness(name: str = "policy", context_tokens: int = 65536, **config: Any) -> QwenCode:
    made = make_harness(QwenCodeConfig(**config), ModelConfig(path="/model", name=name, context_tokens=context_tokens))
    assert isinstance(made, QwenCode)
    return made


def settings(made: QwenCode, task: Any = TASK) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(made.launch(task).home_files[CONFIG_PATH])
    return told


def test_the_program_is_told_where_its_model_is_and_how_much_it_takes() -> None:
    made = harness(port=9000, context_tokens=50_000, max_output_tokens=10_000)
    launch = made.launch(TASK)
    told = settings(made)["model"]
    assert (launch.port, launch.env["OPENAI_BASE_URL"]) == (9000, "http://127.0.0.1:9000/v1")
    assert (told["name"], launch.argv[launch.argv.index("--model") + 1]) == ("policy", "policy")
    assert told["generationConfig"]["contextWindowSize"] == 50_000
    assert told["generationConfig"]["samplingParams"] == {"max_tokens": 10_000}


def test_a_context_that_leaves_no_room_for_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_tokens is 8192"):
        harness(context_tokens=8192)


def test_the_prompt_comes_on_standard_input_and_so_is_never_an_option() -> None:
    launch = harness().launch(sandboxed.task("--version é"))
    path = launch.argv[2].partition("<")[2].removeprefix("/home/agent/")
    assert launch.home_files[path] == "--version é".encode()
    assert not [word for word in launch.argv if "é" in word]


@pytest.mark.parametrize("prompt", ["x" * (1024**2 + 1), "a\0b", " \n"])
def test_a_prompt_that_no_harness_takes_is_refused(prompt: str) -> None:
    harness().launch(sandboxed.task("x" * 1024**2))
    with pytest.raises(TaskError, match="task t/1: Qwen Code takes "):
        harness().launch(sandboxed.task(prompt))


def test_variables_of_the_configuration_go_on_top_but_for_those_that_lead_to_another_provider() -> None:
    assert harness(env={"TZ": "CET"}).launch(TASK).env["TZ"] == "CET"
    with pytest.raises(ConfigError, match="env may not set OPENAI_BASE_URL"):
        harness(env={"OPENAI_BASE_URL": "http://example.org"})


def test_mcp_servers_of_entry_and_task_are_in_its_own_file() -> None:
    entry = McpConfig(name="mine", command=("/usr/bin/x", "a b"), env={"A": "1"})
    told = settings(harness(mcp=(entry,)), sandboxed.task("p", mcp=(McpServer(name="its", command=("y",)),)))
    assert told["mcpServers"] == {
        "mine": {"command": "/usr/bin/x", "args": ["a b"], "env": {"A": "1"}, "trust": True},
        "its": {"command": "y", "args": [], "env": {}, "trust": True},
    }


def test_its_end_is_read_from_its_last_result() -> None:
    good = b'{"type":"result","subtype":"success","is_error":false,"result":"Done."}\n'
    bad = b'{"type":"result","subtype":"error_x","is_error":true,"error":{"message":"the\\nprovider"}}\n'
    assert harness().agent_error(0, b'cut off"}\n' + good) is None
    assert harness().agent_error(1, good + bad + b"{\n") == "Qwen Code ended with an error: the provider"
    wordless = b'{"type":"result","subtype":"error_x","is_error":true}\n'
    assert harness().agent_error(0, wordless) == "Qwen Code ended with an error: error_x"
    assert harness().agent_error(55, b"no\nresult") == "Qwen Code ended with exit code 55: no result"


@pytest.mark.harness
def test_the_real_program_works_with_its_tools_and_a_servers_and_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    """In the smallest sandbox: the shell tool took 2 GiB before node was told to compile it the quick way."""
    sandboxed.require(KIND)
    prompt = '--x "copy"  in.txt\nto out.txt'
    given = sandboxed.task(prompt, {"in.txt": b"content", SERVER_FILE: SERVER_PROGRAM}, mcp=(SERVER,))
    answers = (
        called("run_shell_command", command="cat in.txt > out.txt && id -un && pwd", is_background=False),
        called("tool_call", name="mcp__shed__tell", arguments={}),
        said("Done."),
    )
    ran = sandboxed.run(harness(), given, answers, tmp_path)
    assert harness().agent_error(ran.exit.code or 0, ran.exit.output) is None
    assert (ran.exit.code, ran.exit.oom_kills) == (0, 0)
    assert set(ran.left.entries) == {b"in.txt", SERVER_FILE.encode(), b"out.txt"}
    assert ran.left.read("out.txt") == b"content"
    assert [harness().classify(one) for one in ran.calls] == [Role.MAIN] * 3
    assert json.dumps(prompt)[1:-1] in user_words(ran.calls[0])
    assert "agent" in results(ran.calls[1])[0]
    assert "/work" in results(ran.calls[1])[0]
    assert SECRET in results(ran.calls[2])[1]


def delegating(one: ModelCall) -> bytes:
    """A main agent that starts another and goes on; the other one answers at once."""
    if harness().classify(one) is Role.SUBAGENT:
        return said("Three.")
    if not results(one):
        return called("agent", description="count", prompt="Count.", subagent_type="general-purpose")
    return said("Done.")


@pytest.mark.harness
def test_the_real_programs_sub_agents_are_told_by_their_tools(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    ran = sandboxed.run(harness(), TASK, delegating, tmp_path)
    roles = [harness().classify(one) for one in ran.calls]
    assert (roles[0], roles.count(Role.SUBAGENT), set(roles)) == (Role.MAIN, 1, {Role.MAIN, Role.SUBAGENT})
    assert "Three." in user_words(ran.calls[-1])
    assert ran.exit.code == 0
