"""What holds for every recording, whatever its script did."""

from __future__ import annotations

import random
from itertools import product

import pytest

from clawpipe.pipeline.tree import PrefixTree, build, resolve
from recorded.conversations import (
    ALL,
    call_id,
    conversation,
    every_recording,
    ids,
    records,
    sampled_as,
    selection,
    tree_of,
)

RECORDINGS = every_recording()


def content(tree: PrefixTree) -> tuple[object, ...]:
    return (
        tree.parent.tolist(),
        tree.depth.tolist(),
        [tokens.tolist() for tokens in tree.tokens],
        [(p.call.call_id, p.prompt_node, p.end_node) for p in tree.calls],
    )


@pytest.mark.parametrize(("harness", "scenario"), RECORDINGS)
def test_the_tree_is_the_same_with_the_proxys_deltas_and_with_whole_prompts(harness: str, scenario: str) -> None:
    calls = conversation(harness, scenario)
    assert content(tree_of(calls, hints=True)) == content(tree_of(calls, hints=False))


@pytest.mark.parametrize(("harness", "scenario"), RECORDINGS)
def test_the_tree_is_the_same_in_any_order_of_arrival(harness: str, scenario: str) -> None:
    made = records(conversation(harness, scenario), hints=True)
    mixed = random.Random(0).sample(made + made, k=2 * len(made))
    assert content(build(resolve(mixed))) == content(build(resolve(made)))


@pytest.mark.parametrize(("harness", "scenario"), RECORDINGS)
def test_every_call_is_spelled_as_it_was_recorded(harness: str, scenario: str) -> None:
    calls = conversation(harness, scenario)
    tree, table = tree_of(calls), {}
    for call, placed in zip(calls, tree.calls, strict=True):
        prompt, completion = ids(call.prompt, table).tolist(), ids(call.completion, table).tolist()
        assert tree.spell(placed.prompt_node).tolist() == prompt
        assert tree.spell(placed.end_node).tolist() == prompt + completion
        assert placed.call.call_id == call_id(call.number)


@pytest.mark.parametrize(("harness", "scenario"), RECORDINGS)
def test_a_trained_block_stands_behind_what_its_call_was_asked(harness: str, scenario: str) -> None:
    calls = conversation(harness, scenario)
    table = {}
    contexts = {c.number: ids(c.prompt, table).tolist() + ids(c.completion, table).tolist() for c in calls}
    starts = {c.number: len(c.prompt) for c in calls}
    for auxiliary in (False, True):
        seen = set()
        for branch in (branch for part in selection(calls, auxiliary=auxiliary).parts for branch in part.branches):
            for entry, value in zip(branch.entries.tolist(), branch.logprobs.tolist(), strict=True):
                number, place = sampled_as(value)
                assert branch.tokens[: entry + 1].tolist() == contexts[number][: starts[number] + place + 1]
                assert (number, place) not in seen
                seen.add((number, place))


@pytest.mark.parametrize(("harness", "scenario"), RECORDINGS)
def test_every_sampled_block_is_trained_or_dropped_for_a_reason(harness: str, scenario: str) -> None:
    calls = conversation(harness, scenario)
    for auxiliary, leaf_cap in product((False, True), (1, ALL)):
        found = selection(calls, auxiliary=auxiliary, leaf_cap=leaf_cap)
        assert [fate.sampled for fate in found.fates] == [len(call.completion) for call in calls]
        assert all(fate.sampled == fate.kept + sum(fate.dropped.values()) for fate in found.fates)
        assert sum(fate.kept for fate in found.fates) == found.num_kept
