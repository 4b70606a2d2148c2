"""Children end with us, and what a SIGKILL left behind is found by its marks alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import anyio
import pytest

from clawpipe.pipeline.processes import OWNER, owned, port_is_free, start, sweep


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def sleeper(owner: str, **options) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "300"], env={**os.environ, OWNER: owner}, **options)


def await_program(pid: int, name: str) -> None:
    deadline_s = time.monotonic() + 5
    while (found := Path(f"/proc/{pid}/comm").read_text().strip()) != name:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)


def wait_for_none(owner: str) -> list[int]:
    """What a signal ends is there a little longer. Gives what is left."""
    deadline_s = time.monotonic() + 5
    while (left := owned(owner)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def test_owned_finds_a_run_and_its_roles_and_nobody_else(owner):
    mine, role, other = sleeper(owner), sleeper(f"{owner}/engine"), sleeper(f"{owner}x")
    try:
        assert sorted(owned(owner)) == sorted([mine.pid, role.pid])
        assert owned(f"{owner}/engine") == [role.pid]
    finally:
        for process in (mine, role, other):
            process.kill()
            process.wait()


def test_sweep_ends_a_process_that_wiped_its_environment_by_its_log(owner, tmp_path):
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    with log.open("ab") as output:
        wiped = subprocess.Popen(["env", "-i", "/bin/sleep", "300"], stdout=output)
    bystander = subprocess.Popen(["env", "-i", "/bin/sleep", "300"], stdout=subprocess.DEVNULL)
    try:
        assert owned(owner) == []
        assert sweep(owner, log.parent) == 1
        assert wiped.wait(timeout=5) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.anyio
async def test_leaving_the_block_ends_the_child_and_its_session(owner, tmp_path):
    script = "import subprocess, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
    log = tmp_path / "child.log"
    async with start([sys.executable, "-c", script], log=log, owner=owner, name="child", grace_s=2) as child:
        with anyio.fail_after(20):
            while "up" not in log.read_text():  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert len(owned(owner)) == 2
        assert os.getsid(child.pid) == child.pid
    assert wait_for_none(owner) == []


def test_a_child_does_not_outlive_a_killed_parent(owner, tmp_path):
    script = (
        "import anyio, pathlib; from clawpipe.pipeline.processes import start\n"
        "async def main():\n"
        f"    log = pathlib.Path({str(tmp_path / 'x.log')!r})\n"
        f"    async with start(['sleep', '300'], log=log, owner={owner!r}, name='x'):\n"
        "        print('up', flush=True)\n"
        "        await anyio.sleep(300)\n"
        "anyio.run(main)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as output:
        assert output.readline() == b"up\n"
    [child] = owned(owner)
    await_program(child, "sleep")  # until then it is the program that asks the kernel for the signal
    parent.kill()
    parent.wait()
    assert wait_for_none(owner) == []


def test_a_listening_port_is_not_free():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free(taken.getsockname()[1])
