"""What a model says, on its way through each harness and back into the next prompt."""

from __future__ import annotations

import pytest

from clawpipe.pipeline.config import McpConfig
from clawpipe.pipeline.records import Role, Scored
from harness_live.books import check_one_branch, is_chain
from harness_live.finished import table
from harness_live.scripted import Say, call
from harness_live.tongues import ALL, DONE, ERRAND, QUICK, SHORT, WRITE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_tool_turns_are_one_branch_and_all_of_it_is_trained(live, tongue) -> None:
    script = {Role.MAIN: [tongue.read("rows.csv"), "Two.\n\n" + tongue.run(WRITE), tongue.run("cat count.txt"), DONE]}
    rollout = live.run(tongue.config(), ERRAND, script)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert len(rollout.main) == 4
    assert "alpha-17" in rollout.text(rollout.main[1])
    check_one_branch(rollout)


@pytest.mark.parametrize("kind", SHORT)
def test_odd_turns_unknown_tools_and_mcp_keep_the_branch_whole(live, tongue, tmp_path_factory) -> None:
    """What harnesses rewrite in a history: JSON, white space, Unicode, thinking, several calls, ids."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "whales.txt").write_text("The blue whale, Balaenoptera, is long.\n")
    config = tongue.config(mcp=(McpConfig(name="docs", documents=str(folder)),))
    script = {
        Role.MAIN: [
            "<think>\n think é \n\n</think>\n\n\n  Leading  é text \U0001f600 and trailing \n\n"
            + tongue.read("rows.csv"),
            "  \n" + tongue.odd_run("printf 'a\u00e9/ x'") + "\n" + tongue.run(WRITE),
            call("no_such_tool", '{"a":  1}'),
            "<think>Now the documents.</think>\n\n" + tongue.ask("docs", "search", query="Balaenoptera"),
            "\n " + DONE + " \n",
        ]
    }
    rollout = live.run(config, ERRAND, script)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert len(rollout.main) == 5
    assert "a\u00e9/ x" in rollout.text(rollout.main[2])[-2000:]
    assert "whales.txt" in rollout.text(rollout.main[4])[-2000:]
    check_one_branch(rollout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_a_call_that_cannot_be_parsed_reaches_the_harness_as_text(live, tongue) -> None:
    """Its branch is trained as it was sampled. No harness runs a tool for it, or ends in an error over it."""
    bad = f'<tool_call>\n{{"name": "{tongue.shell}", "arguments": {{"{tongue.command}": "rm rows.csv\n</tool_call>'
    script = {Role.MAIN: [tongue.read("rows.csv"), bad, DONE, DONE], Role.NUDGE: [DONE]}
    rollout = live.run(tongue.config(), ERRAND, script)
    assert rollout.outcome == Scored(reward=0.0, checks={"count.txt": 0.0}), rollout.output[-500:]
    assert [record.malformed_tool_call for record in rollout.records if record.role is Role.MAIN][:2] == [False, True]
    assert rollout.fate_of(rollout.main[1]).kept == len(rollout.main[1].sampled.ids), table(rollout)
    assert is_chain(rollout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_an_engine_that_takes_longer_than_the_keepalive_is_waited_for(live, tongue) -> None:
    script = {Role.MAIN: [Say(tongue.run(WRITE), delay_s=8.0), DONE]}
    rollout = live.run(tongue.config(), ERRAND, script, proxy={"keepalive_s": 1.0})
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert len(rollout.main) == 2
    check_one_branch(rollout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_the_wall_clock_cuts_the_call_in_flight_and_lists_it_so(live, kind, tongue) -> None:
    script = {Role.MAIN: [tongue.run(WRITE), Say("Never said to the end.", endless=True)]}
    rollout = live.run(tongue.config(), ERRAND, script, wall_clock_s=30.0 if kind in QUICK else 90.0)
    assert type(rollout.outcome).__name__ == "TimedOut"
    assert rollout.reward == 1.0
    first, last = rollout.main
    assert rollout.fate_of(first).kept == len(first.sampled.ids)
    assert rollout.fate_of(last).dropped == {"cut": 3}
    assert [entry.cut for entry in rollout.manifest.calls if entry.call_id == last.call_id] == [True]
