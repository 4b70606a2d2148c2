"""A program's life in a sandbox: how it ends, and that nothing of it is left when `run` has returned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from clawpipe.actors.sandbox.process import KEPT_OUTPUT_BYTES, Reason
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.pipeline.errors import SandboxError


def processes_of(uid: int) -> list[str]:
    """Names of the host's processes, zombies included, whose uid is `uid`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if f"\nUid:\t{uid}\t" in status:
            found.append(status.partition("\n")[0].removeprefix("Name:\t"))
    return found


def test_exit_code_and_output_are_the_programs(lab) -> None:
    exit, _ = lab.one("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (exit.reason, exit.code) == (Reason.EXITED, 7)
    assert sorted(exit.output.split()) == [b"err", b"out"]
    assert exit.errors == b""
    assert exit.output_bytes == 8


def test_errors_can_be_kept_apart(lab) -> None:
    async def body(host: Supervisor):
        async with host.sandbox({}, name="apart") as box:
            return await box.run(["sh", "-c", "echo out; echo err >&2"], wall_clock_s=20, keep_errors_apart=True)

    exit = lab.run(body)
    assert (exit.output, exit.errors) == (b"out\n", b"err\n")


def test_a_signal_that_ends_the_program_shows_as_128_plus_its_number(lab) -> None:
    exit, _ = lab.one("sh", "-c", "kill -SEGV $$")
    assert exit.code == 128 + 11


def test_a_program_that_does_not_exist_is_infrastructure(lab) -> None:
    with pytest.raises(SandboxError, match="no-such-program"):
        lab.one("no-such-program")


def test_the_wall_clock_ends_everything(lab) -> None:
    exit, snapshot = lab.one("sh", "-c", "echo begun >f; setsid sleep 98 & sleep 99", wall_clock_s=0.7)
    assert (exit.reason, exit.code) == (Reason.WALL_CLOCK, None)
    assert 0.7 <= exit.wall_s < 15
    assert snapshot.read("f") == b"begun\n"
    assert processes_of(lab.config.first_uid) == []


def test_daemons_are_dead_before_anything_is_collected(lab) -> None:
    """Two forks and setsid leave process group and session; writing goes on until the kill, and not after it."""
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1); os.close(2)
        while True:
            with open("late", "a") as file:
                file.write("x")
    os._exit(0)
while not os.path.exists("late"):
    time.sleep(0.01)
"""

    async def body(host: Supervisor):
        async with host.sandbox({}, name="daemon") as box:
            exit = await box.run(["python3", "-I", "-c", program], wall_clock_s=30)
            alive = processes_of(lab.config.first_uid)
            first = await box.collect()
            await trio.sleep(0.2)
            return exit, alive, first, await box.collect()

    exit, alive, first, second = lab.run(body)
    assert (exit.reason, exit.code) == (Reason.EXITED, 0)
    assert alive == []
    assert first.read("late")
    assert first == second


def test_a_daemon_that_holds_the_output_open_does_not_delay_the_end(lab) -> None:
    exit, _ = lab.one("sh", "-c", "setsid sleep 60 & echo done", wall_clock_s=30)
    assert (exit.reason, exit.code, exit.output) == (Reason.EXITED, 0, b"done\n")
    assert exit.wall_s < 15


def test_endless_output_is_stopped_and_its_end_is_kept(lab) -> None:
    exit, _ = lab.one("sh", "-c", "while :; do cat /usr/bin/python3; done", wall_clock_s=60)
    assert (exit.reason, exit.code) == (Reason.OUTPUT, None)
    limit = lab.config.max_output_bytes
    assert limit < exit.output_bytes <= limit + 64 * 1024
    assert len(exit.output) == KEPT_OUTPUT_BYTES
    assert processes_of(lab.config.first_uid) == []


def test_a_second_program_sees_the_first_ones_workspace_and_nothing_else_of_it(lab) -> None:
    async def body(host: Supervisor):
        async with host.sandbox({}, name="twice") as box:
            await box.run(["sh", "-c", "echo a >/work/f; echo b >/tmp/f; sleep 60 &"], wall_clock_s=20)
            return await box.run(["sh", "-c", "cat /work/f; ls /tmp; cat /proc/[0-9]*/comm"], wall_clock_s=20)

    text, *commands = lab.run(body).output.split()
    assert text == b"a"
    assert b"bwrap" in commands
    assert set(commands) <= {b"bwrap", b"sh", b"cat"}


@pytest.mark.slow
def test_a_sandbox_outlives_trios_idle_threads(lab) -> None:
    """trio's worker threads expire after 10 s; had one of them forked, the sandbox would die with it."""
    exit, _ = lab.one("sh", "-c", "sleep 13; echo alive", wall_clock_s=60)
    assert (exit.code, exit.output) == (0, b"alive\n")
