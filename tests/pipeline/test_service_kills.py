"""The service on a real nats-server, when it, the learner, the disk or a record is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter

import anyio
import nats
import pytest
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline.books import Standing
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile


def test_what_a_crashed_learner_trained_beyond_its_checkpoint_is_trained_again_and_nothing_else(run):
    run = run(run={"updates": 5}, schedule={"max_staleness": 8})
    learner = run.learner

    async def main():
        async with run.around() as (_, tasks):
            lost = []

            async def training():
                await learner.hello()
                await learner.train(updates=2, every=2)
                await learner.train(updates=3, every=9)
                await learner.lease()
                lost.extend(row.rollout_id for row in learner.trained[2][1].rollouts)
                learner.version += 1  # a restored learner serves its weights under the next free number
                await learner.hello()
                await learner.train()

            tasks.start_soon(training)
            await run.serve()
            return lost

    lost = anyio.run(main)
    assert learner.updates == 5
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 20
    assert set(lost) <= set(learner.rollouts())
    assert run.summary()["rollouts"]["settled"] == 20
    assert len(run.summary()["reward"]["per_update"]) == 5


@pytest.mark.parametrize("when", ["before the step", "after the step", "between chunks and step"])
def test_a_service_that_is_killed_goes_on_with_a_learner_that_lives(run, when):
    run = run(run={"updates": 4})
    learner = run.learner

    async def main():
        async with run.around() as (_, tasks):
            held = []

            async def first():
                await learner.hello()
                await learner.train(updates=2, every=9)
                ready = await learner.lease()
                held.append((ready, await learner.fetch(ready)))
                if when == "after the step":
                    await learner.step(held[0][1])

            async def rest():
                if when == "between chunks and step":
                    assert (await learner.fetch(held[0][0])) == held[0][1]
                if when != "after the step":
                    await learner.step(held[0][1])
                await learner.train()

            await run.serve_until(first)
            tasks.start_soon(rest)
            await run.serve()

    anyio.run(main)
    assert learner.updates == 4
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 16
    summary = run.summary()
    assert summary["rollouts"]["settled"] == 16
    assert summary["rollouts"]["lost"] == 0
    assert len(summary["reward"]["per_update"]) == 4
    assert summary["tokens"]["sampled"] == 48 == summary["tokens"]["trained"]


def test_a_service_that_is_killed_before_its_first_request_starts_the_run_all_the_same(run):
    run = run()
    learner = run.learner
    with contextlib.closing(LedgerFile(run.runtime.path("ledger.sqlite"))) as file:
        ledger = Ledger()
        ledger.stands(Standing())
        file.write(ledger.changes())

    async def main():
        async with run.around() as (_, tasks):
            tasks.start_soon(learner.hello_and_train)
            with anyio.fail_after(30):
                await run.serve()

    anyio.run(main)
    assert learner.updates == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_run_folder_on_a_full_disk_is_waited_for_and_the_books_are_whole(run, nats_server, small_disk, caplog):
    run = run.func(nats_server, small_disk, run={"updates": 4})
    learner, ballast = run.learner, small_disk / "ballast"

    async def training(tasks):
        await learner.hello()
        await learner.train(updates=2)
        tasks.start_soon(making_room)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        await learner.train()

    async def making_room():
        await anyio.sleep(1.5)
        ballast.unlink()

    async def main():
        async with run.around() as (_, tasks):
            tasks.start_soon(training, tasks)
            with anyio.fail_after(60):
                await run.serve()

    anyio.run(main)
    assert learner.updates == 4
    assert "waiting for room on the disk" in caplog.text
    assert run.rows("SELECT count(*), sum(sampled) FROM calls") == [(32, 48)]
    assert run.summary()["tokens"]["trained"] == 48


def test_a_restart_does_not_wait_for_a_record_that_is_gone_from_the_stream(run):
    run = run(run={"updates": 4})
    learner = run.learner

    async def first():
        await learner.hello()
        await learner.train(updates=2)

    async def main():
        async with run.around() as (broker, tasks):
            await run.serve_until(first)
            await broker.publish_call(Script("r-999999-0").call([1], [2]))
            client = await nats.connect(run.server.url, token=run.server.token)
            await client.jetstream().delete_msg("clawpipe-RECORDS", await broker.last_records_sequence())
            await client.close()
            tasks.start_soon(learner.train)
            with anyio.fail_after(30):
                await run.serve()

    anyio.run(main)
    assert learner.updates == 4


def test_a_run_that_is_killed_whole_resumes_from_the_checkpoint_and_trains_every_rollout_once(run):
    run = run(run={"updates": 6}, schedule={"max_staleness": 8})
    learner = run.learner

    async def first():
        await learner.hello()
        await learner.train(updates=3, every=2)  # one update beyond the checkpoint
        await learner.lease()

    async def main():
        async with run.around():
            await run.serve_until(first)
        learner.version += 1
        async with run.around() as (_, tasks):
            tasks.start_soon(learner.hello_and_train)
            await run.serve(resume=True)

    anyio.run(main)
    assert learner.updates == 6
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 24
    summary = run.summary()
    assert summary["updates"] == 6
    assert summary["rollouts"]["lost"] == 0
    assert summary["rollouts"]["settled"] == 24
    assert summary["tokens"]["trained"] == summary["tokens"]["sampled"] == 72


def test_a_rollout_that_was_acknowledged_without_a_manifest_is_found_named_and_run_again(run):
    run = run(run={"updates": 1})
    learner = run.learner

    def play(request, attempt, *, version):
        records = two_turns(request, attempt, version=version)
        return records[:1] if request.rollout_id == "r-000001-0" else records

    async def main():
        async with run.around(play) as (_, tasks):
            tasks.start_soon(learner.hello_and_train)
            await run.serve(audit_interval_s=0.2)

    anyio.run(main)
    assert sorted(learner.rollouts()) == ["r-000000-0", "r-000000-1", "r-000001-0-1", "r-000001-1"]
    assert run.summary()["rollouts"]["lost"] == 1
    assert run.summary()["tokens"]["dropped"] == {"lost": 2}


def test_a_group_is_trained_twice_by_a_service_that_is_killed_in_between(run):
    run = run(run={"updates": 6}, replay={"max_reuse": 2}, schedule={"max_staleness": 8})
    learner = run.learner

    async def first():
        await learner.hello()
        await learner.train(updates=4, every=2)
        await learner.train(updates=5, every=9)
        await learner.lease()

    async def main():
        async with run.around() as (_, tasks):
            await run.serve_until(first)
            tasks.start_soon(learner.train)
            await run.serve()

    anyio.run(main)
    counts = Counter(learner.rollouts())
    assert learner.updates == 6
    assert (sum(counts.values()), max(counts.values())) == (24, 2)
    summary = run.summary()
    assert summary["tokens"]["trained"] == 3 * len(counts)
    assert summary["rollouts"]["lost"] == 0
