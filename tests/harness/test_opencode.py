"""OpenCode: how it is started, how its end is read, and that the real one works on a workspace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.harness.opencode import OpenCode
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import McpConfig, ModelConfig, OpenCodeConfig
from clawpipe.pipeline.errors import ConfigError, TaskError
from clawpipe.pipeline.records import Role
from harness import sandboxed
from harness.chat_answers import SECRET, SERVER, SERVER_FILE, SERVER_PROGRAM, called, results, said, tool_names

KIND = "opencode"
TASK = sandboxed.task("Do it.")
MEMORY_BYTES = 1024**3


def harness(name: str = "policy", context_tokens: int = 65536, **config: Any) -> OpenCode:
    made = make_harness(OpenCodeConfig(**config), ModelConfig(path="/model", name=name, context_tokens=context_tokens))
    assert isinstance(made, OpenCode)
    return made


def settings(made: OpenCode, task: Any = TASK) -> dict[str, Any]:
    launch = made.launch(task)
    path = launch.env["OPENCODE_CONFIG"].removeprefix("/home/agent/")
    told: dict[str, Any] = json.loads(launch.home_files[path])
    return told


def test_the_program_is_told_where_its_model_is_and_how_much_it_takes() -> None:
    made = harness(port=9000, context_tokens=50_000, max_output_tokens=10_000)
    told = settings(made)
    provider = told["provider"]["local"]
    assert (made.launch(TASK).port, provider["options"]["baseURL"]) == (9000, "http://127.0.0.1:9000/v1")
    assert provider["models"]["policy"]["limit"] == {"context": 50_000, "input": 40_000, "output": 10_000}
    assert (told["model"], told["small_model"]) == ("local/policy", "local/policy")


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
    with pytest.raises(TaskError, match="task t/1: OpenCode takes "):
        harness().launch(sandboxed.task(prompt))


def test_variables_of_the_configuration_go_on_top_but_for_those_that_lead_to_another_provider() -> None:
    assert harness(env={"TZ": "CET"}).launch(TASK).env["TZ"] == "CET"
    with pytest.raises(ConfigError, match="env may not set OPENCODE_CONFIG"):
        harness(env={"OPENCODE_CONFIG": "/tmp/x"})


def test_mcp_servers_of_entry_and_task_are_in_its_own_file() -> None:
    entry = McpConfig(name="mine", command=("/usr/bin/x", "a b"), env={"A": "1"})
    told = settings(harness(mcp=(entry,)), sandboxed.task("p", mcp=(McpServer(name="its", command=("y",)),)))
    assert told["mcp"] == {
        "mine": {"type": "local", "command": ["/usr/bin/x", "a b"], "environment": {"A": "1"}, "enabled": True},
        "its": {"type": "local", "command": ["y"], "environment": {}, "enabled": True},
    }


def events(*said: dict[str, Any]) -> bytes:
    return b'cut off"}\n' + b"".join(json.dumps(event).encode() + b"\n" for event in said)


ERROR = {"type": "error", "error": {"name": "APIError", "data": {"message": "the\nprovider"}}}
STOPPED = {"type": "step_finish", "part": {"reason": "stop"}}
CALLED = {"type": "step_finish", "part": {"reason": "tool-calls"}}


def test_an_error_at_the_end_is_its_error_whatever_the_exit_code() -> None:
    assert harness().agent_error(0, events(CALLED, ERROR)) == "OpenCode ended with an error: the provider"
    assert harness().agent_error(1, events(ERROR)) == "OpenCode ended with an error: the provider"
    nameless = {"type": "error", "error": {"name": "UnknownError"}}
    assert harness().agent_error(1, events(nameless)) == "OpenCode ended with an error: UnknownError"


def test_an_overflow_that_it_compacted_away_is_none_though_its_exit_code_is_1() -> None:
    assert harness().agent_error(1, events(CALLED, ERROR, STOPPED, CALLED, STOPPED)) is None
    assert harness().agent_error(0, events(CALLED, STOPPED)) is None


def test_an_end_in_the_middle_is_an_error() -> None:
    said = harness().agent_error(137, events(CALLED))
    assert said is not None
    assert said.startswith("OpenCode ended with exit code 137: ")
    assert harness().agent_error(1, b"") == "OpenCode ended with exit code 1: it said nothing"


def answers(one: ModelCall) -> bytes:
    """A title, then a command, a server's tool, and the end."""
    if not one.body.get("tools"):
        return said("A title")
    steps = (
        called("bash", command="cat in.txt > out.txt && id -un && pwd", description="copy"),
        called("shed_tell"),
        said("Done."),
    )
    return steps[len(results(one))]


@pytest.mark.harness
def test_the_real_program_works_with_its_tools_and_a_servers_and_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    prompt = '--x "copy"  in.txt\nto out.txt'
    given = sandboxed.task(prompt, {"in.txt": b"content", SERVER_FILE: SERVER_PROGRAM}, mcp=(SERVER,))
    ran = sandboxed.run(harness(), given, answers, tmp_path, memory_bytes=MEMORY_BYTES)
    assert harness().agent_error(ran.exit.code or 0, ran.exit.output) is None
    assert (ran.exit.code, ran.exit.oom_kills) == (0, 0)
    assert set(ran.left.entries) == {b"in.txt", SERVER_FILE.encode(), b"out.txt"}
    assert ran.left.read("out.txt") == b"content"
    main = [one for one in ran.calls if harness().classify(one) is Role.MAIN]
    assert sorted(harness().classify(one) for one in ran.calls) == [Role.MAIN] * 3 + [Role.TITLE]
    assert main[0].body["messages"][1] == {"role": "user", "content": prompt}
    assert "shed_tell" in tool_names(main[0])
    assert "agent" in results(main[1])[0]
    assert "/work" in results(main[1])[0]
    assert SECRET in results(main[2])[1]
