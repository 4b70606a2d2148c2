"""The main job on real parts: `clawpipe up` as a user runs it, to its end, through kills, and drained."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.sandbox, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

GROUPS, GROUP_SIZE = 3, 4  # of the small configuration


def assert_books_balance(run) -> None:
    """The summary, and the books that it is made of, account for every rollout, call and token."""
    summary = run.summary()
    tokens = summary["tokens"]
    waiting = tokens["in_flight"] + tokens["queued"] + tokens["leased"]
    assert tokens["sampled"] == tokens["trained"] + sum(tokens["dropped"].values()) + waiting
    assert summary["rollouts"]["lost"] == 0
    with run.ledger() as books:
        calls = books.execute("SELECT sampled, kept, dropped FROM calls").fetchall()
        states = books.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state").fetchall()
        open_rollouts = books.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'in_flight'").fetchone()[0]
    assert open_rollouts == 0
    assert all(sampled == kept + sum(json.loads(dropped).values()) for sampled, kept, dropped in calls)
    assert sum(sampled for sampled, _, _ in calls) == tokens["sampled"]
    assert summary["calls"] == len(calls)
    assert sum(count for _, count in states) >= summary["rollouts"]["settled"]


def test_a_run_trains_pushes_and_leaves_nothing_behind(small_run):
    run = small_run(updates=4)
    copy = run.folder.parent / "summary.json"
    assert run.ends(run.up("--summary", str(copy))) == 0, run.output
    summary = json.loads(copy.read_bytes())
    assert summary == run.summary()
    assert summary["updates"] == 4
    assert len(summary["reward"]["per_update"]) == 4
    assert summary["rollouts"]["scored"] >= 4 * GROUPS * GROUP_SIZE
    assert summary["calls_aborted"] == 0
    assert summary["calls"] >= summary["rollouts"]["scored"]
    assert summary["harness"]["agentloop"]["roles"] == {"main": summary["calls"]}
    assert summary["versions_pushed"] >= 3
    assert 0 < summary["push_pause_s"]["p50"] <= summary["push_pause_s"]["p99"] < 30
    assert summary["staleness"]["max"] <= 4
    assert summary["tokens"]["trained"] > 0
    assert_books_balance(run)
    assert run.left_behind() == {}


def test_engine_learner_pipeline_and_the_whole_run_are_killed_and_the_run_goes_on(small_run):
    run = small_run(updates=9)
    first = run.up()
    run.await_updates(first, 1)
    kill(run.pids("engine", "EngineCore"))
    run.await_updates(first, 3)
    kill(run.pids("learner", "run learner"))
    run.await_updates(first, 5)
    kill(run.pids("pipeline", "run pipeline"))
    run.await_updates(first, 6)
    run.kill_all(first)
    second = run.up("--resume")
    # The learner has said its last word, or is about to: nobody may wait for it.
    run.await_that(second, lambda: run.status().get("phase") == "finishing", "the end of training")
    kill(run.pids("pipeline", "run pipeline"))
    assert run.ends(second) == 0, run.output
    summary = run.summary()
    assert summary["updates"] == 9
    assert summary["calls_aborted"] == 0
    assert summary["versions_pushed"] >= 9
    assert_books_balance(run)
    assert run.left_behind() == {}


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_drains_and_a_second_one_stops_at_once(small_run):
    run = small_run(updates=500)
    first = run.up()
    run.await_updates(first, 1)
    first.send_signal(signal.SIGINT)
    assert run.ends(first) == 0, run.output
    assert 1 <= run.summary()["updates"] < 500
    assert_books_balance(run)
    assert run.left_behind() == {}
    before = len(run.output)
    second = run.up("--resume")
    run.await_that(second, lambda: run.status().get("phase") == "running", "the resumed run")
    second.send_signal(signal.SIGINT)
    run.await_that(second, lambda: "draining" in run.output[before:], "the drain")
    second.send_signal(signal.SIGINT)
    assert run.ends(second) in (0, 130), run.output
    assert run.left_behind() == {}


def test_a_second_launcher_on_the_same_folder_is_refused(small_run):
    run = small_run(updates=500)
    first = run.up()
    run.await_that(first, lambda: (run.folder / "runtime.json").exists(), "the run folder")
    again = run.up("--resume")
    assert run.ends(again) == 2
    assert "another clawpipe runs in this folder" in run.output
    first.send_signal(signal.SIGINT)
    assert run.ends(first) in (0, 130)
    assert run.left_behind() == {}
