"""Sub-agents: their calls are told from the main conversation's, and are not trained."""

from __future__ import annotations

import re

import pytest

from clawpipe.pipeline.config import ClaudeCodeConfig
from clawpipe.pipeline.records import Role, Scored
from clawpipe.pipeline.segments import DropReason
from harness_live.books import check_one_branch
from harness_live.finished import table
from harness_live.scripted import Moment, Say, call
from harness_live.tongues import DONE, ERRAND, IN_CI, TONGUES, WRITE

ABLE = [
    pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow])
    for name, tongue in TONGUES.items()
    if tongue.agent
]


@pytest.mark.parametrize("kind", ABLE)
def test_two_sub_agents_are_dropped_as_auxiliary_and_the_main_branch_is_kept_whole(live, kind, tongue) -> None:
    # Codex's sub-agents die with its main loop, and waiting for them ends with the first.
    waits, until = ([_wait, _wait], (Role.SUBAGENT, 4)) if kind == "codex" else ([], None)
    agents = tongue.delegate("Look into rows.csv.") + "\n" + tongue.delegate("Look into it too.")
    script = {
        Role.MAIN: ["I delegate.\n" + agents, *waits, Say(tongue.run(WRITE), until=until), DONE, DONE],
        Role.SUBAGENT: [Say(tongue.read("rows.csv"), 0.3), Say(tongue.read("rows.csv"), 0.5), "Two rows.", "Two."],
    }
    rollout = live.run(tongue.config(), ERRAND, script)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert len(rollout.of(Role.SUBAGENT)) == 4, table(rollout)
    assert DropReason.AUXILIARY_SUBAGENT in rollout.dropped
    check_one_branch(rollout)


def test_claude_codes_sub_agents_in_the_background_bring_the_main_loop_back(live, installed) -> None:
    installed("claude_code")
    tongue = TONGUES["claude_code"]
    script = {
        Role.MAIN: ["I delegate.\n" + tongue.delegate("Look into rows.csv."), tongue.run(WRITE), DONE, "Still two."],
        Role.SUBAGENT: [tongue.read("rows.csv"), Say("Two rows.", 0.5, until=(Role.MAIN, 3))],
    }
    rollout = live.run(ClaudeCodeConfig(background_tasks=True), ERRAND, script)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert rollout.engine.surplus == {}
    assert len(rollout.main) == 4
    assert "Two rows." in rollout.text(rollout.main[-1])
    check_one_branch(rollout)


def _wait(moment: Moment) -> str:
    targets = sorted(set(re.findall(r"agent_id[^0-9a-f]+([0-9a-f-]{36})", moment.prompt)))
    return call("multi_agent_v1__wait_agent", {"targets": targets, "timeout_ms": 30000})
