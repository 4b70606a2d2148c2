"""The launcher and a disk that fills up under the embedded server."""

from __future__ import annotations

import os
import subprocess

import anyio
import msgspec
import pytest
from broker_scripts import QUICK, STORE_BYTES, WAITING, call, logged, take, until

from clawpipe.pipeline import launch
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.patience import NO_ANSWER
from clawpipe.pipeline.runtime import Runtime

pytestmark = pytest.mark.anyio

MIB = 1024**2


class Screen:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    async def watch(self):
        await anyio.sleep_forever()


@pytest.fixture
def disk(tmp_path):
    """A file system of 100 MiB where the run keeps its store."""
    folder = tmp_path / "nats"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def spoil(disk, free_bytes):
    """Leaves so much room."""
    usage = os.statvfs(disk)
    with (disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, usage.f_bavail * usage.f_frsize - free_bytes)


def a_run(folder):
    plain = {"model": {"tiny": {}}, "harness": [{"kind": "agentloop"}], "tasks": [{"kind": "filing"}]}
    config = msgspec.convert({**plain, "nats": {"max_store_bytes": STORE_BYTES}}, Config)
    runtime = Runtime(run_id=f"test-{folder.name}", run_dir=str(folder))
    return launch._Run(config, runtime, Screen())


async def test_a_run_whose_disk_was_full_goes_on_when_there_is_room(disk, tmp_path, caplog):
    run = a_run(tmp_path)
    async with anyio.create_task_group() as services:
        runtime = await launch._start_nats(run, services)
        async with Broker.connect(runtime.nats_url, runtime.nats_token, pace=QUICK) as broker:
            await broker.setup(STORE_BYTES)
            spoil(disk, 4 * MIB)
            stored = 0
            while not logged(caplog, WAITING):
                with anyio.move_on_after(1.0):
                    await broker.publish_call(call("r-1", stored, 25_000))
                    stored += 1
            assert 20 <= stored < 42
            assert logged(caplog, WAITING)[0]["why"] == NO_ANSWER
            await until(lambda: run.screen.lines)
            [full] = run.screen.lines
            assert full.startswith(
                f"the disk of {disk} is full: NATS stores nothing, and the run stands still; make 64"
            )

            (disk / "ballast").unlink()
            await broker.publish_call(call("r-1", stored, 25_000))
            entries = await take(broker.records(), stored + 1)
            assert [entry.record.index for entry in entries] == list(range(stored + 1))
        assert run.screen.lines[1] == f"there is room again on the disk of {disk}"
        assert run.screen.lines[2].startswith("nats ended with code ")
        assert len(run.screen.lines) == 3
        run.stopping = True
        services.cancel_scope.cancel()


async def test_the_server_of_a_run_is_not_started_on_a_full_disk(disk, tmp_path):
    spoil(disk, 10 * MIB)
    run = a_run(tmp_path)
    async with anyio.create_task_group() as services:
        async with anyio.create_task_group() as starting:
            starting.start_soon(launch._start_nats, run, services)
            await until(lambda: run.screen.lines)
            assert run.screen.lines[0].endswith("room there (now 9), and it goes on by itself")
            assert not run.log("nats").exists()
            (disk / "ballast").unlink()
        assert run.runtime.nats_url.startswith("nats://127.0.0.1:")
        run.stopping = True
        services.cancel_scope.cancel()
