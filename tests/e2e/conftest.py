"""A small run of the real thing: its configuration, its command line, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clawpipe.pipeline.processes import owned

CLAWPIPE = Path(sysconfig.get_path("scripts"), "clawpipe")
WAIT_S = 400.0

CONFIG = """
[run]
name = "small"
updates = {updates}

[model]
context_tokens = 1024

[model.tiny]

[model.coldstart]
max_steps = 300
gate_probability = 0.02
flawed_steps = 10

[engines]
dtype = "float32"
eager = true
health_interval_s = 1.0

[proxy]
max_completion_tokens = 40

[sandbox]
slots = 8
wall_clock_s = 120.0
memory_bytes = 268435456

[[harness]]
kind = "agentloop"
max_turns = 4
max_tokens = 40

[[tasks]]
kind = "filing"

[schedule]
groups_per_step = 3
group_size = 4
max_staleness = 4

[learner]
lr = 5e-4

[checkpoint]
every_updates = 2
"""


@dataclass
class Run:
    """One run folder and the `clawpipe up` processes on it."""

    folder: Path
    config: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        command = [str(CLAWPIPE), "up", str(self.config), "--run-dir", str(self.folder), *arguments]
        log = (self.folder.parent / "up.log").open("a")
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=self.environment, text=True, start_new_session=True
        )
        log.close()
        self.processes.append(process)
        return process

    @property
    def output(self) -> str:
        return (self.folder.parent / "up.log").read_text()

    @property
    def run_id(self) -> str:
        return json.loads((self.folder / "runtime.json").read_bytes())["run_id"]

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "status.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def await_updates(self, process: subprocess.Popen[str], updates: int) -> None:
        self.await_that(process, lambda: self.status().get("updates", 0) >= updates, f"{updates} updates")

    def await_that(self, process: subprocess.Popen[str], condition: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert process.poll() is None, f"ended before {what}: {self.output}"
            assert time.monotonic() < deadline, f"no {what} after {WAIT_S} s: {self.output}\n{self.status()}"
            time.sleep(0.1)

    def ends(self, process: subprocess.Popen[str]) -> int:
        return process.wait(timeout=WAIT_S)

    def pids(self, role: str, text: str = "") -> list[int]:
        """The run's processes of a role whose command line holds `text`."""
        return [pid for pid in owned(f"{self.run_id}/{role}", self.folder / "logs") if text in command_line(pid)]

    def kill_all(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL to the launcher and everything that it started, at the same moment."""
        for pid in [process.pid, *owned(self.run_id, self.folder / "logs")]:
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=30)

    def left_behind(self) -> dict[str, Any]:
        """Processes, mounts, cgroups and staged weights that carry the run's id."""
        found = {
            "processes": owned(self.run_id, self.folder / "logs"),
            "cgroups": [str(p) for p in Path("/sys/fs/cgroup").rglob(f"*{self.run_id}*") if p.is_dir()],
            "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if self.run_id in line],
            "staged": [str(p) for p in Path("/dev/shm").glob(f"*{self.run_id}*")],
        }
        return {kind: things for kind, things in found.items() if things}

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_bytes())

    def ledger(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory) -> Path:
    """The cache of built models, shared by the session's runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small_run(tmp_path, model_cache) -> Iterator[Any]:
    """Makes a run of `updates` updates; ends what a failed test left running."""
    made: list[Run] = []

    def make(updates: int) -> Run:
        config = tmp_path / "small.toml"
        config.write_text(CONFIG.format(updates=updates))
        run = Run(tmp_path / "run", config, {**os.environ, "CLAWPIPE_CACHE": str(model_cache)})
        made.append(run)
        return run

    yield make
    for run in made:
        for process in run.processes:
            if process.poll() is None:
                run.kill_all(process)
