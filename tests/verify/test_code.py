"""Graders in real sandboxes: the verdict is the grader's own, whatever the agent left for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from clawpipe.actors.sandbox.collect import Entry, File, Link, Snapshot
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.load import load_tasks
from clawpipe.actors.tasks.task import Task
from clawpipe.actors.verify.code import GradeFailed, grade
from clawpipe.actors.verify.score import Graded
from clawpipe.pipeline.config import ClawGymTasksConfig, FilingTasksConfig, SandboxConfig, VerifyConfig
from clawpipe.pipeline.errors import SandboxError

ROWS = Path(os.environ.get("CLAWGYM_ROWS", "no-rows"))  # a folder with train.jsonl and eval.jsonl
needs_rows = pytest.mark.skipif(not ROWS.is_dir(), reason="needs ClawGym's rows; name their folder in CLAWGYM_ROWS")
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("bwrap") is None, reason="needs bubblewrap and root"),
]

Files = Mapping[str, str | bytes]


def snapshot(*layers: Files) -> Snapshot:
    """Files by path, later layers over earlier ones; folders need no entry."""
    entries: dict[bytes, Entry] = {}
    for layer in layers:
        for path, text in layer.items():
            entries[path.encode()] = File(text if isinstance(text, bytes) else text.encode())
    return Snapshot(entries)


def task_with(check: str, files: Mapping[str, bytes] | None = None, **grader: str) -> Task:
    folder = {"check.py": check.encode()} | {f"{name}.py": text.encode() for name, text in grader.items()}
    return Task(task_id="t/1", prompt="p", files=files or {}, grader=folder, grader_entry="check.py")


def grade_all(
    tmp_path: Path,
    *asked: tuple[Task, Snapshot],
    verify: VerifyConfig | None = None,
    sandbox: SandboxConfig | None = None,
) -> list[Any]:
    """Verdicts of real graders, one after another in one supervisor."""

    async def run() -> list[Graded | GradeFailed]:
        async with Supervisor.open(sandbox or SandboxConfig(), "test-verify", tmp_path / "host") as host:
            return [await grade(host, *pair, verify or VerifyConfig()) for pair in asked]

    return trio.run(run)


def grade_one(tmp_path: Path, task: Task, left: Snapshot, **settings: Any) -> Any:
    return grade_all(tmp_path, (task, left), **settings)[0]


def gym(split: str, number: str) -> Task:
    source = ClawGymTasksConfig(path=str(ROWS / f"{split}.jsonl"), name="gym", ids=(f"{split}/task_{number}",))
    return load_tasks([source])[f"gym/{split}/task_{number}"]


def test_filing_tasks_are_graded_on_what_was_left(tmp_path: Path) -> None:
    task = next(iter(load_tasks([FilingTasksConfig(count=1)]).values()))
    assert task.prompt == 'Write the text "magnet" to the file "docs/notes.txt".'
    untouched, right, elsewhere = grade_all(
        tmp_path,
        (task, snapshot(task.files)),
        (task, snapshot(task.files, {"docs/notes.txt": "magnet"})),
        (task, snapshot(task.files, {"notes.txt": "magnet"})),
    )
    assert untouched == Graded(reward=0.0, checks={"exists": 0.0, "name": 0.0, "content": 0.0, "clean": 0.0})
    assert right == Graded(reward=1.0, checks={"exists": 1.0, "name": 1.0, "content": 1.0, "clean": 1.0})
    assert elsewhere.reward == 0.25


@needs_rows
def test_the_mean_of_all_values_is_the_reward_and_the_authors_own_is_kept(tmp_path: Path) -> None:
    """0010 prints {"reward": r, <booleans>}; 0163's author gives 0.0 for empty files where the mean is 0.455."""
    named, empty = gym("eval", "0010"), gym("eval", "0163")
    outputs = ("actions.json", "state.json", "gpu_alerts.json", "ping_report.txt", "poe_summary.csv")
    one_right, junk = grade_all(
        tmp_path,
        (named, snapshot(named.files, {"output/branch.txt": branch_name(named)})),
        (empty, snapshot(empty.files, {f"output/{name}": "" for name in outputs})),
    )
    assert one_right.checks == {"reward": 0.25, "commit_ok": 0, "pr_ok": 0, "changelog_ok": 0, "branch_ok": 1}
    assert one_right.reward == pytest.approx(0.25)
    assert junk.checks["reward"] == 0.0
    assert junk.reward == pytest.approx(0.455, abs=0.001)


def branch_name(task: Task) -> str:
    """The answer to 0010's last question, by its own rule: prefix by words, then the words with dashes."""
    namespace: dict[str, Any] = {"__name__": "check"}
    exec(task.grader["check.py"], namespace)
    described = task.files["input/branch_description.txt"]
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"clawpipe-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "branch_description.txt").write_bytes(described)
        name: str = namespace["branch_expected"](str(folder))
    finally:
        shutil.rmtree(folder)
    return name


@needs_rows
def test_known_floors_and_crashes_of_published_graders(tmp_path: Path) -> None:
    """0094 scores 0.11 on the untouched workspace; 0048 raises KeyError on a malformed table."""
    floor, fragile = gym("eval", "0094"), gym("eval", "0048")
    malformed = {f"outputs/{name}": "a,b\n1,2\n" for name in ("film_style_summary.csv", "report.md", "email_draft.txt")}
    idle, crashed = grade_all(tmp_path, (floor, snapshot(floor.files)), (fragile, snapshot(fragile.files, malformed)))
    assert idle.reward == pytest.approx(0.111, abs=0.001)
    assert (crashed.reward, crashed.checks) == (0.0, {"grader_crashed": 0.0})
    assert "KeyError: 'film'" in crashed.note


@needs_rows
def test_a_grader_may_write_into_its_copy(tmp_path: Path) -> None:
    """0047 runs a script of the workspace that writes plan/; the second grading finds what the first one found."""
    task = gym("eval", "0047")
    left = snapshot(task.files)
    first, second = grade_all(tmp_path, (task, left), (task, left))
    assert isinstance(first, Graded)
    assert first == second
    assert left == snapshot(task.files)


@needs_rows
def test_a_grader_may_run_what_the_agent_wrote(tmp_path: Path) -> None:
    """0064 runs scripts/portfolio_update.py of the workspace: one that works, and one that tries to forge."""
    task = gym("eval", "0064")
    works = "import os\nos.makedirs('output', exist_ok=True)\n" + "".join(
        f"open('output/{name}', 'w').write('x')\n" for name in ("status_summary.md", "email_draft.txt")
    )
    script = "scripts/portfolio_update.py"
    idle, honest, forged = grade_all(
        tmp_path,
        (task, snapshot(task.files)),
        (task, snapshot(task.files, {script: works})),
        (task, snapshot(task.files, {script: FORGER})),
    )
    assert (idle.checks["script_present"], idle.checks["script_runs_and_creates_outputs"]) == (0, 0)
    assert (honest.checks["script_present"], honest.checks["script_runs_and_creates_outputs"]) == (1, 1)
    assert forged.checks.keys() == idle.checks.keys()
    assert (forged.checks["script_present"], forged.checks["script_runs_and_creates_outputs"]) == (1, 0)


# Prints a verdict, writes it to every open file of its parents and of pid 1, and leaves a daemon that goes on.
FORGER = """
import os, sys, time
forged = b'\\n{"forged": 1.0}'
def spray():
    for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
        for fd in range(10):
            try:
                file = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY)
                os.write(file, forged)
                os.close(file)
            except OSError:
                pass
os.write(1, forged)
spray()
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        spray()
"""


def test_a_script_that_the_grader_runs_cannot_forge_the_verdict(tmp_path: Path) -> None:
    check = (
        "import json, subprocess, sys, time\n"
        "subprocess.run([sys.executable, 'agent.py'])\n"  # its output is the grader's own
        "time.sleep(0.3)\n"
        "print(json.dumps({'honest': 0.5}))\n"
    )
    verdict = grade_one(tmp_path, task_with(check), snapshot({"agent.py": FORGER}))
    assert verdict == Graded(reward=0.5, checks={"honest": 0.5})


def test_a_script_cannot_look_into_the_grader(tmp_path: Path) -> None:
    spy = (
        "import os\n"
        "def can(path):\n"
        "    try:\n"
        "        os.close(os.open(path, os.O_RDONLY))\n"
        "        return 1\n"
        "    except OSError:\n"
        "        return 0\n"
        "parent = f'/proc/{os.getppid()}'\n"
        "print(can(parent + '/mem') + can(parent + '/environ') + can(parent + '/fd/1'), end='')\n"
        "print(sum(map(len, os.listdir(os.environ['HOME']))), end='')\n"
    )
    check = (
        "import json, subprocess, sys\n"
        "seen = subprocess.run([sys.executable, 'agent.py'], capture_output=True, text=True, check=True).stdout\n"
        "print(json.dumps({'hidden': seen == '00'}))\n"
    )
    assert grade_one(tmp_path, task_with(check), snapshot({"agent.py": spy})).checks == {"hidden": 1.0}


@pytest.mark.parametrize("place", ["", "reward/", "grader/"])
def test_planted_modules_are_not_imported(tmp_path: Path, place: str) -> None:
    forged = "print('{\"x\": 1.0}')\nraise SystemExit(0)\n"
    names = ("json.py", "sitecustomize.py", "usercustomize.py", "os.py", "ctypes.py", "io.py", "json/__init__.py")
    planted = snapshot({place + name: forged for name in names if name != "json.py"}, {place + "sys.py": forged})
    check = (
        "import json, sys\n"
        "print(json.dumps({'clean': all('/work' not in path for path in sys.path) and '' not in sys.path}))\n"
    )
    assert grade_one(tmp_path, task_with(check), planted).checks == {"clean": 1.0}
    assert grade_one(tmp_path, task_with(check), snapshot({place + "json.py": forged})).checks == {"clean": 1.0}


def test_a_grader_of_several_files_sees_its_own_and_cannot_change_them(tmp_path: Path) -> None:
    check = (
        "import json, os, sys\n"
        "from truth import ANSWER\n"
        "left = open(os.path.join(sys.argv[1], 'answer.txt')).read()\n"
        "beside = open(os.path.join(os.path.dirname(__file__), 'truth.py')).read()\n"
        "writable = os.access('/grader', os.W_OK) or os.access('/grader/truth.py', os.W_OK)\n"
        "inside = any('truth.py' in names for _, _, names in os.walk(sys.argv[1]))\n"
        "if __name__ == '__main__':\n"
        "    checks = {'answer': left == ANSWER, 'beside': 'ANSWER' in beside}\n"
        "    print(json.dumps(checks | {'kept': not writable, 'out': not inside}))\n"
    )
    task = task_with(check, truth="ANSWER = 'forty-two'\n")
    assert grade_one(tmp_path, task, snapshot({"answer.txt": "forty-two"})).reward == 1.0


def test_there_is_no_network(tmp_path: Path) -> None:
    check = (
        "import json, os, socket\n"
        "def reaches(address):\n"
        "    try:\n"
        "        socket.create_connection(address, timeout=1).close()\n"
        "        return True\n"
        "    except OSError:\n"
        "        return False\n"
        "devices = os.listdir('/sys/class/net') if os.path.isdir('/sys/class/net') else []\n"
        "out = reaches(('127.0.0.1', PORT)) or reaches(('192.0.2.1', 80))\n"
        "print(json.dumps({'alone': not out and set(devices) <= {'lo'}}))\n"
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        task = task_with(check.replace("PORT", str(server.getsockname()[1])))
        assert grade_one(tmp_path, task, snapshot()).checks == {"alone": 1.0}


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("raise KeyError('x')", "grader_crashed"),
        ("import sys; print('{\"x\": 1}'); sys.exit(3)", "grader_crashed"),
        ("import sys; sys.exit('no such file')", "grader_crashed"),
        ("print('{\"x\": 1}'); import os; os.kill(os.getpid(), 9)", "grader_crashed"),
        ("x = bytearray(800_000_000)", "grader_crashed"),
        ("this is no Python", "grader_crashed"),
        ("import os; print('{\"x\": 1}', flush=True); os._exit(0)", "grader_printed_no_json"),
        ("print('done')", "grader_printed_no_json"),
        ("print('{\"x\": NaN}')", "grader_value_refused"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "grader_flooded"),
    ],
)
def test_a_grader_that_gives_no_verdict_is_the_agents_zero(tmp_path: Path, check: str, reason: str) -> None:
    verdict = grade_one(tmp_path, task_with(check), snapshot(), verify=VerifyConfig(memory_bytes=256 * 1024**2))
    assert (verdict.reward, verdict.checks) == (0.0, {reason: 0.0})
    assert verdict.note


@pytest.mark.parametrize("end", ["", "import sys; sys.exit()", "raise SystemExit(0)", "sys.stdout.flush()"])
def test_a_grader_may_end_as_programs_end(tmp_path: Path, end: str) -> None:
    check = f"import sys\nprint('reading ü')\nsys.stdout.buffer.write(b'{{\"x\": 1}}\\n')\n{end}\n"
    assert grade_one(tmp_path, task_with(check), snapshot()).reward == 1.0


def test_a_grader_that_hangs_is_named_with_task_and_limit(tmp_path: Path) -> None:
    verdict = grade_one(tmp_path, task_with("while True: pass"), snapshot(), verify=VerifyConfig(timeout_s=0.5))
    assert isinstance(verdict, GradeFailed)
    assert verdict.message.startswith("task t/1: the grader hangs: no end after 0.5 s, not even on the untouched")
    assert verdict.message.endswith("raise [verify] timeout_s")


def test_a_script_that_makes_the_grader_hang_is_the_agents_zero(tmp_path: Path) -> None:
    check = (
        "import os, subprocess, sys\n"
        "if os.path.exists('agent.py'): subprocess.run([sys.executable, 'agent.py'])\n"
        "print('{\"x\": 0}')\n"
    )
    stuck = snapshot({"agent.py": "while True: pass"})
    verdict = grade_one(tmp_path, task_with(check), stuck, verify=VerifyConfig(timeout_s=1.0))
    assert (verdict.reward, verdict.checks) == (0.0, {"grader_timed_out": 0.0})


def test_names_links_and_modes_reach_the_grader_as_they_were_left(tmp_path: Path) -> None:
    entries: dict[bytes, Entry] = {
        "ünï cödé.txt".encode(): File(b"1"),
        b"run.sh": File(b"#!/bin/sh\n", 0o755, 1_000_000_000_000_000_000),
        b"link": Link(b"run.sh"),
        b"away": Link(b"/etc/passwd"),
    }
    check = (
        "import json, os\n"
        "checks = {'name': open('ünï cödé.txt').read() == '1', 'mode': os.access('run.sh', os.X_OK),\n"
        "  'time': os.stat('run.sh').st_mtime == 1e9, 'link': os.readlink('link') == 'run.sh',\n"
        "  'away': os.readlink('away') == '/etc/passwd'}\n"
        "print(json.dumps(checks))\n"
    )
    assert grade_one(tmp_path, task_with(check), Snapshot(entries)).reward == 1.0


def test_a_sandbox_that_cannot_be_built_is_no_verdict(tmp_path: Path) -> None:
    class Broken:
        """A host whose disk is full."""

        async def folder(self, files: Mapping[str, bytes]) -> str:
            return "/nowhere"

        @asynccontextmanager
        async def sandbox(self, contents: Snapshot, **_: Any) -> AsyncIterator[None]:
            raise SandboxError("sandbox grade-t/1: could not be built: No space left on device")
            yield

    async def run() -> Graded | GradeFailed:
        return await grade(Broken(), task_with(""), snapshot(), VerifyConfig())  # type: ignore[arg-type]

    verdict = trio.run(run)
    assert isinstance(verdict, GradeFailed)
    assert verdict.message.startswith("task t/1: the grader's sandbox failed: sandbox grade-t/1: ")


def test_a_workspace_at_its_limit_can_still_be_graded(tmp_path: Path) -> None:
    """Else an agent could have a bad rollout left out by filling its workspace."""
    sandbox = SandboxConfig(workspace_bytes=2 * 1024**2, workspace_files=50)
    full = {f"f{number}": b"x" * 40_960 for number in range(48)}
    task = task_with("import os; print('{\"x\": %d}' % (len(os.listdir('.')) == 49))", files={"big": b"y" * 1024**2})
    assert grade_one(tmp_path, task, snapshot(task.files, full), sandbox=sandbox).reward == 1.0


@needs_rows
@pytest.mark.slow
def test_every_published_grader_has_a_verdict_on_the_untouched_workspace(tmp_path: Path) -> None:
    sources = [ClawGymTasksConfig(path=str(ROWS / f"{name}.jsonl"), name=name) for name in ("train", "eval")]
    tasks = load_tasks(sources)
    verdicts = grade_all(tmp_path, *((task, snapshot(task.files)) for task in tasks.values()))
    notes = {task: verdict.note for task, verdict in zip(tasks, verdicts, strict=True) if verdict.note}
    rewards = {task: round(verdict.reward, 3) for task, verdict in zip(tasks, verdicts, strict=True) if verdict.reward}
    assert notes == {}
    assert rewards == {
        "eval/eval/task_0078": 0.083,
        "eval/eval/task_0094": 0.111,
        "train/train/task_1232": 0.125,
        "train/train/task_1323": 0.024,
        "train/train/task_1871": 0.143,
    }
