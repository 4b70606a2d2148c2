"""The fixture itself, on the harness that has no secrets."""

from __future__ import annotations

import pytest

from clawpipe.pipeline.config import AgentLoopConfig
from clawpipe.pipeline.records import Role, Scored
from harness_live.books import check_books, check_one_branch
from harness_live.live import Errand
from harness_live.scripted import call

ERRAND = Errand("Count the rows.", {"rows.csv": b"a\nb\n"}, {"count.txt": "2"})
SCRIPT = {
    Role.MAIN: [
        call("read_file", {"path": "rows.csv"}),
        "Two.\n\n" + call("write_file", '{ "path":"count.txt",  "content" : "2" }'),
        call("finish", {}),
    ]
}
HARNESS = AgentLoopConfig(max_tokens=4096)


def test_agentloops_calls_are_one_branch_and_all_of_it_is_trained(live) -> None:
    rollout = live.run(HARNESS, ERRAND, SCRIPT)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0})
    assert len(rollout.main) == 3
    check_one_branch(rollout)


@pytest.mark.parametrize("what", ["ids", "logprobs", "prompt"])
def test_the_books_notice_one_number_that_is_not_the_engines(live, what) -> None:
    rollout = live.run(HARNESS, ERRAND, SCRIPT)
    said = rollout.engine.said[1]
    numbers = said.prompt if what == "prompt" else getattr(said.sampled, what)
    numbers.flags.writeable = True
    numbers[len(numbers) // 2] += 1
    with pytest.raises(AssertionError):
        check_books(rollout)
