"""The recordings of Codex, OpenCode and Qwen Code through tree and segments."""

from __future__ import annotations

import pytest

from clawpipe.pipeline.segments import DropReason
from harness.recordings import scenarios
from recorded.expectations import Expected, check, line

# Codex sends everything again word for word.
CODEX = {
    "mcp": line(0, 1),
    "netcut": line(0, 1),
    "idle_timing": line(0, 1, 2),
    "badtool": line(0, 1, 2, 3),
    "f429ra": line(0, 3, refused=(1, 2)),
    "f500": line(0, 4, refused=(1, 2, 3)),
    "drop": line(0, 3, broken=(1, 2)),
    "ctxerr": line(0, 1, 2, refused=(3,)),  # an overflow within a turn ends the run
    # The new history is the old one's opening and the summary: it extends the first prompt.
    "compact": Expected(((0, 1, 2), (4, 5, 6, 7)), compactions=((3,),)),
    # Two agents; the main one ends while the second waits for its last answer, which nobody takes.
    "sub": line(0, 2, 8, 9, broken=(7,), subagents=((3, 5), (1, 4, 6))),
}
# OpenCode asks for a title first, whatever the task.
OPENCODE = {
    "basic": line(1, 2, 3, other=(0,)),
    "mcp": line(1, 2, other=(0,)),
    "netcut": line(1, 2, other=(0,)),
    "f429": line(1, 4, refused=(2, 3), other=(0,)),
    "f500": line(1, 5, refused=(2, 3, 4), other=(0,)),
    # [text, call], twice, with half a JSON or of no such tool: the call comes back as one of a tool named `invalid`.
    "badjson": line(1, 2, 3, 4, leaves=3, begun={2: 1, 3: 1}, other=(0,)),
    "badtool": line(1, 2, 3, 4, leaves=3, begun={2: 1, 3: 1}, other=(0,)),
    # [thinking, white space, call, call with 1e2 for 100] comes back with the last one re-written;
    # [text, thinking, text, call] with its texts joined; [call, text] as [text, call].
    "odd": line(
        *(1, 2, 5),
        leaves=4,
        begun={2: 2},
        dropped={3: {DropReason.DEAD_LEAF: 5}, 4: {DropReason.DEAD_LEAF: 3}},
        other=(0,),
    ),
    "sub": line(1, 8, subagents=((2, 5, 6), (3, 4, 7)), other=(0,)),
}
QWEN = {
    "basic": line(0, 1, 2),
    "idle_timing": line(0, 1, 2),
    "mcp": line(0, 1, 2),
    "netcut": line(0, 1, 2),
    "badtool": line(0, 1, 2, 3),
    "f429": line(0, 3, refused=(1, 2)),
    # Two answers without a word; asked again as it was.
    "empty": line(0, 3, leaves=2, dropped={1: {DropReason.DEAD_LEAF: 1}, 2: {DropReason.DEAD_LEAF: 1}}),
    # [text, call with half a JSON], asked again as it was, and the same with another id: the text comes back with the
    # call repaired. Both tries sampled the text.
    "badjson": line(
        *(0, 1, 3), leaves=3, begun={1: 1}, dropped={2: {DropReason.DUPLICATE: 1, DropReason.DEAD_LEAF: 2}}
    ),
    "compact": line(0, 1, 2, compactions=((3,),)),  # the summary was the last request
    # Thinking comes back without the white space around it, so that the first turn is another from its first block;
    # then as OpenCode's, but for the second turn.
    "odd": line(
        *(1, 4),
        leaves=5,
        begun={1: 2},
        dropped={0: {DropReason.DEAD_LEAF: 4}, 2: {DropReason.DEAD_LEAF: 5}, 3: {DropReason.DEAD_LEAF: 3}},
    ),
}
EXPECTED = {
    (harness, scenario): expected
    for harness, table in (("codex", CODEX), ("opencode", OPENCODE), ("qwen", QWEN))
    for scenario, expected in table.items()
}


@pytest.mark.parametrize(("harness", "scenario"), EXPECTED)
def test_a_recording_has_the_structure_that_its_script_gave_it(harness: str, scenario: str) -> None:
    check(harness, scenario, EXPECTED[harness, scenario])


@pytest.mark.parametrize(("harness", "table"), [("codex", CODEX), ("opencode", OPENCODE), ("qwen", QWEN)])
def test_no_recording_is_left_out(harness: str, table: dict[str, Expected]) -> None:
    assert set(scenarios(harness)) <= set(table)
