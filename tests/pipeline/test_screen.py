from __future__ import annotations

from typing import Any

from clawpipe.pipeline.screen import summary_lines

SUMMARY: dict[str, Any] = {
    "updates": 2,
    "reward": {"first": 0.25, "last": 0.5},
    "rollouts": {"scored": 3, "agent_failed": 1, "infra": 0},
    "tokens": {"sampled": 90, "trained": 60, "dropped": {"late": 20, "stale": 10}},
    "versions_pushed": 2,
    "push_pause_s": {"p50": None, "p99": None},
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
        "tokens: 90 sampled, 60 trained, 30 dropped",
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
