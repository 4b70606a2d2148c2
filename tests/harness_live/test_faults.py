"""Faults between a harness and its provider: what was sampled lives on, wholly or in part, or is dropped by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from clawpipe.pipeline.records import Role, Scored
from clawpipe.pipeline.segments import DropReason
from harness_live.books import check_one_branch
from harness_live.faults import Cut, Refuse
from harness_live.finished import Rollout, table
from harness_live.scripted import Said
from harness_live.tongues import ALL, DONE, ERRAND, SHORT, WRITE

# What a dialect sends when one finished call is out.
CALL_IS_OUT = {
    "claude_code": Cut(b'"content_block_stop"'),
    "codex": Cut(b'"response.output_item.done"'),
    "openclaw": Cut(b'"tool_calls"', 2),
    "opencode": Cut(b'"tool_calls"', 2),
    "qwen_code": Cut(b'"tool_calls"', 2),
}
RUNS_THE_PART = ("claude_code", "codex", "opencode")
REPEATS = ("claude_code", "codex", "opencode", "qwen_code")  # the very request, when it failed


@pytest.mark.parametrize("kind", SHORT)
def test_a_stream_dropped_behind_a_finished_call_is_adopted_in_part_or_not_at_all(live, kind, tongue) -> None:
    script = {
        Role.MAIN: [
            tongue.read("rows.csv"),
            tongue.run(WRITE) + "\n" + tongue.run("echo never"),
            tongue.run(WRITE),
            DONE,
            DONE,
        ]
    }
    request = 2 if kind == "opencode" else 1  # OpenCode asks for a title first
    rollout = live.run(tongue.config(), ERRAND, script, {request: CALL_IS_OUT[kind]})
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    before, dropped, after, *_ = rollout.main
    if kind == "qwen_code":
        _check_repeat(rollout, kind)
        return
    if kind in RUNS_THE_PART:
        assert rollout.kept_text(dropped) == tongue.run(WRITE), table(rollout)
        assert set(rollout.fate_of(dropped).dropped) == {DropReason.NOT_ADOPTED}
        assert begins(after, dropped, rollout.fate_of(dropped).kept)
        assert not rollout.broken
    else:
        assert rollout.fate_of(dropped).kept == 0, table(rollout)
        assert begins(after, before, len(before.sampled.ids))
    assert len(rollout.branches) == 1
    assert rollout.fate_of(before).kept == len(before.sampled.ids)
    assert rollout.fate_of(after).kept == len(after.sampled.ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_a_stream_dropped_in_its_text_is_asked_for_again(live, kind, tongue) -> None:
    """The same request gets the same answer; an altered one gets another, and the first is dropped by name.

    Qwen Code goes on behind the text that it has.
    """
    script = {Role.MAIN: [tongue.read("rows.csv"), "Some text. " + tongue.run(WRITE), tongue.run(WRITE), DONE, DONE]}
    request = 2 if kind == "opencode" else 1
    rollout = live.run(tongue.config(), ERRAND, script, {request: Cut(b"Some text")})
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    if kind == "qwen_code":
        _check_text_adopted(rollout)
    else:
        _check_repeat(rollout, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_an_answer_that_was_lost_on_its_way_is_given_again(live, kind, tongue) -> None:
    script = {Role.MAIN: [tongue.read("rows.csv"), tongue.run(WRITE), tongue.run(WRITE), DONE, DONE]}
    request = 2 if kind == "opencode" else 1
    rollout = live.run(tongue.config(), ERRAND, script, {request: Refuse(500, late=True)})
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    _check_repeat(rollout, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "codex"])  # which gives up at once
def test_a_provider_that_is_busy_once_leaves_no_trace(live, kind, tongue) -> None:
    script = {Role.MAIN: [tongue.read("rows.csv"), tongue.run(WRITE), DONE]}
    request = 2 if kind == "opencode" else 1
    rollout = live.run(tongue.config(), ERRAND, script, {request: Refuse(429)})
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), rollout.output[-500:]
    assert len(rollout.main) == 3
    check_one_branch(rollout)


def _check_repeat(rollout: Rollout, kind: str) -> None:
    """A repeated request was answered by the call that it repeats; an altered one left a dead leaf behind."""
    if kind in REPEATS:
        num_main = sum(seen.path.endswith(("messages", "completions", "responses")) for seen in rollout.seen)
        assert num_main == len(rollout.records) + 1, table(rollout)
        check_one_branch(rollout)
        return
    before, lost, after, *_ = rollout.main
    assert set(rollout.fate_of(lost).dropped) <= {DropReason.UNDELIVERED, DropReason.DEAD_LEAF}
    assert rollout.fate_of(lost).kept == 0, table(rollout)
    assert begins(after, before, len(before.sampled.ids))
    assert len(rollout.branches) == 1


def _check_text_adopted(rollout: Rollout) -> None:
    _, dropped, after, *_ = rollout.main
    assert rollout.kept_text(dropped).strip() == "Some text.", table(rollout)
    assert set(rollout.fate_of(dropped).dropped) == {DropReason.NOT_ADOPTED}
    assert begins(after, dropped, rollout.fate_of(dropped).kept)
    assert not rollout.broken
    assert len(rollout.branches) == 1


def begins(later: Said, earlier: Said, num_sampled: int) -> bool:
    """Whether the later prompt begins with the earlier one and that many of the tokens sampled after it."""
    part: Sequence[int] = np.concatenate((earlier.prompt, earlier.sampled.ids[:num_sampled]))
    return np.array_equal(later.prompt[: len(part)], part)
