"""Claude Code: how it is started, how its end is read, and that the real one works on a workspace."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.claude_code import ClaudeCode
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import ClaudeCodeConfig, McpConfig, ModelConfig
from clawpipe.pipeline.errors import ConfigError, TaskError
from clawpipe.pipeline.records import Role
from harness import sandboxed

KIND = "claude_code"
TASK = sandboxed.task("Do it.")
PROMPT = '-- copy "in.txt" $HOME\té\n' + "long " * 40_000 + " \n"  # more than an argument holds


def harness(name: str = "policy", context_tokens: int = 65536, **config: Any) -> ClaudeCode:
    model = ModelConfig(path="/model", name=name, context_tokens=context_tokens)
    made = make_harness(ClaudeCodeConfig(**config), model)
    assert isinstance(made, ClaudeCode)
    return made


def result(**fields: Any) -> bytes:
    return json.dumps({"type": "result", "subtype": "success", "is_error": False, **fields}).encode() + b"\n"


def test_the_program_is_told_where_its_model_is_and_how_much_it_takes() -> None:
    launch = harness(port=9000, context_tokens=50_000, max_output_tokens=4096).launch(TASK)
    assert launch.port == 9000
    assert launch.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9000"
    assert launch.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"
    assert launch.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    assert launch.argv[launch.argv.index("--model") + 1] == "policy"


def test_every_model_that_it_may_ask_for_is_the_policy() -> None:
    env = harness("my-policy").launch(TASK).env
    asked = {name: value for name, value in env.items() if name.startswith("ANTHROPIC_DEFAULT_")}
    assert len(asked) == 4
    assert set(asked.values()) == {"my-policy"}


@pytest.mark.parametrize("name", ["claude-next", "us.anthropic.claude-x", "sonnet", "Opus", "haiku[1m]", "default"])
def test_a_model_name_that_it_takes_for_its_providers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\[model\] name = .* choose another name"):
        harness(name)


def test_a_context_that_leaves_no_room_for_a_turn_is_refused() -> None:
    harness(context_tokens=21_193, max_output_tokens=8192)
    with pytest.raises(ConfigError, match=r"21192 tokens free .* context_tokens is 21192"):
        harness(context_tokens=21_192, max_output_tokens=8192)


def test_the_prompt_comes_on_standard_input_and_so_is_never_an_option() -> None:
    launch = harness().launch(sandboxed.task("--version é"))
    path = launch.argv[2].partition("<")[2].removeprefix("/home/agent/")
    assert launch.home_files[path] == "--version é".encode()
    assert not [word for word in launch.argv if "é" in word]


@pytest.mark.parametrize("prompt", ["x" * (1024**2 + 1), "a\0b", " \n"])
def test_a_prompt_that_no_harness_takes_is_refused(prompt: str) -> None:
    harness().launch(sandboxed.task("x" * 1024**2))
    with pytest.raises(TaskError, match="task t/1: Claude Code takes a prompt of 1 to 1048576 bytes"):
        harness().launch(sandboxed.task(prompt))


def test_variables_of_the_configuration_go_on_top_but_for_the_providers_address() -> None:
    env = harness(env={"DISABLE_TELEMETRY": "0", "MINE": "1"}).launch(TASK).env
    assert (env["DISABLE_TELEMETRY"], env["MINE"], env["DISABLE_AUTOUPDATER"]) == ("0", "1", "1")
    with pytest.raises(ConfigError, match="env may not set ANTHROPIC_BASE_URL"):
        harness(env={"ANTHROPIC_BASE_URL": "http://elsewhere"})


def test_options_of_the_entry_reach_the_program() -> None:
    plain, other = harness().launch(TASK), harness(bare=True, background_tasks=True).launch(TASK)
    assert "--bare" not in plain.argv
    assert "--bare" in other.argv
    assert plain.env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] == "1"
    assert "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS" not in other.env


def test_mcp_servers_of_entry_and_task_are_in_its_own_file_and_no_others_are_read() -> None:
    entry = McpConfig(name="mine", command=("/usr/bin/x", "-a"), env={"K": "v"})
    launch = harness(mcp=(entry,)).launch(sandboxed.task("p", mcp=(McpServer(name="its", command=("y",)),)))
    path = launch.argv[launch.argv.index("--mcp-config") + 1].removeprefix("/home/agent/")
    assert "--strict-mcp-config" in launch.argv
    assert json.loads(launch.home_files[path])["mcpServers"] == {
        "mine": {"type": "stdio", "command": "/usr/bin/x", "args": ["-a"], "env": {"K": "v"}},
        "its": {"type": "stdio", "command": "y", "args": [], "env": {}},
    }


def test_the_last_result_says_whether_it_ended_well() -> None:
    ended = harness().agent_error
    assert ended(0, b"cut off\n" + result(result="done")) is None
    assert ended(0, result(is_error=True, result="first") + result(result="done")) is None
    assert ended(1, result(is_error=True, result="API\nError")) == "Claude Code ended with an error: API Error"
    assert ended(0, result(is_error=True, result="no")) == "Claude Code ended with an error: no"
    several = result(is_error=True, subtype="error_during_execution", errors=["first", "second"])
    assert ended(1, several) == "Claude Code ended with an error: first"
    assert ended(1, result(is_error=True, result=[[]], errors={}, subtype="odd")).endswith("error: odd")


def test_an_end_without_a_result_is_told_by_its_last_words() -> None:
    assert harness().agent_error(1, b"x\nno such option\n") == "Claude Code ended with exit code 1: x no such option"
    assert harness().agent_error(1, b"") == "Claude Code ended with exit code 1: it said nothing"


def turn(*blocks: dict[str, Any], input_tokens: int = 1000) -> bytes:
    """A streamed answer of the Messages API."""
    usage = {"input_tokens": input_tokens, "output_tokens": 20}
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    ]
    for index, block in enumerate(blocks):
        empty = {**block, "input": {}} if block["type"] == "tool_use" else {**block, "text": ""}
        delta = (
            {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            if block["type"] == "tool_use"
            else {"type": "text_delta", "text": block["text"]}
        )
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
    ended = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    return sandboxed.sse(*events, ended, {"type": "message_stop"})


def bash(command: str, call_id: str = "toolu_1") -> dict[str, Any]:
    call = {"command": command, "description": "d"}
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": call}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


WRITES = (turn(bash("cat in.txt > out.txt && id -un && pwd")), turn(text("Done.")))


@pytest.mark.harness
@pytest.mark.parametrize("bare", [False, True])
def test_the_real_program_calls_a_tool_and_ends(tmp_path: Path, bare: bool) -> None:
    sandboxed.require(KIND)
    given = sandboxed.task(PROMPT, {"in.txt": b"content"})
    ran = sandboxed.run(harness(bare=bare, context_tokens=400_000), given, WRITES, tmp_path)
    assert (ran.exit.code, harness().agent_error(0, ran.exit.output)) == (0, None), ran.exit.output
    assert ran.left.read("out.txt") == b"content"
    assert [call.body["model"] for call in ran.calls] == ["policy", "policy"]
    assert [harness().classify(call) for call in ran.calls] == [Role.MAIN, Role.MAIN]
    assert PROMPT in [block["text"] for block in ran.calls[0].body["messages"][0]["content"]]
    (said,) = [block for block in ran.calls[1].body["messages"][-1]["content"] if block["type"] == "tool_result"]
    assert "agent\n/work" in said["content"]
    assert ran.exit.oom_kills == 0


@pytest.mark.harness
def test_the_real_program_is_told_of_our_context_and_compacts(tmp_path: Path) -> None:
    """The reported usage is over what it keeps free of 40 000 tokens, and far below that of any model it knows."""
    sandboxed.require(KIND)
    summary = turn(text("<summary>It went well.</summary>"))
    answers = (turn(bash("true")), turn(bash("true", "toolu_2"), input_tokens=25_000), summary, turn(text("Done.")))
    small = harness(context_tokens=40_000)
    ran = sandboxed.run(small, sandboxed.task("Do it."), answers, tmp_path)
    assert [small.classify(call) for call in ran.calls] == [Role.MAIN, Role.MAIN, Role.COMPACTION, Role.MAIN]
    assert (ran.exit.code, small.agent_error(0, ran.exit.output)) == (0, None)


@pytest.mark.harness
def test_the_real_program_waits_for_its_sub_agents(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    order = {"description": "d", "prompt": "Count.", "subagent_type": "general-purpose", "model": "haiku"}
    spawn = {"type": "tool_use", "id": "toolu_1", "name": "Agent", "input": order}
    ran = sandboxed.run(harness(), TASK, (turn(spawn), turn(text("Three.")), turn(text("Done."))), tmp_path)
    assert [harness().classify(call) for call in ran.calls] == [Role.MAIN, Role.SUBAGENT, Role.MAIN]
    assert {call.body["model"] for call in ran.calls} == {"policy"}
    assert "Three." in json.dumps(ran.calls[2].body["messages"])
