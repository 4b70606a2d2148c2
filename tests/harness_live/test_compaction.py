"""A context that does not hold the conversation: the harness sums it up, and both parts are trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice, pairwise

import pytest

from clawpipe.pipeline.records import Role, Scored
from clawpipe.pipeline.segments import DropReason
from harness_live.finished import extends, table
from harness_live.tongues import DONE, ERRAND, SHORT, WRITE


@dataclass(frozen=True)
class Case:
    """How a harness's context fills up: turns that read so many files of so many lines, until the window is full."""

    context_tokens: int
    lines: int
    reads: tuple[int, ...]  # per turn, before the conversation is summed up


CASES = {
    "claude_code": Case(86_000, 600, (1, 1, 1)),
    "openclaw": Case(150_000, 1800, (2, 3, 1)),  # it sums up a history that it takes for large
    "codex": Case(60_000, 600, (1, 1, 1)),
    "opencode": Case(70_000, 600, (1, 1, 1)),
    "qwen_code": Case(130_000, 600, (1, 1, 1, 1)),
}
SUMMARIES = [
    f"<analysis>Part {part}.</analysis>\n<summary>## Goal\nCount rows.\n## Done\n{part} reads</summary>"
    for part in range(4)
]


@pytest.mark.parametrize("kind", SHORT)
def test_a_full_context_is_summed_up_and_the_conversation_goes_on_in_a_new_segment(live, kind, tongue) -> None:
    case = CASES[kind]
    big = "".join(f"line {number} of many lines\n" for number in range(case.lines)).encode()
    names = [f"big-{number}.txt" for number in range(sum(case.reads))]  # Qwen Code shows a file's text once
    errand = dataclasses.replace(ERRAND, files={**ERRAND.files, **dict.fromkeys(names, big)})
    unread = iter(names)
    reads = ["\n".join(tongue.read(name) for name in islice(unread, number)) for number in case.reads]
    script = {
        Role.MAIN: [tongue.read("rows.csv"), *reads, tongue.run(WRITE), DONE],
        Role.COMPACTION: SUMMARIES,
    }
    rollout = live.run(tongue.config(), errand, script, context_tokens=case.context_tokens)
    assert rollout.outcome == Scored(reward=1.0, checks={"count.txt": 1.0}), (table(rollout), rollout.output[-500:])
    assert Role.COMPACTION in rollout.roles, table(rollout)
    assert len(rollout.branches) == 2, table(rollout)
    assert _beginnings(rollout) == 2
    assert set(rollout.dropped) - {DropReason.AUXILIARY_TITLE} == {DropReason.AUXILIARY_COMPACTION}, table(rollout)
    assert rollout.closed.num_kept == sum(len(said.sampled.ids) for said in rollout.main)


def _beginnings(rollout) -> int:
    """How often the main conversation began."""
    return 1 + sum(not extends(one, other) for one, other in pairwise(rollout.main))
