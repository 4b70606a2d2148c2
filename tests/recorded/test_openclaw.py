"""OpenClaw's recordings through tree and segments.

By default it ends every request with a message of its own that moves on with each call: no request extends another,
and a conversation is as many branches as it has calls. With the smallest profile, which the adapter sets, and in
Responses mode within a turn, the message stays away or in its place.
"""

from __future__ import annotations

import pytest

from clawpipe.pipeline.records import Role
from clawpipe.pipeline.segments import DropReason
from harness.recordings import scenarios
from recorded.conversations import conversation, selection
from recorded.expectations import Expected, check, line, star

DEFAULT_LEAF_CAP = 16

EXPECTED = {
    # tool, tool, text
    "basic": star(0, 1, 2),
    "basic2": star(0, 1, 2),
    "lean": star(0, 1, 2),
    "ncc2": star(0, 1, 2),
    "nobody": star(0, 1, 2),
    "noplug": star(0, 1, 2),
    "mintools": line(0, 1, 2),
    "mcpmin": line(0, 1),
    "netcut": star(0, 1),
    "badtool": star(0, 1, 2, 3),
    "badjson": star(0, 1),  # half a JSON: the run ends
    "sub": star(0, 1, 2, 3, 4),  # `exec` cannot start agents, and says so in the tool's result
    # An answer without a word: the end of the turn was sampled and delivered, and the nudge is another conversation.
    "empty": star(0, 1, other=(2,)),
    # Two answers cut in mid-text; a retry has one more message than the first try.
    "drop": star(0, 3, broken=(1, 2)),
    "f500x": star(0, refused=(1, 2, 3, 4, 5, 6, 7, 8)),  # eight errors, then the run ends
    # Silence up to the provider's deadline, which comments do not put off.
    "stall4": star(0, 2, broken=(1,)),
    "stallcomment": star(0, 2, broken=(1,)),
    "ctxerr": star(0, 1, 2, refused=(3,)),  # too long, and too little history to make a summary of
    "bigctx": star(0, 1, 2, 3, 4, 7, 8, 9, refused=(5,), compactions=((6,),)),
    "odd_anth": star(0, 1, 2, 3, 4),
    # Responses: the message stays where it was. Of [thinking, white space, call, call with 1e2 for 100] the last comes
    # back re-written.
    "odd_resp": line(0, 1, 2, 3, 4, leaves=2, begun={1: 2}),
    # The Gateway: several sessions, one after the other, in one recording. In g1, g3 and g6 a session starts two
    # agents; in g1 and g6 it is called again when they are done.
    "gw-g1": star(*range(5), *range(11, 22), subagents=((5,), (6,), (7,), (8,), (9,), (10,))),
    "gw-g3": star(*range(5), 11, 12, subagents=((5,), (6,), (7,), (8,), (9,), (10,))),
    "gw-g6": star(*range(5), 11, 12, 13, subagents=((5,), (6,), (7,), (8,), (9,), (10,))),
    # Every fault, a session each: two compactions and a memory flush; 529, 429 and 400; empty answers; a bad tool;
    # two answers cut behind a finished call, of which nothing comes back; the token limit.
    "gw-g2": star(
        *(0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 13, 14, 15, 19, 20, 26, 27, 30, 31, 33, 34, 36, 37, 38, 39),
        *(40, 43, 44, 45, 46, 47),
        refused=(6, 21, 22, 23, 24, 25, 28, 29, 32),
        broken=(41, 42),
        compactions=((5,), (12,)),
        other=(16, 17, 18, 35, 48),
    ),
    # Responses: the message moves between turns, and the thinking of earlier turns is gone then. A session that is
    # called again by its agents has other instructions and tools than before.
    "gw-g5": Expected(
        ((0, 1), (2, 3), (4, 5), (12, 13, 14), (15, 16, 17, 18, 19, 20, 21, 22, 23)),
        subagents=((7, 9, 10), (6, 8, 11)),
        other=(24,),
    ),
}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_a_recording_has_the_structure_that_its_script_gave_it(scenario: str) -> None:
    check("openclaw", scenario, EXPECTED[scenario])


def test_no_recording_is_left_out() -> None:
    assert set(scenarios("openclaw")) <= set(EXPECTED)


def test_a_long_session_of_the_default_profile_is_over_the_default_leaf_cap() -> None:
    """31 calls were delivered and each is a leaf; the profile that the adapter sets has one for the whole session."""
    calls = conversation("openclaw", "gw-g2")
    found = selection(calls, leaf_cap=DEFAULT_LEAF_CAP)
    assert (found.num_leaves, found.parts) == (31, ())
    main = [fate for fate in found.fates if fate.role is Role.MAIN]
    assert {reason for fate in main for reason in fate.dropped} == {DropReason.OVER_BRANCHED}
    assert selection(conversation("openclaw", "mintools"), leaf_cap=1).num_leaves == 1
