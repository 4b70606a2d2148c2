"""Codex: how it is started, how its end is read, and that the real one works on a workspace."""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.codex import Codex
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import CodexConfig, McpConfig, ModelConfig
from clawpipe.pipeline.errors import ConfigError, TaskError
from clawpipe.pipeline.records import Role
from harness import sandboxed

KIND = "codex"
AGENTS = "multi_agent_v1"
TASK = sandboxed.task("Do it.")
PROMPT = '-- copy "in.txt" $HOME\té\n' + "long " * 40_000 + " \n"  # more than an argument holds


def harness(name: str = "policy", context_tokens: int = 65536, **config: Any) -> Codex:
    made = make_harness(CodexConfig(**config), ModelConfig(path="/model", name=name, context_tokens=context_tokens))
    assert isinstance(made, Codex)
    return made


def settings(launch: Any) -> dict[str, Any]:
    return tomllib.loads(launch.home_files[".codex/config.toml"].decode())


def test_the_program_is_told_where_its_model_is_and_how_much_it_takes() -> None:
    launch = harness(port=9000, context_tokens=50_000, max_output_tokens=10_000).launch(TASK)
    told = settings(launch)
    provider = told["model_providers"][told["model_provider"]]
    assert launch.port == 9000
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:9000/v1", "responses")
    assert provider["env_key"] in launch.env
    assert (told["model"], told["model_context_window"]) == ("policy", 50_000)
    assert told["model_auto_compact_token_limit"] == 40_000


def test_a_context_that_leaves_no_room_for_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8192 tokens free .* context_tokens is 8192"):
        harness(context_tokens=8192)


def test_the_prompt_comes_on_standard_input_and_so_is_never_an_option() -> None:
    launch = harness().launch(sandboxed.task("--version é"))
    path = launch.argv[2].partition("<")[2].removeprefix("/home/agent/")
    assert launch.home_files[path] == "--version é".encode()
    assert not [word for word in launch.argv if "é" in word]


@pytest.mark.parametrize("prompt", ["x" * (1024**2 + 1), "a\0b", " \n"])
def test_a_prompt_that_no_harness_takes_is_refused(prompt: str) -> None:
    harness().launch(sandboxed.task("x" * 1024**2))
    with pytest.raises(TaskError, match="task t/1: Codex takes a prompt of 1 to 1048576 bytes"):
        harness().launch(sandboxed.task(prompt))


def test_variables_of_the_configuration_go_on_top_but_for_the_providers_address() -> None:
    assert harness(env={"RUST_LOG": "debug"}).launch(TASK).env["RUST_LOG"] == "debug"
    with pytest.raises(ConfigError, match="env may not set CODEX_HOME"):
        harness(env={"CODEX_HOME": "/tmp"})


def test_mcp_servers_of_entry_and_task_are_in_its_own_file() -> None:
    odd = 'a"b\\c\n\x7fé😀'
    entry = McpConfig(name="mine", command=("/usr/bin/x", odd), env={"a.b": odd})
    launch = harness(mcp=(entry,)).launch(sandboxed.task("p", mcp=(McpServer(name="its.own", command=("y",)),)))
    mine, its = settings(launch)["mcp_servers"]["mine"], settings(launch)["mcp_servers"]["its.own"]
    assert (mine["command"], mine["args"], mine["env"], mine["required"]) == ("/usr/bin/x", [odd], {"a.b": odd}, True)
    assert (its["command"], its["args"], its["env"]) == ("y", [], {})


def test_its_end_is_read_from_exit_code_and_events() -> None:
    failed = b'{"type":"error","message":"first"}\n{"type":"turn.failed","error":{"message":"the\\nlast"}}\n'
    assert harness().agent_error(0, failed) is None
    assert harness().agent_error(1, failed) == "Codex ended with exit code 1: the last"
    assert harness().agent_error(2, b"x\nbad option\n") == "Codex ended with exit code 2: x bad option"


def test_what_the_agent_itself_may_have_written_is_no_error_of_ours() -> None:
    half = b"[" * 50_000 + b'\n{"type":"error","message":"half \\ud83d"}\n'
    assert harness().agent_error(1, half) == "Codex ended with exit code 1: half ?"
    assert (
        harness().agent_error(1, b'{"type":"error","message":[]}')
        == "Codex ended with exit code 1: it does not say which"
    )


def response(*items: dict[str, Any], input_tokens: int = 1000) -> bytes:
    """A streamed answer of the Responses API."""
    whole = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": 1, "model": "policy"}
    usage = {"input_tokens": input_tokens, "output_tokens": 20, "total_tokens": input_tokens + 20}
    done = [{"type": "response.output_item.done", "output_index": n, "item": item} for n, item in enumerate(items)]
    ended = {**whole, "status": "completed", "output": list(items), "usage": usage}
    return sandboxed.sse(
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        *done,
        {"type": "response.completed", "response": ended},
    )


def call(name: str, arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    call_id = f"call_{uuid.uuid4().hex}"
    made = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": name, "status": "completed"}
    return {**made, "arguments": json.dumps(arguments), **fields}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


@pytest.mark.harness
def test_the_real_program_calls_a_tool_and_ends(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    given = sandboxed.task(PROMPT, {"in.txt": b"content"})
    writes = call("exec_command", {"cmd": "cat in.txt > out.txt && id -un && pwd"})
    ran = sandboxed.run(harness(), given, (response(writes), response(said("Done."))), tmp_path)
    assert ran.exit.code == 0, ran.exit.output
    assert ran.left.read("out.txt") == b"content"
    assert [one.body["model"] for one in ran.calls] == ["policy", "policy"]
    assert [harness().classify(one) for one in ran.calls] == [Role.MAIN, Role.MAIN]
    assert PROMPT in [part["text"] for item in ran.calls[0].body["input"] for part in item.get("content", [])]
    (result,) = [item for item in ran.calls[1].body["input"] if item["type"] == "function_call_output"]
    assert "agent\n/work" in result["output"]


@pytest.mark.harness
def test_the_real_program_knows_every_setting_that_it_is_given(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    ran = sandboxed.run(harness(), TASK, (response(said("Done.")),), tmp_path)
    assert ran.exit.code == 0, ran.exit.output
    assert b"unrecognized" not in ran.exit.output
    assert b"ignored" not in ran.exit.output


@pytest.mark.harness
def test_the_real_program_is_told_of_our_context_and_compacts(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    answers = (
        response(call("exec_command", {"cmd": "true"})),
        response(call("exec_command", {"cmd": "true"}), input_tokens=21_000),
        response(said("It went well.")),
        response(said("Done.")),
    )
    small = harness(context_tokens=30_000, max_output_tokens=10_000)
    ran = sandboxed.run(small, TASK, answers, tmp_path)
    assert [small.classify(one) for one in ran.calls] == [Role.MAIN, Role.MAIN, Role.COMPACTION, Role.MAIN]
    assert ran.exit.code == 0


def delegating(one: ModelCall) -> bytes:
    """A main agent that spawns another, waits for it and ends; the other one answers at once."""
    results = [item["output"] for item in one.body["input"] if item["type"] == "function_call_output"]
    if harness().classify(one) is Role.SUBAGENT:
        return response(said("Three."))
    if not results:
        return response(call("spawn_agent", {"message": "Count."}, namespace=AGENTS))
    if len(results) == 1:
        targets = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", results[0])
        return response(call("wait_agent", {"targets": targets, "timeout_ms": 600_000}, namespace=AGENTS))
    return response(said("Done."))


@pytest.mark.harness
def test_the_real_programs_sub_agents_say_what_they_are(tmp_path: Path) -> None:
    sandboxed.require(KIND)
    ran = sandboxed.run(harness(), TASK, delegating, tmp_path)
    roles = [harness().classify(one) for one in ran.calls]
    assert (roles[0], sorted(roles)) == (Role.MAIN, [Role.MAIN, Role.MAIN, Role.MAIN, Role.SUBAGENT])
    assert "Three." in json.dumps(ran.calls[-1].body["input"])
