"""The service on a real nats-server, between an actor and a learner that follow a script."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter

import anyio
import msgspec
import nats
import pytest
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.books import Standing
from clawpipe.pipeline.errors import BrokerError, ClawpipeError
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.pacing import LoopLag, StreamClock
from clawpipe.pipeline.records import CallRecord, Hello, Infra, PushReport, StreamCursor


def test_a_run_trains_its_updates_and_accounts_for_every_token(run):
    run = run()
    learner = run.learner

    async def main():
        async with run.around() as (broker, tasks):
            for engine, version, pause in [("e0", 0, 0.1), ("e0", 1, 0.3)]:
                await broker.report_push(
                    PushReport(engine=engine, version=version, pause_s=pause, applied_s=time.time())
                )
            tasks.start_soon(learner.hello_and_train)
            await run.serve()

    anyio.run(main)
    summary = run.summary()
    assert learner.updates == 3
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 12
    assert all(row.reward == int(row.rollout_id[-1]) % 2 for _, b in learner.trained for row in b.rollouts)
    assert summary["updates"] == 3
    assert summary["reward"] == {"first": 0.5, "last": 0.5, "per_update": [0.5, 0.5, 0.5]}
    assert summary["rollouts"]["scored"] == summary["rollouts"]["settled"] == 12
    assert summary["rollouts"]["lost"] == 0
    assert summary["calls"] == 24
    assert summary["calls_aborted"] == 0
    tokens = summary["tokens"]
    assert tokens["sampled"] == tokens["trained"] == 36
    assert tokens["dropped"] == {}
    assert summary["versions_pushed"] == 2
    assert summary["push_pause_s"]["p50"] == pytest.approx(0.2)
    assert summary["staleness"]["max"] <= 2
    assert summary["harness"]["agentloop"]["roles"] == {"main": 24}
    assert summary["harness"]["agentloop"]["reward_mean"] == 0.5
    assert summary["harness"]["agentloop"]["per_update"] == {"rollouts": [4, 4, 4], "reward": [0.5, 0.5, 0.5]}
    assert summary["time"]["learner_train_s"] == 1.5
    assert run.rows("SELECT DISTINCT state FROM rollouts") == [("trained",)]
    assert run.rows("SELECT count(*), sum(sampled), sum(kept) FROM calls") == [(24, 36, 36)]
    assert run.status()["phase"] == "ended"
    assert summary["max_staleness"] == run.status()["max_staleness"] == {"now": 2, "configured": 2}


def test_a_rollout_lost_to_infrastructure_is_run_again_and_counts_in_no_group(run):
    run = run(run={"updates": 1})
    learner = run.learner

    def play(request, attempt, *, version):
        *calls, manifest = two_turns(request, attempt, version=version)
        if request.rollout_id == "r-000000-1":
            return [*calls, msgspec.structs.replace(manifest, outcome=Infra(boundary="sandbox", message="gone"))]
        return [*calls, manifest]

    async def main():
        async with run.around(play) as (_, tasks):
            tasks.start_soon(learner.hello_and_train)
            await run.serve()

    anyio.run(main)
    assert sorted(learner.rollouts()) == ["r-000000-0", "r-000000-1-1", "r-000001-0", "r-000001-1"]
    summary = run.summary()
    assert summary["rollouts"]["infra"] == 1
    assert summary["tokens"]["dropped"] == {"infra": 3}
    assert summary["tokens"]["sampled"] == 15


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


def test_a_drain_takes_untaken_requests_back_waits_for_the_others_and_resumes(run):
    run = run(run={"updates": 6})
    learner = run.learner

    async def main():
        async with run.around(play=None) as (broker, _):

            async def draining():
                await learner.hello()
                first = await broker.pull_request(5)
                second = await broker.pull_request(5)
                await broker.request_drain()
                while run.status().get("phase") != "draining":  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                for delivery in (first, second):
                    for record in two_turns(delivery.request, delivery.attempt):
                        publish = broker.publish_call if isinstance(record, CallRecord) else broker.publish_manifest
                        await publish(record)
                    await delivery.ack()
                await learner.train()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(draining)
                await run.serve()
            drained = run.summary(), await broker.pending_requests()
            await broker.clear_drain()

        async with run.around() as (_, tasks):
            tasks.start_soon(learner.hello_and_train)
            await run.serve(resume=True)
        return drained

    summary, pending = anyio.run(main)
    assert pending == ()
    assert summary["updates"] == 0
    assert summary["rollouts"]["settled"] == 2
    assert summary["rollouts"]["lost"] == 0
    assert summary["tokens"]["queued"] == 6
    assert learner.updates == 6
    assert {"r-000000-0", "r-000000-1"} <= set(learner.rollouts())
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 24
    assert run.summary()["rollouts"]["settled"] == 24
    assert run.summary()["rollouts"]["lost"] == 0


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


def test_a_full_replay_queue_stops_the_reading_until_the_learner_takes_a_batch(run):
    run = run(run={"updates": 3}, replay={"capacity_rollouts": 4})
    learner = run.learner

    async def main():
        async with run.around() as (broker, tasks):
            seen = []

            async def training():
                await learner.hello()
                while await broker.last_records_sequence() < 36:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
                await anyio.sleep(0.3)
                seen.append(run.status()["held"])
                await learner.train()

            tasks.start_soon(training)
            await run.serve()
            return seen[0]

    held = anyio.run(main)
    assert held["queued_groups"] == 2
    assert held["in_flight"] == 8
    assert len(learner.rollouts()) == 12


def test_a_drain_ends_without_a_learner_that_never_came(run):
    run = run(run={"updates": 3, "drain_timeout_s": 0.2})

    async def main():
        async with run.around(play=None) as (broker, _):
            await broker.request_drain()
            with anyio.fail_after(20):
                await run.serve(resume=True)

    anyio.run(main)
    assert run.summary()["updates"] == 0
    assert run.status()["phase"] == "ended"


def test_sigterm_ends_the_role_with_a_summary(run):
    run = run()

    async def main():
        async with run.around(play=None) as (broker, _), anyio.create_task_group() as tasks:
            tasks.start_soon(run.serve)
            while len(await broker.pending_requests()) < 12:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            await anyio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

    anyio.run(main)
    assert run.summary()["rollouts"] == {
        "settled": 0,
        "scored": 0,
        "timed_out": 0,
        "agent_failed": 0,
        "infra": 0,
        "lost": 0,
    }
    assert run.rows("SELECT state, count(*) FROM rollouts GROUP BY state") == [("in_flight", 12)]


def test_the_streams_clock_stands_still_while_nothing_is_taken():
    times = iter([10.0, 12.0, 15.0, 16.0])  # asked, stopped, started, asked
    clock = StreamClock(lambda: next(times))
    assert clock.now() == 10.0
    with clock.stopped():
        assert clock.now() == 12.0
    assert clock.now() == 13.0


def test_records_below_the_checkpoints_cursor_are_purged(run):
    run = run(run={"updates": 2}, nats={"keep_records_bytes": 0})
    learner = run.learner

    async def main():
        async with run.around() as (broker, tasks):
            tasks.start_soon(learner.hello_and_train)
            await run.serve()
            last = await broker.last_records_sequence()
            return last, await broker.has_records(1)

    last, left = anyio.run(main)
    assert learner.saved == (2, StreamCursor(sequence=last + 1))
    assert not left


def test_records_that_are_done_with_are_kept_for_replay_as_long_as_there_is_room(run):
    run = run(run={"updates": 2})

    async def main():
        async with run.around() as (broker, tasks):
            tasks.start_soon(run.learner.hello_and_train)
            await run.serve()
            return await broker.has_records(1)

    assert anyio.run(main)
    assert run.learner.saved[0] == 2
    assert len(run.rows("SELECT batch_id FROM batches")) == 2  # and so are the batches that were made of them


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


def test_the_longest_time_that_the_event_loop_was_blocked_is_told_once():
    async def main():
        lag = LoopLag(interval_s=0.01)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lag.watch)
            await anyio.sleep(0.05)
            time.sleep(0.3)  # noqa: ASYNC251
            await anyio.sleep(0.05)
            found = lag.take(), lag.take()
            tasks.cancel_scope.cancel()
        return found

    first, again = anyio.run(main)
    assert 0.25 < first < 5
    assert again == 0.0


def test_a_loop_that_was_blocked_for_more_than_a_second_is_in_the_status_and_worth_a_warning(run, caplog):
    run = run()
    seen = []

    async def blocking():
        while not run.runtime.path("status.json").exists():  # noqa: ASYNC110
            await anyio.sleep(0.02)
        time.sleep(1.2)  # noqa: ASYNC251
        while not seen or max(seen) < 1:
            await anyio.sleep(0.02)
            seen.append(run.status()["loop_lag_s"])

    async def main():
        async with run.around(play=None):
            await run.serve_until(blocking)

    with caplog.at_level("WARNING", logger="clawpipe"):
        anyio.run(main)
    assert max(seen) > 1
    assert "event loop was blocked" in caplog.text


def test_a_learner_that_has_seen_more_than_this_run_is_an_error_that_says_what_to_do(run):
    run = run()

    async def main():
        async with run.around(play=None) as (broker, tasks):
            tasks.start_soon(broker.ask, Hello(version=9, updates=9, cursor=StreamCursor()), 1)
            await run.serve()

    with pytest.raises(BaseExceptionGroup) as caught:
        anyio.run(main)
    known, _ = caught.value.split(ClawpipeError)
    assert "resume the run folder that the checkpoint belongs to" in str(known.exceptions)


def test_a_new_run_refuses_streams_that_hold_another_runs_records(run):
    run = run()

    async def main():
        async with run.around(play=None) as (broker, _):
            await broker.publish_call(Script().call([1], [2]))
            with pytest.raises(BrokerError, match="prefix 'clawpipe' hold another run's records"), anyio.fail_after(20):
                await run.serve()

    anyio.run(main)


def test_a_run_folder_without_tasks_is_an_error_before_anything_starts(run):
    run = run()
    run.runtime.path("tasks.json").write_text("[]")
    with pytest.raises(ClawpipeError, match="the list of tasks is empty"):
        anyio.run(run.serve)


def test_the_runtime_of_the_tests_is_one_that_the_launcher_could_write(run, tmp_path):
    run = run()
    runtimes.save(run.runtime)
    assert runtimes.load(tmp_path) == run.runtime
