from __future__ import annotations

import json
from typing import Any

from clawpipe.pipeline.screen import status_lines, summary_lines

SUMMARY: dict[str, Any] = {
    "updates": 2,
    "reward": {"first": 0.25, "last": 0.5},
    "rollouts": {"scored": 3, "agent_failed": 1, "infra": 0},
    "tokens": {"sampled": 90, "trained": 60, "dropped": {"late": 20, "stale": 10}},
    "versions_pushed": 2,
    "push_pause_s": {"p50": None, "p99": None},
    "survivors": {"trained": {"rollouts": 3, "sampled": 21.6, "calls": 2.0, "wall_s": 3.0, "reward": 0.5}},
    "harness": {},
}
HARNESS: dict[str, Any] = {
    "rollouts": 4,
    "roles": {"main": 7, "compaction": 1},
    "broken_grafts": {"foreign": 2, "partial": 1},
    "prefix_reuse": 0.876,
    "tokens": {"sampled": 90, "trained": 60, "dropped": {}},
    "reward_mean": 0.375,
}


def test_the_end_of_a_run_says_what_came_of_its_rollouts_and_tokens():
    assert summary_lines(SUMMARY) == [
        "updates 2, verified reward 0.250 -> 0.500 (mean of the first and last three updates)",
        "rollouts: 3 scored, 1 agent failed",
        "tokens: 90 sampled, 60 trained, 30 dropped (20 late, 10 stale)",
        "versions pushed 2",
    ]


def test_each_harness_has_a_line_that_tells_zero_from_what_was_not_measured():
    idle = {**HARNESS, "rollouts": 0, "roles": {}, "broken_grafts": {}, "prefix_reuse": None, "reward_mean": None}
    found = summary_lines({**SUMMARY, "harness": {"openclaw": HARNESS, "idle": idle}})
    assert found[-2:] == [
        "openclaw: 4 rollouts, mean reward 0.375, calls 7 main, 1 compaction, tokens 60 trained of 90, "
        "prefix reuse 88%, 3 calls with a broken graft",
        "idle: 0 rollouts, mean reward not measured, calls none, tokens 60 trained of 90, "
        "prefix reuse not measured, 0 calls with a broken graft",
    ]


def test_what_was_dropped_is_set_against_what_was_trained():
    survivors = {
        **SUMMARY["survivors"],
        "over_branched": {"rollouts": 2, "sampled": 80.0, "calls": 9.0, "wall_s": 3.0, "reward": 0.75},
        "lost": {"rollouts": 1, "sampled": 0.0, "calls": 0.0, "wall_s": None, "reward": None},
    }
    assert summary_lines({**SUMMARY, "survivors": survivors})[-1] == (
        "trained rollouts: 3 of 22 tokens, reward 0.500; over branched: 2 of 80 tokens, reward 0.750; "
        "lost: 1 of 0 tokens, reward not measured"
    )


def test_the_status_shows_records_that_were_set_aside(tmp_path):
    newest = [{"flaw": "unsound", "rollout": "r-1", "message_id": "r-1.a1.c0", "sequence": 7, "detail": "2 logprobs"}]
    counts = {"unsound": 2, "missing_parent": 1, "unadmitted": 0}
    (tmp_path / "status.json").write_text(json.dumps({"dead_letters": {"counts": counts, "newest": newest}}))
    assert status_lines(tmp_path)[1:] == [
        "dead letters: 3 records were set aside: 1 missing parent, 2 unsound",
        "  r-1, r-1.a1.c0: 2 logprobs",
    ]


def test_the_status_says_when_less_staleness_is_admitted_than_configured(tmp_path):
    for now, said in ((1, ", max_staleness lowered to 1 of 4"), (4, "")):
        (tmp_path / "status.json").write_text(json.dumps({"max_staleness": {"now": now, "configured": 4}}))
        assert status_lines(tmp_path) == [f"running: update 0 of ?{said}"]


def test_the_status_says_nothing_of_dead_letters_when_there_are_none(tmp_path):
    (tmp_path / "status.json").write_text(json.dumps({"dead_letters": {"counts": {}, "newest": []}}))
    assert status_lines(tmp_path) == ["running: update 0 of ?"]
