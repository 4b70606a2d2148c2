"""Nothing stays behind: not after the end, not after cancelling, not after SIGKILL and the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import trio

from clawpipe.actors.sandbox.process import Reason
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.pipeline.errors import SandboxError

PID_NAMESPACE = os.stat("/proc/self/ns/pid").st_ino
FILES = {"a.txt": b"x", "b/c.txt": b"y"}


def groups() -> list[Path]:
    """Folders of this test's supervisors in all hierarchies."""
    return [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if Path(folder).name.startswith("clawpipe-test")]


def processes(first_uid: int) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if first_uid <= Path(f"/proc/{pid}").stat().st_uid < first_uid + 1000:
                found.append(pid)
        except OSError:
            continue
    return found


def network_namespaces() -> set[int]:
    """Those that a thread of this process is in, or a process below it: the supervisor reaps what it started."""
    found = set()
    below = [child.pid for child in psutil.Process().children(recursive=True)]
    for held in [*Path("/proc/self/task").glob("*/ns/net"), *(Path(f"/proc/{pid}/ns/net") for pid in below)]:
        with suppress(OSError):  # it has just ended
            found.add(held.stat().st_ino)
    return found


def state(work_dir: Path) -> dict[str, object]:
    return {
        "groups": groups(),
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "overlay" in line],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "folders": sorted(path.name for path in work_dir.glob("host-*")),
    }


def await_none(first_uid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while processes(first_uid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes(first_uid) == []


def test_32_sandboxes_at_the_same_time_and_nothing_is_left(lab) -> None:
    before = state(lab.work_dir)
    ended = []

    async def body(host: Supervisor) -> None:
        async def one(index: int) -> None:
            async with host.sandbox(FILES, name=f"n{index}", port=8080) as box:
                exit = await box.run(["sh", "-c", f"echo {index} >mine; cat a.txt b/c.txt mine"], wall_clock_s=60)
                ended.append((exit.code, exit.output, (await box.collect()).read("mine")))

        async with trio.open_nursery() as nursery:
            for index in range(32):
                nursery.start_soon(one, index)

    lab.run(body)
    assert sorted(ended) == sorted((0, f"xy{n}\n".encode(), f"{n}\n".encode()) for n in range(32))
    assert processes(lab.config.first_uid) == []
    assert state(lab.work_dir) == before


def test_cancelling_leaves_nothing_whenever_it_comes(lab) -> None:
    before = state(lab.work_dir)
    namespaces = network_namespaces()

    async def body(host: Supervisor) -> None:
        async def one(index: int) -> None:
            async with host.sandbox(FILES, name=f"c{index}", port=8080) as box:
                await box.run(["sh", "-c", "setsid sleep 98 & sleep 99"], wall_clock_s=60)
                await box.collect()

        for after_s in (0.0, 0.003, 0.01, 0.02, 0.04, 0.08, 0.3):
            with trio.move_on_after(after_s):
                async with trio.open_nursery() as nursery:
                    for index in range(6):
                        nursery.start_soon(one, index)
            assert processes(lab.config.first_uid) == []
            assert all(not list(folder.glob("*/")) for folder in groups())

    lab.run(body)
    assert state(lab.work_dir) == before
    assert network_namespaces() <= namespaces


def test_an_error_in_the_block_leaves_nothing(lab) -> None:
    before = state(lab.work_dir)

    async def body(host: Supervisor) -> None:
        async with host.sandbox(FILES, name="broken", port=8080):
            raise RuntimeError("the caller's fault")

    with pytest.raises(RuntimeError, match="the caller's fault"):
        lab.run(body)
    assert state(lab.work_dir) == before


def test_what_cannot_be_built_leaves_nothing_and_says_why(lab) -> None:
    before = state(lab.work_dir)

    async def body(host: Supervisor) -> None:
        for options, why in (
            ({"binds": {"/x": "/no/such/path"}}, "/no/such/path"),
            ({"files": {"../x": b""}}, "not a relative path"),
            ({"port": 70000}, "port must be"),
        ):
            files = options.pop("files", FILES)
            with pytest.raises(SandboxError, match=why):
                async with host.sandbox(files, name="bad", **options):
                    raise AssertionError("was built")

    lab.run(body)
    assert state(lab.work_dir) == before


ABANDONED = """
import sys, trio
from contextlib import suppress
from pathlib import Path
import msgspec
import psutil
from clawpipe.pipeline.config import SandboxConfig
from clawpipe.actors.sandbox.supervisor import Supervisor

async def main():
    config = msgspec.json.decode(sys.argv[1], type=SandboxConfig)
    async with Supervisor.open(config, "test", Path(sys.argv[2])) as host:
        async with host.sandbox({"a.txt": b"x"}, name="abandoned", port=8080) as box:
            await box.run(["sh", "-c", "setsid sleep 98 & echo x >b; sleep 99"], wall_clock_s=99)

trio.run(main)
"""


def test_sigkill_of_the_supervisor_ends_its_sandboxes_and_the_next_start_sweeps_the_rest(lab) -> None:
    argv = [sys.executable, "-c", ABANDONED, msgspec.json.encode(lab.config).decode(), str(lab.work_dir)]
    uid = lab.config.first_uid
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        deadline = time.monotonic() + 60
        while len(processes(uid)) < 4 and time.monotonic() < deadline:  # bubblewrap twice, sh and a sleep
            time.sleep(0.02)
        assert len(processes(uid)) >= 4
        process.send_signal(signal.SIGKILL)
    await_none(uid)
    assert groups() != []  # nobody was there to remove them

    exit, _ = lab.one("true")
    assert (exit.reason, exit.code) == (Reason.EXITED, 0)
    assert groups() == []
    assert list(lab.work_dir.glob("host-*")) == []


def test_a_group_recorded_by_an_earlier_supervisor_is_swept_with_what_runs_in_it(lab) -> None:
    """A job's own group is another one next time, so the parents in use are written down."""
    hierarchy = Path("/sys/fs/cgroup/unified")
    if not (hierarchy / "cgroup.procs").exists():
        hierarchy = Path("/sys/fs/cgroup")
    job = hierarchy / "clawpipetestjob"
    left = job / f"clawpipe-test-4000000-77-{PID_NAMESPACE}-0123abcd/box"
    left.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        (left / "cgroup.procs").write_text(str(process.pid))
        lab.work_dir.mkdir(parents=True)
        (lab.work_dir / "groups.json").write_bytes(msgspec.json.encode([str(job)]))
        lab.one("true")
        assert process.wait() == -signal.SIGKILL
    assert list(job.glob("*/")) == []
    job.rmdir()
