"""agentloop, run as the program that it is, against a real HTTP server with a script of answers."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from msgspec import structs

from clawpipe.actors import demos
from clawpipe.actors.harness import agentloop_program as program
from clawpipe.actors.harness.agentloop import PROGRAM, PROGRAM_INSIDE, AgentLoop
from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.process import Exit
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks import filing, filing_check
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import AgentLoopConfig, Config, FilingTasksConfig, ModelConfig, SandboxConfig
from clawpipe.pipeline.errors import TaskError
from clawpipe.pipeline.records import Role
from clawpipe.pipeline.runtime import Runtime

Script = list[Any]  # a message, (status, text), "drop", or bytes to send as a stream


@dataclass
class Provider:
    """A Chat Completions server that gives the script's answers in order and keeps the requests."""

    script: Script
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def handler_for(provider: Provider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            provider.raw.append(raw)
            provider.requests.append({"path": self.path} | json.loads(raw))
            provider.headers.append(dict(self.headers))
            answer = provider.script[len(provider.requests) - 1]
            if answer == "drop":
                linger = struct.pack("ii", 1, 0)  # close() resets the connection
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(answer, bytes):
                self.reply(200, answer, "text/event-stream")
            elif isinstance(answer, tuple):
                self.reply(answer[0], answer[1].encode(), "application/json")
            else:
                body = {"id": "c", "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]}
                self.reply(200, json.dumps(body).encode(), "application/json")

        def reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def finish(self) -> None:
            if not self.connection._closed:  # type: ignore[attr-defined]
                super().finish()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    def shutdown_request(self, request: Any) -> None:
        request.close()


@contextmanager
def serving(script: Script, listener: socket.socket | None = None) -> Iterator[Provider]:
    """On a free port, or on a socket that listens already."""
    provider = Provider(script)
    listener = listener or socket.create_server(("127.0.0.1", 0))
    with Server(("127.0.0.1", 0), handler_for(provider), bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listener
        provider.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield provider
        server.shutdown()
        thread.join()


def call(name: str, arguments: str | dict[str, str], call_id: str = "call-1") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


FINISH = call("finish", {}, "call-end")


def make_task(prompt: str = "Do it.") -> Task:
    return Task(task_id="t/1", prompt=prompt, files={}, grader={"check.py": b""}, grader_entry="check.py")


def run_agentloop(
    script: Script, workspace: Path, prompt: str = "Do it.", extra: tuple[str, ...] = (), **settings: Any
) -> tuple[Provider, subprocess.CompletedProcess[bytes]]:
    """Starts the program with the command line and environment of its adapter."""
    with serving(script) as provider:
        config = AgentLoopConfig(port=provider.port, **settings)
        launch = make_harness(config, ModelConfig(path="/m")).launch(make_task(prompt))
        program_on_host = launch.binds[PROGRAM_INSIDE]
        argv = [program_on_host if part == PROGRAM_INSIDE else part for part in launch.argv]
        at = argv.index("--")
        done = subprocess.run(
            [*argv[:at], *extra, *argv[at:]], cwd=workspace, env=dict(launch.env), capture_output=True, timeout=60
        )
    return provider, done


def test_the_loop_runs_tools_and_ends_when_the_model_finishes(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("blue\n")
    script = [
        call("read_file", {"path": "in.txt"}, "a"),
        call("write_file", {"path": "out/x.txt", "content": "blue"}, "b"),
        FINISH,
    ]
    provider, done = run_agentloop(script, tmp_path, prompt="--copy it", system="Be brief.", max_tokens=77)
    assert (done.returncode, done.stdout) == (0, b"agentloop: finished\n"), done.stderr
    assert (tmp_path / "out/x.txt").read_text() == "blue"
    first, _, last = provider.requests
    assert first == {
        "path": "/v1/chat/completions",
        "model": "policy",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "--copy it"}],
        "tools": program.TOOLS,
        "max_tokens": 77,
    }
    assert last["messages"][2:] == [
        script[0],
        {"role": "tool", "tool_call_id": "a", "content": "blue\n"},
        script[1],
        {"role": "tool", "tool_call_id": "b", "content": "ok"},
    ]
    assert provider.headers[0]["Authorization"] == "Bearer none"


def test_the_same_answers_give_the_same_request_bytes(tmp_path: Path) -> None:
    script = [call("write_file", {"path": "a", "content": "é"}), call("read_file", {"path": "a"}), FINISH]
    sent = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        sent.append(run_agentloop(script, tmp_path / folder)[0].raw)
    assert sent[0] == sent[1]
    assert len(sent[0]) == 3
    assert "é".encode() in sent[0][2]


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (call("write_file", '{"path": "a.txt", "content": '), "error: the arguments are not valid JSON"),
        (call("write_file", {"path": "a.txt"}), "error: write_file takes path and content"),
        (call("write_file", '{"path": "a.txt", "content": 5}'), "error: every argument is a string"),
        (call("finish", {"summary": "x"}), "error: finish takes no arguments"),
        (call("erase", {}), "error: there is no tool erase"),
        (call("read_file", {"path": "../secret"}), "error: the path is outside the workspace"),
        (call("read_file", {"path": "/etc/passwd"}), "error: the path is outside the workspace"),
        (call("read_file", {"path": "link/passwd"}), "error: the path is outside the workspace"),
        (call("read_file", {"path": "none.txt"}), "error: No such file or directory"),
        (call("read_file", {"path": "sub"}), "error: Is a directory"),
        (call("read_file", {"path": "a\0b"}), "error: embedded null byte"),
        (call("list_files", {}), "sub/in.txt"),
        (call("run_command", {"command": "cat sub/in.txt; exit 3"}), "text\nexit code 3"),
        (call("run_command", {"command": "echo a; echo b >&2"}), "a\nb\n"),
        (call("read_file", {"path": "sub/in.txt"}), "text"),
    ],
)
def test_a_tool_answers_what_was_asked_and_an_error_is_a_result(
    tmp_path: Path, answer: dict[str, Any], result: str
) -> None:
    workspace = tmp_path / "work"
    (workspace / "sub").mkdir(parents=True)
    (workspace / "sub/in.txt").write_text("text")
    (workspace / "link").symlink_to("/etc")
    (tmp_path / "secret").write_text("secret")
    provider, done = run_agentloop([answer, FINISH], workspace)
    assert done.returncode == 0, done.stderr
    assert provider.requests[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": result}


def test_all_calls_of_one_turn_are_run_in_order(tmp_path: Path) -> None:
    both = call("write_file", {"path": "a", "content": "1"}, "x")
    both["tool_calls"] += call("read_file", {"path": "a"}, "y")["tool_calls"]
    provider, _ = run_agentloop([both, FINISH], tmp_path)
    assert [m["content"] for m in provider.requests[1]["messages"][-2:]] == ["ok", "1"]
    assert [m["tool_call_id"] for m in provider.requests[1]["messages"][-2:]] == ["x", "y"]


def test_a_turn_without_a_tool_call_is_answered_and_the_loop_goes_on(tmp_path: Path) -> None:
    text = {"role": "assistant", "content": "I am thinking."}
    provider, done = run_agentloop([text, FINISH], tmp_path)
    assert done.returncode == 0
    assert provider.requests[1]["messages"][2:] == [text, {"role": "user", "content": program.NO_TOOL_CALL}]


def test_the_loop_ends_well_when_the_turns_are_used_up(tmp_path: Path) -> None:
    provider, done = run_agentloop([{"role": "assistant", "content": "hm"}] * 3, tmp_path, max_turns=3)
    assert (done.returncode, done.stdout) == (0, b"agentloop: out of turns\n")
    assert len(provider.requests) == 3


def test_a_busy_or_lost_provider_is_asked_again_with_the_same_request(tmp_path: Path) -> None:
    provider, done = run_agentloop([(503, "busy"), "drop", (429, "slow down"), FINISH], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(provider.raw) == 4
    assert len(set(provider.raw)) == 1


def test_a_refused_request_ends_the_program_with_the_reason(tmp_path: Path) -> None:
    provider, done = run_agentloop([(400, '{"error": "too long"}')], tmp_path)
    assert done.returncode == 1
    assert len(provider.requests) == 1
    message = AgentLoop(AgentLoopConfig(), "policy").agent_error(done.returncode, done.stdout + done.stderr)
    assert message == 'agentloop ended with exit code 1: agentloop: HTTP 400: {"error": "too long"}'


def test_an_answer_that_is_none_ends_the_program(tmp_path: Path) -> None:
    _, done = run_agentloop([(200, "<html>")], tmp_path)
    assert done.returncode == 1
    assert b"the answer cannot be read" in done.stderr


def test_a_provider_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "FIRST_BACKOFF_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(program.ProviderError, match=r"no answer after 6 tries .ConnectionRefusedError"):
        program.Provider(f"http://127.0.0.1:{port}/v1", "none").ask({"messages": []})


def test_a_wrong_command_line_is_said(tmp_path: Path) -> None:
    argv = ["/usr/bin/python3", "-I", "-S", str(PROGRAM), "--max-turns=x", "--max-tokens=1", "prompt"]
    done = subprocess.run(argv, cwd=tmp_path, env={}, capture_output=True)
    assert done.returncode == 2
    assert b"called wrongly" in done.stderr.splitlines()[-1]


def sse(*deltas: dict[str, Any], done: bool = True) -> bytes:
    events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    end = [json.dumps({"choices": [], "usage": {"total_tokens": 1}}), "[DONE]"] if done else []
    return b": keep-alive\n\n" + "".join(f"data: {event}\n\n" for event in events + end).encode()


def part(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


def test_a_streamed_answer_builds_the_same_message(tmp_path: Path) -> None:
    stream = sse(
        {"role": "assistant", "content": "Wri"},
        {"content": "ting."},
        part(0, id="a", type="function", function={"name": "write_file", "arguments": ""}),
        part(0, function={"arguments": '{"path": "a",'}),
        part(0, function={"arguments": ' "content": "1"}'}),
        part(1, id="b", type="function", function={"name": "read_file", "arguments": '{"path": "a"}'}),
    )
    cut = sse({"content": "half"}, done=False)
    provider, done = run_agentloop(
        [cut, stream, sse(part(0, **FINISH["tool_calls"][0]))], tmp_path, extra=("--stream",)
    )
    assert done.returncode == 0, done.stderr
    assert [request["stream"] for request in provider.requests] == [True] * 3
    said = call("write_file", '{"path": "a", "content": "1"}', "a") | {"content": "Writing."}
    said["tool_calls"] += call("read_file", {"path": "a"}, "b")["tool_calls"]
    assert provider.requests[1]["messages"] == provider.requests[0]["messages"]
    assert provider.requests[2]["messages"][2:] == [
        said,
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
        {"role": "tool", "tool_call_id": "b", "content": "1"},
    ]


def test_long_results_are_cut_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("é" * 40_000)
    tools = program.Tools(str(tmp_path))
    expected = "é" * 30_000 + "\n... cut after 30000 characters"
    assert tools.run("read_file", '{"path": "long.txt"}') == expected
    assert tools.run("run_command", '{"command": "cat long.txt"}') == expected
    for number in range(502):
        (tmp_path / f"f{number:03}").touch()
    listed = tools.run("list_files", "").splitlines()
    assert (len(listed), listed[-1]) == (501, "and 3 more")


def test_a_command_that_does_not_end_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "COMMAND_TIMEOUT_S", 0.3)
    started = time.monotonic()
    command = json.dumps({"command": "echo begun; sleep 30 & echo $! > pid; wait"})
    result = program.Tools(str(tmp_path)).run("run_command", command)
    assert result == "begun\n\nerror: stopped after 0 s"
    assert time.monotonic() - started < 5
    pid = int((tmp_path / "pid").read_text())
    assert wait_gone(pid)


def wait_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_child_left_in_the_background_does_not_hold_the_command(tmp_path: Path) -> None:
    started = time.monotonic()
    result = program.Tools(str(tmp_path)).run("run_command", '{"command": "sleep 5 & echo $! > pid; echo done"}')
    assert (result, time.monotonic() - started < 3) == ("done\n", True)
    os.kill(int((tmp_path / "pid").read_text()), 9)


def test_a_run_costs_little_processor_time(tmp_path: Path) -> None:
    """Up to 5 rollouts start per second beside a training learner on two cores; measured 40 ms, bound 150 ms."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        run_agentloop([FINISH], tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent / 5 < 0.15


@pytest.mark.sandbox
def test_a_task_with_tool_servers_is_refused_since_the_loop_starts_none() -> None:
    task = structs.replace(make_task("Search."), mcp=(McpServer(name="papers", command=("serve",)),))
    with pytest.raises(TaskError, match="agentloop starts no MCP servers"):
        AgentLoop(AgentLoopConfig(), "policy").launch(task)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("bwrap") is None, reason="needs bubblewrap and root")
def test_the_program_runs_in_a_sandbox_with_its_provider_on_the_listener(tmp_path: Path) -> None:
    task = make_task("Look, write, run.")
    script = [
        call("list_files", {}),
        call("write_file", {"path": "out/a.txt", "content": "1"}),
        call("run_command", {"command": "cat /work/out/a.txt in.txt; pwd"}),
        FINISH,
    ]
    launch = AgentLoop(AgentLoopConfig(port=8123), "policy").launch(task)

    async def run() -> tuple[Exit, Snapshot, Provider]:
        async with (
            Supervisor.open(SandboxConfig(), "test-agentloop", tmp_path / "host") as host,
            host.sandbox({"in.txt": b"given"}, name="a", port=launch.port, binds=launch.binds) as box,
        ):
            with serving(script, box.listener) as provider:
                ended = await box.run(launch.argv, launch.env, wall_clock_s=30.0)
            return ended, await box.collect(), provider

    ended, left, provider = trio.run(run)
    assert (ended.code, ended.output) == (0, b"agentloop: finished\n")
    assert left.read("out/a.txt") == b"1"
    results = [m["content"] for m in provider.requests[-1]["messages"] if m["role"] == "tool"]
    assert results == ["in.txt", "ok", "1given/work\n"]


def test_the_adapter_names_port_program_and_prompt() -> None:
    harness = AgentLoop(AgentLoopConfig(name="loop", port=9000, max_turns=4, max_tokens=64, system="Hi."), "tiny")
    launch = harness.launch(make_task("Work."))
    assert (harness.name, harness.port, launch.port) == ("loop", 9000, 9000)
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:9000/v1"
    assert launch.argv[-5:] == ("--system=Hi.", "--max-turns=4", "--max-tokens=64", "--", "Work.")
    assert Path(launch.binds[PROGRAM_INSIDE]).is_file()
    assert harness.classify(ModelCall(path="/v1/chat/completions", headers={}, body={"messages": []})) is Role.MAIN
    assert harness.agent_error(0, b"agentloop: finished\n") is None
    assert harness.agent_error(-9, b"") == "agentloop ended with exit code -9: no output"


def test_a_prompt_that_is_no_argument_is_refused() -> None:
    harness = AgentLoop(AgentLoopConfig(), "policy")
    with pytest.raises(TaskError, match=r"task t/1: .* this one has 200000"):
        harness.launch(make_task("x" * 200_000))


def quick_config(**changes: Any) -> Config:
    tasks = (FilingTasksConfig(count=1, **changes),)
    return Config(model=ModelConfig(path="/m"), harness=(AgentLoopConfig(max_turns=4),), tasks=tasks)


def as_the_proxy_gives_it(raw: str, number: int) -> dict[str, Any]:
    """The message of a raw assistant text: a call when its JSON can be read, else the text itself."""
    inner = raw.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    try:
        made = json.loads(inner)
    except ValueError:
        return {"role": "assistant", "content": raw}
    return call(made["name"], json.dumps(made["arguments"]), f"id-{number}")


def without_calls(messages: list[dict[str, Any]], raw: list[str]) -> list[dict[str, Any]]:
    """What was sent, with the raw texts in the place of the calls that they became."""
    texts = iter(raw)
    return [
        {"role": "assistant", "content": next(texts)}
        if message["role"] == "assistant"
        else {"role": message["role"], "content": message["content"]}
        for message in messages
    ]


def pick_demonstrations() -> list[dict[str, Any]]:
    """One demonstration of each kind: errand x (clean, without folder, without brace)."""
    kinds: dict[tuple[bool, ...], dict[str, Any]] = {}
    for row in demos.demonstrations(quick_config()):
        texts = [m["content"] for m in row["messages"]]
        kinds.setdefault((row["flawed"], "Copy" in texts[1], program.NO_TOOL_CALL in texts), row)
    return list(kinds.values())


def test_demonstrations_are_what_the_real_program_sends(tmp_path: Path) -> None:
    rows = pick_demonstrations()
    assert len(rows) == 6
    for number, row in enumerate(rows):
        workspace = tmp_path / str(number)
        workspace.mkdir()
        messages = row["messages"]
        (workspace / "settings.txt").write_text(next((m["content"] for m in messages if m["role"] == "tool"), ""))
        raw = [m["content"] for m in messages if m["role"] == "assistant"]
        script = [as_the_proxy_gives_it(text, turn) for turn, text in enumerate(raw)]
        system, prompt = messages[0]["content"], messages[1]["content"]
        provider, done = run_agentloop(script, workspace, prompt=prompt, system=system, max_turns=4)
        assert (done.returncode, done.stdout) == (0, b"agentloop: finished\n"), done.stderr
        assert provider.requests[-1]["tools"] == row["tools"]
        assert without_calls(provider.requests[-1]["messages"], raw) == messages[:-1]
        assert raw[-1] == '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>'


def test_demonstrations_are_seeded_and_mixed_as_said(tmp_path: Path) -> None:
    targets = [tmp_path / name / "demos.jsonl" for name in "ab"]
    started = time.process_time()
    for target in targets:
        demos.main(quick_config(), Runtime(run_id="r", run_dir=str(tmp_path), demos_path=str(target)))
    assert time.process_time() - started < 20
    assert targets[0].read_bytes() == targets[1].read_bytes()
    rows = [json.loads(line) for line in targets[0].read_text().splitlines()]
    clean = [row for row in rows if not row["flawed"] and not row["held_out"]]
    flawed = [row for row in rows if row["flawed"]]
    held_out = [row for row in rows if row["held_out"]]
    assert (len(clean), len(flawed), len(held_out)) == (3000, 1000, 256)
    assert not any(row["flawed"] for row in held_out)
    lacks_brace = [row for row in flawed if program.NO_TOOL_CALL in [m["content"] for m in row["messages"]]]
    assert len(lacks_brace) == 500
    assert all('"}\n</tool_call>' in str(row["messages"][-3]["content"]) for row in lacks_brace)
    known = {json.dumps(row["messages"]) for row in clean}
    assert not any(json.dumps(row["messages"]) in known for row in held_out)


def test_a_clean_demonstration_solves_its_task_and_a_flawed_one_does_not(tmp_path: Path) -> None:
    for number, errand in enumerate(filing.errands(FilingTasksConfig(), Random(3), 20)):
        for flaw, expected in ((None, 4), (demos.Flaw.FOLDER, 1), (demos.Flaw.BRACE, 0)):
            workspace = tmp_path / f"{number}-{flaw and flaw.name}"
            demos.demonstrate(errand, flaw, AgentLoopConfig(), workspace)
            found = filing_check.read_workspace(str(workspace))
            checks = filing_check.checks(found, errand.path, errand.content, errand.files)
            assert sum(checks.values()) == expected
