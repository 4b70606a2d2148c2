from __future__ import annotations

from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, scripts

from clawpipe.pipeline.records import FinishReason, Role, VersionSpan, float_bytes, floats, int_bytes, ints
from clawpipe.pipeline.tree import MalformedRecords, build, resolve


def signature(tree):
    return (
        tree.parent.tolist(),
        tree.depth.tolist(),
        [tokens.tolist() for tokens in tree.tokens],
        [(p.call.call_id, p.prompt_node, p.end_node) for p in tree.calls],
    )


@given(scripts(), st.randoms(use_true_random=False))
def test_the_tree_does_not_depend_on_how_the_prompts_were_delta_encoded(script, random):
    plain = Script()
    for prompt, completion in script.texts.values():
        plain.call(prompt, completion, parent=None)
    calls = resolve(script.records)
    random.shuffle(calls)
    assert signature(build(calls)) == signature(build(resolve(plain.records)))


@given(scripts())
def test_flattening_gives_every_call_its_exact_context_and_completion(script):
    tree = build(resolve(script.records))
    assert [p.call.call_id for p in tree.calls] == list(script.texts)
    for placed in tree.calls:
        prompt, completion = script.texts[placed.call.call_id]
        assert tree.spell(placed.prompt_node).tolist() == prompt
        assert tree.spell(placed.end_node).tolist() == prompt + completion
        assert tree.depth[placed.end_node] - tree.depth[placed.prompt_node] == len(completion)
        assert placed.prompt_node in tree.ancestors(placed.end_node)


@given(scripts())
def test_the_nodes_are_exactly_the_prefixes_each_once_cut_at_ends_and_forks(script):
    tree = build(resolve(script.records))
    ends = {p.prompt_node for p in tree.calls} | {p.end_node for p in tree.calls}
    children = {n: [m for m in range(len(tree.parent)) if tree.parent[m] == n] for n in range(len(tree.parent))}
    for node, below in children.items():
        firsts = [int(tree.tokens[m][0]) for m in below]
        assert firsts == sorted(set(firsts))
        if node and node not in ends:
            assert len(below) > 1
    prefixes = {tuple((p + c)[: n + 1]) for p, c in script.texts.values() for n in range(len(p) + len(c))}
    assert sum(len(tokens) for tokens in tree.tokens) == len(prefixes)


@given(scripts())
def test_a_call_keeps_the_engines_own_ids_logprobs_and_versions(script):
    for call, record in zip(sorted(resolve(script.records), key=lambda c: c.index), script.records, strict=True):
        assert call.completion.tolist() == ints(record.completion_ids).tolist()
        assert call.logprobs.tolist() == floats(record.logprobs).tolist()
        expected = [span.version for span in record.versions for _ in range(span.start, span.end)]
        assert call.versions.tolist() == expected


def test_interleaved_agents_form_two_chains():
    script = Script()
    script.call([1, 10], [11])  # A1
    script.call([1, 20], [21])  # B1
    script.call([1, 10, 11, 12], [13])  # A2
    script.call([1, 20, 21, 22], [23])  # B2
    tree = build(resolve(script.records))
    spelled = [tree.spell(p.end_node).tolist() for p in tree.calls]
    assert spelled == [[1, 10, 11], [1, 20, 21], [1, 10, 11, 12, 13], [1, 20, 21, 22, 23]]
    a1, b1, a2, b2 = tree.calls
    assert a1.end_node in tree.ancestors(a2.prompt_node)
    assert b1.end_node in tree.ancestors(b2.prompt_node)
    assert a1.end_node not in tree.ancestors(b2.end_node)


def test_retokenized_prefix_forks():
    script = Script()
    script.call([1, 2], [3, 4])
    script.call([1, 2, 34, 5], [6])  # the same text in other tokens
    tree = build(resolve(script.records))
    first, second = tree.calls
    assert first.end_node not in tree.ancestors(second.end_node)
    assert first.prompt_node in tree.ancestors(second.prompt_node)


def test_versions_that_change_within_a_completion_stay_with_their_tokens():
    record = msgspec.structs.replace(
        Script().call([1], [2, 3, 4]),
        versions=(VersionSpan(version=6, start=0, end=1), VersionSpan(version=7, start=1, end=3)),
    )
    [call] = resolve([record])
    assert call.versions.tolist() == [6, 7, 7]


def test_a_missing_parent_is_named():
    script = Script()
    first = script.call([1, 2], [3])
    second = script.call([1, 2, 3, 4], [5])
    with pytest.raises(MalformedRecords, match=rf"{second.call_id}: its parent {first.call_id} is missing"):
        resolve([second])


def test_a_call_that_is_its_own_ancestor_is_refused():
    record = Script().call([1, 2], [3])
    with pytest.raises(MalformedRecords, match="its own ancestor"):
        resolve([msgspec.structs.replace(record, parent=record.call_id)])


def test_a_call_that_takes_more_of_its_parent_than_that_has_is_refused():
    script = Script()
    script.call([1, 2], [3])
    second = script.call([1, 2, 3, 4], [5])
    greedy = msgspec.structs.replace(second, parent_tokens=4, prompt_tokens=5)
    with pytest.raises(MalformedRecords, match=rf"{second.call_id}: takes 4 tokens from a parent that has 3"):
        resolve([script.records[0], greedy])


def test_two_records_of_one_call_that_differ_are_refused():
    record = Script().call([1, 2], [3])
    with pytest.raises(MalformedRecords, match="twice with different content"):
        resolve([record, msgspec.structs.replace(record, completion_ids=int_bytes([4]))])


@given(scripts())
def test_a_nodes_subtree_is_the_run_of_nodes_up_to_its_end(script):
    tree = build(resolve(script.records))
    for node in range(len(tree.parent)):
        below = [other for other in range(len(tree.parent)) if node in tree.ancestors(other)]
        assert below == list(range(node, tree.end[node]))


@given(scripts())
def test_a_nodes_address_is_the_digest_of_all_tokens_on_its_path(script):
    tree = build(resolve(script.records))
    for node, address in enumerate(tree.addresses()):
        path = int_bytes(tree.spell(node))
        assert address == blake2b(path, digest_size=16).digest()


def test_equal_paths_have_equal_addresses_in_trees_that_are_cut_in_other_places():
    plain, forked = Script(), Script()
    plain.call([1, 2, 3], [4])
    forked.call([1, 2, 3], [4])
    forked.call([1, 9], [4])  # cuts 1 2 3 after 1
    one, other = build(resolve(plain.records)), build(resolve(forked.records))
    assert [t.tolist() for t in one.tokens] == [[], [1, 2, 3], [4]]
    assert [t.tolist() for t in other.tokens] == [[], [1], [2, 3], [4], [9], [4]]
    assert one.addresses() == (other.addresses()[0], other.addresses()[2], other.addresses()[3])


def two_turns():
    script = Script()
    script.call([1, 2], [3, 4], version=5)
    script.call([1, 2, 3, 4, 6], [7], version=5)
    return script


def test_the_digest_does_not_depend_on_how_the_prompts_were_delta_encoded():
    plain = Script()
    plain.call([1, 2], [3, 4], version=5)
    plain.call([1, 2, 3, 4, 6], [7], version=5, shared=1)
    assert build(resolve(plain.records)).digest() == build(resolve(two_turns().records)).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"completion_ids": int_bytes([8])},
        {"prompt_delta": int_bytes([8])},
        {"logprobs": float_bytes([-0.5])},
        {"versions": (VersionSpan(version=6, start=0, end=1),)},
        {"role": Role.SUBAGENT},
        {"finish_reason": FinishReason.LENGTH},
        {"index": 2, "call_id": "r-000000-0.a1.c2"},
        {"prompt_delta": int_bytes([6, 7]), "prompt_tokens": 6, "completion_ids": b"", "logprobs": b"", "versions": ()},
    ],
)
def test_the_digest_tells_trees_apart(changes):
    first, second = two_turns().records
    altered = build(resolve([first, msgspec.structs.replace(second, **changes)]))
    assert altered.digest() != build(resolve([first, second])).digest()
    assert build(resolve([first])).digest() != build(resolve([first, second])).digest()


def test_a_call_may_take_any_part_of_a_parent_at_the_end_of_a_long_chain():
    script = Script()
    whole = []
    for turn in range(150):
        whole = [*whole, 1000 + turn]
        script.call(whole, [2000 + turn, 3000 + turn], parent=script.records[-1].call_id if turn else None)
        whole = [*whole, 2000 + turn, 3000 + turn]
    last = script.records[-1].call_id
    prompts = [[*whole[:depth], 7, depth] for depth in range(0, len(whole), 7)]
    for prompt in prompts:
        assert script.call(prompt, [8], parent=last).parent_tokens == len(prompt) - 2
    tree = build(resolve(script.records))
    assert [tree.spell(p.prompt_node).tolist() for p in tree.calls[150:]] == prompts
    assert sum(len(tokens) for tokens in tree.tokens) == len(whole) + 3 * len(prompts)


def test_the_forks_of_one_call_are_resolved_from_top_to_bottom_whatever_came_first():
    """From bottom to top each fork would lengthen the way up for all that come after it."""
    script = Script()
    script.call([1], [2, 3, 4, 5, 6])
    for depth in (5, 2, 4, 3):
        script.call([*range(1, depth + 1), 9], [8], parent="r-000000-0.a1.c0")
    assert [(call.index, call.parent_tokens) for call in resolve(script.records)] == [
        (0, 0),
        (2, 2),
        (4, 3),
        (3, 4),
        (1, 5),
    ]
