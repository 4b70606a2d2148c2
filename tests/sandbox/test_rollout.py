"""Rollouts and slots against a real peer on the other end of the link: a proxy in miniature, in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio

from clawpipe.actors import link
from clawpipe.actors.harness.base import Launch
from clawpipe.actors.proxy_link import LinkLost, connect
from clawpipe.actors.rollout import Workshop, run_rollout
from clawpipe.actors.sandbox.collect import restore_snapshot
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import VerifyConfig
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    AgentFailed,
    Infra,
    Outcome,
    RolloutRequest,
    Scored,
    TimedOut,
    VerifierInfra,
)

# The grader: half a point for the file, half for what the model said being in it.
GRADER = b"""
import json, os, sys
path = os.path.join(sys.argv[1], "answer.txt")
text = open(path).read() if os.path.exists(path) else ""
print(json.dumps({"written": float(bool(text)), "right": float(text == "42")}))
"""
# The harness: asks its provider once and writes down what it says, then does what the test wants.
HARNESS = """
import socket, sys
with socket.create_connection(("127.0.0.1", 8080), 10) as connection:
    connection.sendall(open("question.txt", "rb").read())
    answer = connection.recv(100).decode()
open("answer.txt", "w").write(answer)
"""
REQUEST = RolloutRequest(rollout_id="r-1", group_id="g-1", task_id="t/1", harness="small")


@dataclass(frozen=True)
class SmallHarness:
    """A harness of this test's own: the program above, and a tail."""

    tail: str = ""
    program: str = HARNESS
    name: str = "small"
    port: int = 8080

    def launch(self, task: Task) -> Launch:
        return Launch(argv=("python3", "-I", "-S", "-c", self.program + self.tail), port=self.port)

    def classify(self, call):
        raise AssertionError("that is the proxy's to ask")

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        return None if exit_code == 0 else f"exit code {exit_code}"


@dataclass
class SmallProxy:
    """Serves slots: hands out `requests`, answers calls on the listeners it is given, keeps what it was told."""

    path: Path
    requests: list[RolloutRequest] = field(default_factory=list)
    answer: bytes = b"42"
    leave_at: type | None = None  # closes the link instead of answering this message
    leave_in_run_s: float | None = None  # closes the link so long after Opened
    ends_aborted: bool = False  # what Settled says
    silent: bool = False  # takes connections of the harness, and answers nothing
    calls: list[bytes] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    lifetimes: list[float] = field(default_factory=list)

    async def serve(self, task_status=trio.TASK_STATUS_IGNORED) -> None:
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            await server.bind(str(self.path))
            server.listen()
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    connection, _ = await server.accept()
                    nursery.start_soon(self._slot, connection)

    async def _slot(self, connection) -> None:
        with connection:
            async with trio.open_nursery() as nursery:
                await self._talk(connection, nursery)
                nursery.cancel_scope.cancel()

    async def _talk(self, connection, nursery) -> None:
        first_call = len(self.calls)
        while True:
            await trio.lowlevel.wait_readable(connection)
            data, descriptors, _, _ = socket.recv_fds(_real(connection), link.MAX_PACKET_BYTES, 1)
            if not data:
                return
            message = link.decode_to_proxy(data)
            self.heard.append(type(message).__name__)
            if self.leave_at is type(message):
                return
            match message:
                case link.Take():
                    reply = self._next()
                    first_call = len(self.calls)
                case link.Open():
                    nursery.start_soon(self._answer_calls, socket.socket(fileno=descriptors[0]))
                    reply = link.Opened()
                    if self.leave_in_run_s is not None:
                        await connection.send(link.encode(reply))
                        await trio.sleep(self.leave_in_run_s)
                        return
                case link.Settle():
                    reply = link.Settled(num_calls=len(self.calls) - first_call, ends_aborted=self.ends_aborted)
                case link.Close():
                    self.outcomes.append(message.outcome)
                    self.lifetimes.append(message.ended_s - message.started_s)
                    reply = link.Closed()
            await connection.send(link.encode(reply))

    def _next(self) -> link.ToSlot:
        if not self.requests:
            return link.Drained()
        return link.Assigned(request=self.requests.pop(0), attempt=1)

    async def _answer_calls(self, listener: socket.socket) -> None:
        async def call(stream) -> None:
            self.calls.append(await stream.receive_some(100))
            if self.silent:
                await trio.sleep_forever()
            await stream.send_all(self.answer)

        with trio.socket.from_stdlib_socket(listener) as sock:
            await trio.serve_listeners(call, [trio.SocketListener(sock)])


def _real(connection) -> socket.socket:
    return connection._sock


def task(grader: bytes = GRADER) -> Task:
    files = {"question.txt": b"what is six times seven?"}
    return Task(task_id="t/1", prompt="", files=files, grader={"check.py": grader}, grader_entry="check.py")


def roll(
    lab,
    tmp_path: Path,
    tail: str = "",
    grader: bytes = GRADER,
    proxy=None,
    wall_clock_s=20.0,
    program: str = HARNESS,
    **request,
):
    """One rollout, with this program for a harness and its tail; the proxy that saw it."""
    proxy = proxy or SmallProxy(tmp_path / "proxy.sock")
    settings = msgspec.structs.replace(lab.config, wall_clock_s=wall_clock_s)

    async def body(host: Supervisor) -> None:
        harnesses = {"small": SmallHarness(tail, program)}
        verify = VerifyConfig(timeout_s=1.5)
        workshop = Workshop(
            host, {"t/1": task(grader)}, harnesses, settings, verify, tmp_path / "kept", EventLog("test")
        )
        assigned = link.Assigned(request=msgspec.structs.replace(REQUEST, **request), attempt=1)
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.serve)
            async with connect(proxy.path) as slot:
                failures = []
                try:
                    outcome = await run_rollout(slot, assigned, workshop)
                    assert proxy.outcomes == [outcome]
                except LinkLost as error:
                    failures.append(error)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    lab.run(body)
    return proxy


def test_a_rollout_goes_through_open_settle_close_and_is_scored(lab, tmp_path: Path) -> None:
    proxy = roll(lab, tmp_path)
    assert proxy.calls == [b"what is six times seven?"]
    assert proxy.heard == ["Open", "Settle", "Close"]
    assert proxy.outcomes == [Scored(reward=1.0, checks={"written": 1.0, "right": 1.0})]
    assert 0 < proxy.lifetimes[0] < 60


def test_a_wrong_answer_gets_its_partial_reward(lab, tmp_path: Path) -> None:
    proxy = roll(lab, tmp_path, proxy=SmallProxy(tmp_path / "proxy.sock", answer=b"41"))
    assert proxy.outcomes == [Scored(reward=0.5, checks={"written": 1.0, "right": 0.0})]


def test_the_wall_clock_gives_a_graded_timeout(lab, tmp_path: Path) -> None:
    proxy = roll(lab, tmp_path, tail="import time; time.sleep(60)", wall_clock_s=1.5)
    assert proxy.outcomes == [TimedOut(reward=1.0, checks={"written": 1.0, "right": 1.0})]


def test_the_harness_own_error_is_the_agents_and_graded(lab, tmp_path: Path) -> None:
    (outcome,) = roll(lab, tmp_path, tail="sys.exit(3)").outcomes
    assert outcome == AgentFailed(reward=1.0, message="exit code 3", checks={"written": 1.0, "right": 1.0})


def test_a_harness_that_failed_when_its_last_call_had_is_ours(lab, tmp_path: Path) -> None:
    proxy = SmallProxy(tmp_path / "proxy.sock", ends_aborted=True)
    [outcome] = roll(lab, tmp_path, "raise SystemExit(7)", proxy=proxy).outcomes
    assert isinstance(outcome, Infra)
    assert (outcome.boundary, "its last model call had failed" in outcome.message) == ("engine", True)


def test_one_that_ended_well_for_all_that_is_graded(lab, tmp_path: Path) -> None:
    proxy = SmallProxy(tmp_path / "proxy.sock", ends_aborted=True)
    [outcome] = roll(lab, tmp_path, proxy=proxy).outcomes
    assert isinstance(outcome, Scored)


def test_a_flood_of_output_is_the_agents(lab, tmp_path: Path) -> None:
    (outcome,) = roll(lab, tmp_path, tail="while True: print('x' * 100000)").outcomes
    assert (type(outcome), outcome.reward) == (AgentFailed, 1.0)
    assert "bytes of output" in outcome.message


FILL_MEMORY = "b = []\nwhile True: b.append(bytearray(8 << 20))"


def test_what_a_lack_of_memory_ended_says_so(lab, tmp_path: Path) -> None:
    limit = lab.config.memory_bytes
    said = (
        f"the sandbox ran out of memory (1 process was ended at memory_bytes = {limit}); raise [sandbox] memory_bytes"
    )
    (outcome,) = roll(lab, tmp_path, tail=FILL_MEMORY).outcomes
    assert (type(outcome), outcome.message) == (AgentFailed, f"{said}; exit code 137")


def test_a_lack_of_memory_before_the_first_call_says_so(lab, tmp_path: Path) -> None:
    silent = SmallProxy(tmp_path / "other.sock")
    silent._answer_calls = _hang_up  # type: ignore[method-assign]
    (outcome,) = roll(lab, tmp_path, program=FILL_MEMORY, proxy=silent).outcomes
    assert (type(outcome), outcome.boundary) == (Infra, "harness")
    assert outcome.message.startswith("the sandbox ran out of memory (1 process was ended at memory_bytes = ")
    assert "; raise [sandbox] memory_bytes; the harness ended with 137" in outcome.message


def test_a_workspace_over_the_limits_is_the_agents_zero(lab, tmp_path: Path) -> None:
    tail = "import os\nfor _ in range(100): os.mkdir('d'); os.chdir('d')"
    (outcome,) = roll(lab, tmp_path, tail=tail).outcomes
    assert outcome == AgentFailed(reward=0.0, message="the workspace's folders are nested deeper than 64")


def test_a_harness_that_never_called_the_model_is_infrastructure(lab, tmp_path: Path) -> None:
    (outcome,) = roll(lab, tmp_path, tail="", proxy=None, task_id="t/1").outcomes
    assert isinstance(outcome, Scored)  # with its call, it is not
    silent = SmallProxy(tmp_path / "other.sock")
    silent._answer_calls = _hang_up  # type: ignore[method-assign]
    (outcome,) = roll(lab, tmp_path, proxy=silent).outcomes
    assert (type(outcome), outcome.boundary) == (Infra, "harness")
    assert "ConnectionRefusedError" in outcome.message or "ConnectionResetError" in outcome.message


async def _hang_up(listener: socket.socket) -> None:
    listener.close()


def test_an_unknown_task_is_infrastructure_without_a_sandbox(lab, tmp_path: Path) -> None:
    proxy = roll(lab, tmp_path, task_id="t/2")
    assert proxy.heard == ["Close"]
    (outcome,) = proxy.outcomes
    assert (type(outcome), outcome.boundary) == (Infra, "task")
    assert "t/2" in outcome.message


def test_a_grader_that_hangs_keeps_the_workspace_for_later(lab, tmp_path: Path) -> None:
    (outcome,) = roll(lab, tmp_path, grader=b"import time; time.sleep(60)").outcomes
    assert isinstance(outcome, VerifierInfra)
    kept = restore_snapshot(Path(outcome.workspace).read_bytes())
    assert Path(outcome.workspace).parent == tmp_path / "kept"
    assert (kept.read("answer.txt"), kept.read("question.txt")) == (b"42", b"what is six times seven?")


def test_the_agent_is_dead_before_settling(lab, tmp_path: Path) -> None:
    """A daemon that would call the model after its parent's end has no chance to."""
    tail = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            with socket.create_connection(("127.0.0.1", 8080), 10) as connection:
                connection.sendall(b"late call")
                connection.recv(100)
        except OSError:
            pass
        time.sleep(0.005)
"""
    proxy = roll(lab, tmp_path, tail=tail)
    assert proxy.heard == ["Open", "Settle", "Close"]
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _uid(pid) == lab.config.first_uid]


def _uid(pid: str) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


@pytest.mark.parametrize("message", [link.Open, link.Settle, link.Close])
def test_a_proxy_that_leaves_ends_the_rollout(lab, tmp_path: Path, message: type) -> None:
    with pytest.raises(LinkLost, match=message.__name__):
        roll(lab, tmp_path, proxy=SmallProxy(tmp_path / "proxy.sock", leave_at=message))


def test_a_proxy_that_leaves_during_the_run_ends_it_at_once(lab, tmp_path: Path) -> None:
    proxy = SmallProxy(tmp_path / "proxy.sock", leave_in_run_s=0.3, silent=True)
    begun = time.monotonic()
    with pytest.raises(LinkLost, match="left during a rollout"):
        roll(lab, tmp_path, proxy=proxy, wall_clock_s=60)
    assert time.monotonic() - begun < 30


RUNNER = """
import sys
from pathlib import Path
from clawpipe.actors.runner import main
from clawpipe.pipeline import config, runtime
from clawpipe.pipeline.observe import start_log
start_log("actor")
main(config.restore(Path(sys.argv[1], "config.json")), runtime.load(Path(sys.argv[1])))
"""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.02)


def start_runner(lab, run_dir: Path, slots: int) -> subprocess.Popen[bytes]:
    from clawpipe.pipeline import config, runtime

    settings = config.Config(
        model=config.ModelConfig(tiny=config.TinyModelConfig()),
        harness=(config.AgentLoopConfig(name="loop"),),
        tasks=(config.FilingTasksConfig(count=4),),
        sandbox=msgspec.structs.replace(lab.config, slots=slots),
    )
    (run_dir / "config.json").write_bytes(config.dump(settings))
    runtime.save(runtime.Runtime(run_id="test-runner", run_dir=str(run_dir)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", RUNNER, str(run_dir)], env=environment, stderr=subprocess.PIPE)


def filing_request(number: int) -> RolloutRequest:
    from clawpipe.actors.tasks.load import load_tasks
    from clawpipe.pipeline.config import FilingTasksConfig

    ids = list(load_tasks((FilingTasksConfig(count=4),)))
    return RolloutRequest(rollout_id=f"f-{number}", group_id="g", task_id=ids[number % 4], harness="loop")


# The agent's model refuses every call, which agentloop takes for its end.
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def test_the_actor_runs_rollouts_in_its_slots_through_a_restart_of_the_proxy_and_ends_when_drained(
    lab, tmp_path: Path
) -> None:
    first = SmallProxy(tmp_path / "proxy.sock", [filing_request(0)], leave_at=link.Settle, answer=REFUSAL)
    second = SmallProxy(tmp_path / "proxy.sock", [filing_request(n) for n in range(6)], answer=REFUSAL)

    async def main(process: subprocess.Popen[bytes]) -> None:
        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                await nursery.start(first.serve)
                await until(lambda: "Settle" in first.heard)
                nursery.cancel_scope.cancel()
            first.path.unlink()
            async with trio.open_nursery() as nursery:
                await nursery.start(second.serve)
                await until(lambda: process.poll() is not None)
                nursery.cancel_scope.cancel()

    with start_runner(lab, tmp_path, slots=3) as process:
        trio.run(main, process)
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    assert [(type(outcome), outcome.reward) for outcome in second.outcomes] == [(AgentFailed, 0.0)] * 6, errors
    events = [json.loads(line) for line in errors.splitlines()]
    assert sum(event["event"] == "harness ended" for event in events) == 6


def test_sigterm_cuts_rollouts_hands_them_back_and_leaves_nothing(lab, tmp_path: Path) -> None:
    proxy = SmallProxy(tmp_path / "proxy.sock", [filing_request(n) for n in range(3)], silent=True)

    async def main(process: subprocess.Popen[bytes]) -> None:
        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                await nursery.start(proxy.serve)
                await until(lambda: len(proxy.calls) == 3)
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.poll() is not None)
                nursery.cancel_scope.cancel()

    with start_runner(lab, tmp_path, slots=3) as process:
        trio.run(main, process)
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    assert proxy.heard.count("Open") == 3
    assert proxy.outcomes == []  # nothing was settled: closing the links hands the requests back
    first = lab.config.first_uid
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if first <= (_uid(pid) or 0) < first + 100]
    assert not [path for path, _, _ in os.walk("/sys/fs/cgroup") if "clawpipe-test-runner" in path]
    assert list((tmp_path / "sandboxes").glob("host-*")) == []
