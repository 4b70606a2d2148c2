from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, scripts

from clawpipe.pipeline.records import VersionSpan, floats, int_bytes, ints
from clawpipe.pipeline.tree import MalformedRecords, build, resolve


def signature(tree):
    return (
        tree.parent.tolist(),
        tree.depth.tolist(),
        [tokens.tolist() for tokens in tree.tokens],
        [(p.call.call_id, p.prompt_node, p.end_node) for p in tree.calls],
    )


@given(scripts(), st.randoms(use_true_random=False))
def test_any_order_and_duplication_of_the_records_gives_the_same_tree(script, random):
    arrived = script.records + random.choices(script.records, k=random.randrange(4))
    random.shuffle(arrived)
    assert signature(build(resolve(arrived))) == signature(build(resolve(script.records)))


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 3}, "prompt of 3 tokens, but 0 \\+ 2"),
        ({"logprobs": b""}, "1 sampled tokens, 0 logprobs"),
        ({"completion_ids": b"\0\0\0"}, "no multiple of 4"),
        ({"parent_tokens": 1, "prompt_tokens": 3}, "from a parent that has fewer"),
        ({"versions": ()}, "version spans do not cover its 1"),
        ({"versions": (VersionSpan(version=0, start=0, end=2),)}, "version spans"),
        ({"completion_ids": int_bytes(np.array([-1]))}, "negative token ids"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes, message):
    record = Script().call([1, 2], [3])
    with pytest.raises(MalformedRecords, match=message):
        resolve([msgspec.structs.replace(record, **changes)])


def test_two_records_of_one_call_that_differ_are_refused():
    record = Script().call([1, 2], [3])
    with pytest.raises(MalformedRecords, match="twice with different content"):
        resolve([record, msgspec.structs.replace(record, completion_ids=int_bytes([4]))])
