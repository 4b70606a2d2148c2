"""What the launcher does beside starting processes."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import anyio
import msgspec

from clawpipe.pipeline import launch
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.processes import free_port
from clawpipe.pipeline.run_folder import RUN_DIR_NOTE, is_running, remove_abandoned
from clawpipe.pipeline.runtime import Runtime


def staged(push_root: Path, name: str, run_dir: Path) -> Path:
    folder = push_root / name
    folder.mkdir(parents=True)
    (folder / RUN_DIR_NOTE).write_text(str(run_dir))
    (folder / "v1.safetensors").write_bytes(b"weights")
    return folder


def test_staged_weights_of_killed_runs_are_removed_and_those_of_running_ones_stay(tmp_path):
    alive, killed = tmp_path / "alive", tmp_path / "killed"
    for run_dir in (alive, killed):
        run_dir.mkdir()
        (run_dir / "lock").touch()
    push_root = tmp_path / "shm"
    kept = staged(push_root, "clawpipe-cp-1", alive)
    gone = [staged(push_root, "clawpipe-cp-2", killed), staged(push_root, "clawpipe-cp-3", tmp_path / "deleted")]
    foreign = push_root / "clawpipe-cp-4"
    foreign.mkdir()
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_running(alive)
        assert not is_running(killed)
        remove_abandoned(push_root)
    assert (kept / "v1.safetensors").exists()
    assert not any(folder.exists() for folder in gone)
    assert foreign.exists()


class Screen:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    async def watch(self):
        await anyio.sleep_forever()


async def interrupt(run, received):
    """Sends the signal once somebody listens, and returns when it is answered."""
    while signal.getsignal(signal.SIGINT) is received:  # noqa: ASYNC110
        await anyio.sleep(0.01)
    num_lines = len(run.screen.lines)
    os.kill(os.getpid(), signal.SIGINT)
    while len(run.screen.lines) == num_lines:  # noqa: ASYNC110
        await anyio.sleep(0.01)


def test_the_second_signal_stops_a_run_whose_nats_has_not_yet_heard_of_the_first(tmp_path):
    plain = {"model": {"tiny": {}}, "harness": [{"kind": "agentloop"}], "tasks": [{"kind": "filing"}]}
    runtime = Runtime(run_id="test", run_dir=str(tmp_path), nats_url=f"nats://127.0.0.1:{free_port()}")
    run = launch._Run(msgspec.convert(plain, Config), runtime, Screen())

    async def main():
        run.ended["learner"] = anyio.Event()
        received = signal.getsignal(signal.SIGINT)
        with anyio.fail_after(5):  # the connection is tried for 10 s
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(launch._handle_signals, run, tasks.cancel_scope)
                await interrupt(run, received)
                await interrupt(run, received)

    anyio.run(main)
    assert run.how is launch.Ended.STOPPED
    assert [line.split(":")[0].split(";")[0] for line in run.screen.lines] == ["draining", "stopping at once"]
