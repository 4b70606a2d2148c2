"""The service on a real nats-server, between an actor and a learner that follow a script."""

from __future__ import annotations

import os
import signal
import time

import anyio
import msgspec
import pytest
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.errors import BrokerError, ClawpipeError
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
