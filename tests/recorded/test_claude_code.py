"""Claude Code's recordings through tree and segments.

In most scenarios the script answers with a tool call, another tool call and a text; from the second answer on it plays
its fault. Claude Code sends a turn again word for word, so that a conversation is one branch, but for the cases that
`shared/facts/harnesses.md` names: those are forks here, where no sampled turn is given back for a replayed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from clawpipe.pipeline.records import Role
from clawpipe.pipeline.segments import DropReason
from harness.recordings import scenarios
from recorded.conversations import Sampled, conversation, selection, trained, tree_of
from recorded.expectations import Expected, check, line

# Two answers to the same prompt that are word for word the same: the script's retry got what the first try had.
AGAIN = {1: {DropReason.DUPLICATE: 2}}
# Of [thinking, white space, call, call with 1e2 for 100] the two first calls come back, and the last re-written; and
# [call, text] comes back as [text, call].
ODD = line(0, 1, 2, 4, leaves=3, begun={1: 2}, dropped={3: {DropReason.DEAD_LEAF: 3}})
# An empty answer is one sampled token, the end of the turn. The turn is thrown away and a user's text appended.
EMPTY = line(0, 2, leaves=2, dropped={1: {DropReason.DEAD_LEAF: 1}})
# After two answers the usage was over the threshold: the history is asked for a summary without its newest round, and
# a new one begins with it.
THRESHOLD = Expected(((0, 1), (3,)), compactions=((2,),))

EXPECTED = {
    # tool, tool, text
    "basic": line(0, 1, 2),
    "bare": line(0, 1, 2),
    "defaults": line(1, 2, 3),  # its first line is no model call
    "nobody": line(0, 1, 2),
    "sonnet": line(0, 1, 2),
    "bare_mcp": line(0, 1),
    "mcpnots": line(0, 1),  # the server's tools are all there from the start
    "multi_t1": line(0, 1),
    "multi": line(0, 1),  # a resumed session: the turns of multi_t1 are context, sampled in another process
    # The script calls the tool search, and the array of tools has one more from then on: nothing behind the
    # instructions is shared, and the conversation before is a branch of its own.
    "mcp": Expected(((0,), (1, 2))),
    # Errors for the second request, which comes again as it was.
    "f400": line(0, 3, refused=(1, 2)),
    "f429ra": line(0, 3, refused=(1, 2)),
    "f500": line(0, 4, refused=(1, 2, 3)),
    # Two answers cut in mid-text, then another one: the partial text is thrown away.
    "drop": line(0, 3, broken=(1, 2)),
    "drop1": line(0, 3, broken=(1, 2)),
    # Silence. The harness gives up and asks again, and gets what it had waited for.
    "stall0": line(0, 2, broken=(1,), dropped=AGAIN),
    "delay_api15": line(0, 2, broken=(1,), dropped=AGAIN),
    # Silence behind the first words, and no second try: the run ends with an error.
    "stall4_nofb": line(0, broken=(1,)),
    "stall4_wd": line(0, broken=(1,)),
    "nofb20": line(0, broken=(1,)),
    "stallping": line(0, 1),  # pings while it is silent: the harness waits
    # The token limit cuts two texts; each is kept and a request to go on appended.
    "maxtok": line(0, 1, 2, 3),
    "empty": EMPTY,
    "emptytext": EMPTY,
    # A tool that is not there, twice: an error is its result.
    "badtool": line(0, 1, 2, 3),
    # [text, call with half a JSON], twice: the text comes back, the call in a wrapper.
    "badjson": line(0, 1, 2, 3, leaves=3, begun={1: 1, 2: 1}),
    "odd": ODD,
    "odd_nosys": ODD,
    # The usage stays below the threshold, or is over it.
    "thr28000": line(0, 1, 2),
    "thr34000": THRESHOLD,
    "thr40000": THRESHOLD,
    "thr50000": THRESHOLD,
    "thr52000": THRESHOLD,
    "thr56000": THRESHOLD,
    "thrA50000": THRESHOLD,
    "compact": Expected(((0, 1, 2), (4, 5, 6)), compactions=((3,),)),
    # The prompt is refused as too long, and the history asked for a summary without its two newest rounds.
    "ctxerr": Expected(((0, 1, 2), (5, 6)), refused=(3,), compactions=((4,),)),
    "ctxerr_dis": line(0, 1, 2, refused=(3,)),  # compaction is off: the run ends
    # Two agents at once: in the background, while the main one ends its turn and is called again; one refused by the
    # limit of one; in the foreground.
    "sub": line(0, 1, 8, subagents=((2, 4, 6), (3, 5, 7))),
    "sub_cap1": line(0, 4, subagents=((1, 2, 3),)),
    "sub_nobg": line(0, 7, subagents=((1, 4, 5), (2, 3, 6))),
}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_a_recording_has_the_structure_that_its_script_gave_it(scenario: str) -> None:
    check("claude", scenario, EXPECTED[scenario])


def test_no_recording_is_left_out() -> None:
    assert set(scenarios("claude")) <= set(EXPECTED)


def test_a_session_without_the_billing_line_is_one_branch_as_deep_as_it_has_calls() -> None:
    """claude-code#68900, ollama#14918, vllm-mlx#277: a nonce in the instructions ends every shared prefix."""
    tree = tree_of(without_billing_line(conversation("claude", "basic")))
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5]  # the root, then three prompts and their answers in a row
    assert selection(without_billing_line(conversation("claude", "basic"))).num_leaves == 1


def test_the_recorded_billing_line_stays_the_same_within_a_conversation_and_no_longer() -> None:
    """Its suffix follows the first user message: one value per segment and per sub-agent, none per call."""
    calls = conversation("claude", "basic")
    assert len({call.prompt[0] for call in calls}) == 1
    compacted = conversation("claude", "compact")
    assert len({call.prompt[0] for call in compacted[:4]}) == 1
    assert len({call.prompt[0] for call in compacted}) == 2
    agents = [call for call in conversation("claude", "sub_nobg") if call.role is Role.SUBAGENT]
    assert len({call.prompt[0] for call in agents}) == 2


def test_the_billing_line_costs_every_segment_and_sub_agent_its_shared_prefix() -> None:
    """Both segments have the same instructions and tools; both sub-agents the same reminder on top of that."""
    calls = conversation("claude", "compact")
    assert shared(calls, 0, 4) == 0
    assert shared(without_billing_line(calls), 0, 4) == 3
    calls = conversation("claude", "sub_nobg")
    assert shared(calls, 1, 2) == 0
    assert shared(without_billing_line(calls), 1, 2) == 4


def test_a_nonce_in_every_request_would_make_a_star() -> None:
    """What the header did in other versions: no call extends another, and each is trained as if it stood alone."""
    calls = conversation("claude", "basic")
    marked = [replace(call, prompt=(("system", call.number), *call.prompt[1:])) for call in calls]
    found = selection(marked)
    assert found.num_leaves == 3
    assert trained(found.branches) == [{0: 2}, {1: 2}, {2: 2}]
    assert sum(len(branch.tokens) for branch in found.branches) == 9 + 12 + 15
    [whole] = selection(calls).branches
    assert len(whole.tokens) == 15


def without_billing_line(calls: Sequence[Sampled]) -> list[Sampled]:
    """The calls as they are with CLAUDE_CODE_ATTRIBUTION_HEADER=0, which takes the first block away."""
    return [replace(call, prompt=call.prompt[1:]) for call in calls]


def shared(calls: Sequence[Sampled], number: int, other: int) -> int:
    """How many blocks two prompts share."""
    prompts = {call.number: call.prompt for call in calls}
    pairs = zip(prompts[number], prompts[other], strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), len(prompts[number]))
