"""The fixture itself, on the harness that has no secrets."""

from __future__ import annotations

from harness_live.live import Errand, extends
from harness_live.scripted import call

from clawpipe.pipeline.config import AgentLoopConfig
from clawpipe.pipeline.records import Role, Scored


def test_agentloops_calls_are_one_branch_and_all_of_it_is_trained(live) -> None:
    errand = Errand("Count the rows.", {"rows.csv": b"a\nb\n"}, {"count.txt": "2"})
    script = {
        Role.MAIN: [
            call("read_file", {"path": "rows.csv"}),
            'Two.\n\n' + call("write_file", '{ "path":"count.txt",  "content" : "2" }'),
            call("finish", {}),
        ]
    }
    rollout = live.run(AgentLoopConfig(max_tokens=4096), errand, script)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0})
    first, second, third = rollout.said
    assert extends(first, second)
    assert extends(second, third)
    assert len(rollout.paths) == 1
    assert rollout.dropped == {}
