from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, scripts

from clawpipe.pipeline.records import Role
from clawpipe.pipeline.segments import DropReason, branches_of, select
from clawpipe.pipeline.tree import build, resolve

ALL = 10**9


def selected(script, *, leaf_cap=ALL, undelivered=(), cut=(), auxiliary=False):
    ids = [r.call_id for r in script.records]
    delivered = set(ids) - {ids[n] for n in undelivered} - {ids[n] for n in cut}
    return select(
        build(resolve(script.records)),
        leaf_cap=leaf_cap,
        delivered=delivered,
        cut={ids[n] for n in cut},
        auxiliary=auxiliary,
    )


def kept(selection, role=Role.MAIN):
    """[(path, {position: number of the sample})]"""
    return [
        (
            branch.tokens.tolist(),
            {
                e: round(-1024 * logprob) - 1
                for e, logprob in zip(branch.entries.tolist(), branch.logprobs.tolist(), strict=True)
            },
        )
        for branch in branches_of(selection.parts, role)
    ]


def dropped(selection):
    return [dict(fate.dropped) for fate in selection.fates]


def test_a_linear_conversation_is_one_branch_with_every_completion():
    script = Script()
    script.call([1, 2], [3, 4])
    script.call([1, 2, 3, 4, 5], [6])
    selection = selected(script)
    assert kept(selection) == [([1, 2, 3, 4, 5, 6], {2: 0, 3: 1, 5: 2})]
    assert dropped(selection) == [{}, {}]


def test_a_retry_that_the_conversation_left_behind_is_a_dead_leaf():
    script = Script()
    script.call([1, 2], [7, 7])  # retried
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5])
    selection = selected(script)
    assert kept(selection) == [([1, 2, 3, 4, 5], {2: 2, 4: 3})]
    assert dropped(selection) == [{DropReason.DEAD_LEAF: 2}, {}, {}]


def test_compaction_starts_a_segment_and_both_are_kept():
    script = Script()
    script.call([1, 10], [11, 12])
    script.call([1, 10, 11, 12, 13], [14])
    script.call([1, 10, 11, 12, 13, 14, 90], [91, 92], role=Role.COMPACTION)
    script.call([1, 91, 92, 30], [31])
    selection = selected(script)
    assert kept(selection) == [
        ([1, 10, 11, 12, 13, 14], {2: 0, 3: 1, 5: 2}),
        ([1, 91, 92, 30, 31], {4: 5}),
    ]
    assert dropped(selection) == [{}, {}, {DropReason.AUXILIARY_COMPACTION: 2}, {}]


def test_rounds_kept_verbatim_by_a_compaction_are_context_in_the_new_segment():
    script = Script()
    script.call([1, 10], [11, 12])
    script.call([1, 10, 11, 12, 90], [91], role=Role.COMPACTION)
    script.call([1, 91, 11, 12, 30], [31])  # 11 12 again, after the summary
    assert kept(selected(script)) == [([1, 10, 11, 12], {2: 0, 3: 1}), ([1, 91, 11, 12, 30, 31], {5: 3})]


def test_a_compaction_that_keeps_the_head_cuts_where_it_was_recorded():
    script = Script()
    script.call([1, 10], [11])
    script.call([1, 10, 11, 12], [13, 14])
    script.call([1, 10, 11, 12, 13, 14, 90], [91], role=Role.COMPACTION)
    script.call([1, 10, 11, 91], [32])
    assert kept(selected(script)) == [
        ([1, 10, 11, 12, 13, 14], {2: 0, 4: 1, 5: 2}),
        ([1, 10, 11, 91, 32], {4: 4}),
    ]


def test_a_compaction_that_came_to_nothing_does_not_save_a_dead_leaf():
    script = Script()
    script.call([1, 10], [11, 11])  # retried
    script.call([1, 10], [12])
    script.call([1, 10, 12, 90], [91], role=Role.COMPACTION)
    script.call([1, 10, 12, 13], [14])  # the old history goes on
    selection = selected(script)
    assert kept(selection) == [([1, 10, 12, 13, 14], {2: 2, 4: 4})]
    assert dropped(selection)[0] == {DropReason.DEAD_LEAF: 2}


def test_a_compaction_right_after_the_first_call_keeps_that_calls_answer():
    script = Script()
    script.call([1, 10], [11])
    script.call([5, 90], [91], role=Role.COMPACTION)
    script.call([1, 10, 91], [12])  # the old opening and the summary
    assert kept(selected(script)) == [([1, 10, 11], {2: 0}), ([1, 10, 91, 12], {3: 2})]


def test_a_prompt_that_is_retried_after_a_compaction_leaves_a_dead_leaf():
    script = Script()
    script.call([1, 10], [11])
    script.call([5, 90], [91], role=Role.COMPACTION)
    script.call([1, 10], [12])
    script.call([1, 10, 12, 13], [14])
    selection = selected(script)
    assert kept(selection) == [([1, 10, 12, 13, 14], {2: 2, 4: 3})]
    assert dropped(selection)[0] == {DropReason.DEAD_LEAF: 1}


def test_an_altered_retry_before_a_compaction_that_came_to_nothing_leaves_a_dead_leaf():
    script = Script()
    script.call([1, 10], [11, 11])
    script.call([1, 10, 99], [12])  # the same with a word more
    script.call([5, 90], [91], role=Role.COMPACTION)
    script.call([1, 10, 99, 12, 13], [14])
    selection = selected(script)
    assert kept(selection) == [([1, 10, 99, 12, 13, 14], {3: 2, 5: 4})]
    assert dropped(selection)[0] == {DropReason.DEAD_LEAF: 2}


def test_an_interleaved_sub_agent_neither_cuts_nor_trains():
    script = Script()
    script.call([1, 10], [11])
    script.call([2, 20], [21], role=Role.SUBAGENT)
    script.call([1, 10, 11, 12], [13])
    script.call([2, 20, 21, 22], [23], role=Role.SUBAGENT)
    selection = selected(script)
    assert kept(selection) == [([1, 10, 11, 12, 13], {2: 0, 4: 2})]
    assert dropped(selection) == [
        {},
        {DropReason.AUXILIARY_SUBAGENT: 1},
        {},
        {DropReason.AUXILIARY_SUBAGENT: 1},
    ]


def test_two_interleaved_main_conversations_are_both_kept():
    script = Script()
    script.call([1, 10], [11])
    script.call([1, 20], [21])
    script.call([1, 10, 11, 12], [13])
    script.call([1, 20, 21, 22], [23])
    assert kept(selected(script)) == [
        ([1, 10, 11, 12, 13], {2: 0, 4: 2}),
        ([1, 20, 21, 22, 23], {2: 1, 4: 3}),
    ]


def test_the_adopted_part_of_a_completion_is_trained_and_the_rest_dropped():
    script = Script()
    script.call([1, 2], [3, 4, 5])
    script.call([1, 2, 3, 4, 9], [6])  # the harness kept 3 4 of it
    selection = selected(script)
    assert kept(selection) == [([1, 2, 3, 4, 9, 6], {2: 0, 3: 1, 5: 3})]
    assert dropped(selection) == [{DropReason.NOT_ADOPTED: 1}, {}]


def test_a_token_that_two_calls_sampled_at_one_place_is_trained_once_with_the_adopted_ones_logprob():
    script = Script()
    script.call([1, 2], [3, 7])  # retried, by chance with the same first token
    script.call([1, 2], [3, 4])
    script.call([1, 2, 3, 4, 5], [6])
    selection = selected(script)
    assert kept(selection) == [([1, 2, 3, 4, 5, 6], {2: 2, 3: 3, 5: 4})]
    assert dropped(selection) == [{DropReason.DUPLICATE: 1, DropReason.DEAD_LEAF: 1}, {}, {}]


def test_of_two_equal_completions_the_delivered_one_counts():
    script = Script()
    script.call([1, 2], [3])
    script.call([1, 2], [3])
    selection = selected(script, undelivered=[0])
    assert kept(selection) == [([1, 2, 3], {2: 1})]
    assert dropped(selection) == [{DropReason.DUPLICATE: 1}, {}]


def test_a_call_that_settling_cut_leaves_its_prompts_leaf_alive():
    script = Script()
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5, 6])
    selection = selected(script, cut=[1])
    assert kept(selection) == [([1, 2, 3], {2: 0})]
    assert dropped(selection) == [{}, {DropReason.CUT: 2}]


def test_a_last_call_that_never_reached_the_harness_is_dropped():
    script = Script()
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5, 6])
    selection = selected(script, undelivered=[1])
    assert kept(selection) == [([1, 2, 3], {2: 0})]
    assert dropped(selection) == [{}, {DropReason.UNDELIVERED: 2}]


def test_a_call_that_a_later_prompt_extends_was_delivered_whatever_its_mark():
    script = Script()
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5])
    assert kept(selected(script, undelivered=[0])) == [([1, 2, 3, 4, 5], {2: 0, 4: 1})]


def test_more_leaves_than_the_cap_drop_the_rollout_whole():
    script = Script()
    for leaf in range(3):
        script.call([1, 10 + leaf], [20])
    script.call([5], [6, 7], role=Role.TITLE)
    assert len(selected(script, leaf_cap=3).branches) == 3
    selection = selected(script, leaf_cap=2)
    assert selection.branches == ()
    over = {DropReason.OVER_BRANCHED: 1}
    assert dropped(selection) == [over, over, over, {DropReason.AUXILIARY_TITLE: 2}]


def test_the_longest_leaf_of_a_segment_is_kept():
    script = Script()
    script.call([1, 2], [3])
    script.call([1, 2, 3, 4], [5, 6, 7])
    script.call([1, 2, 3, 8], [9])  # rewound, and shorter
    selection = selected(script)
    assert kept(selection) == [([1, 2, 3, 4, 5, 6, 7], {2: 0, 4: 1, 5: 2, 6: 3})]
    assert dropped(selection)[2] == {DropReason.DEAD_LEAF: 1}


def with_sub_agents():
    script = Script()
    script.call([1, 10], [11])
    script.call([2, 20], [21], role=Role.SUBAGENT)
    script.call([2, 30], [31], role=Role.SUBAGENT)
    script.call([1, 10, 11, 12], [13])
    script.call([2, 20, 21, 22], [23], role=Role.SUBAGENT)
    return script


def test_in_groups_of_their_own_each_sub_agent_keeps_its_longest_leaf():
    selection = selected(with_sub_agents(), auxiliary=True)
    assert [part.role for part in selection.parts] == [Role.MAIN, Role.SUBAGENT]
    assert kept(selection) == [([1, 10, 11, 12, 13], {2: 0, 4: 3})]
    assert kept(selection, Role.SUBAGENT) == [
        ([2, 30, 31], {2: 2}),
        ([2, 20, 21, 22, 23], {2: 1, 4: 4}),
    ]
    assert dropped(selection) == [{}, {}, {}, {}, {}]
    assert [fate.kept for fate in selection.fates] == [1, 1, 1, 1, 1]
    assert selection.num_leaves == 1


def test_the_leaves_of_sub_agents_do_not_count_towards_the_cap():
    assert selected(with_sub_agents(), auxiliary=True, leaf_cap=1).num_kept == 5


def test_a_sub_agents_retry_is_a_dead_leaf_in_its_group():
    script = Script()
    script.call([1, 10], [11])
    script.call([2, 20], [21, 21], role=Role.SUBAGENT)  # retried
    script.call([2, 20], [22], role=Role.SUBAGENT)
    script.call([2, 20, 22, 23], [24], role=Role.SUBAGENT)
    selection = selected(script, auxiliary=True)
    assert kept(selection, Role.SUBAGENT) == [([2, 20, 22, 23, 24], {2: 3, 4: 4})]
    assert dropped(selection) == [{}, {DropReason.DEAD_LEAF: 2}, {}, {}]


def test_a_compaction_of_the_main_conversation_does_not_cut_a_sub_agent():
    script = Script()
    script.call([2, 20], [21, 21, 21], role=Role.SUBAGENT)
    script.call([1, 10], [11])
    script.call([1, 10, 11, 90], [91], role=Role.COMPACTION)
    script.call([2, 20], [22], role=Role.SUBAGENT)  # after it, and shorter
    script.call([1, 91], [12])
    selection = selected(script, auxiliary=True)
    assert kept(selection, Role.SUBAGENT) == [([2, 20, 21, 21, 21], {2: 0, 3: 1, 4: 2})]
    assert dropped(selection)[3] == {DropReason.DEAD_LEAF: 1}


def test_in_groups_of_their_own_every_compaction_is_a_leaf():
    script = Script()
    script.call([1, 10], [11])
    script.call([1, 10, 11, 90], [91, 92], role=Role.COMPACTION)
    script.call([1, 10, 11, 90], [93], role=Role.COMPACTION)  # again: neither outlives the other
    script.call([1, 93], [12])
    script.call([1, 93, 12, 90], [94], role=Role.COMPACTION)
    selection = selected(script, auxiliary=True)
    assert kept(selection, Role.COMPACTION) == [
        ([1, 10, 11, 90, 91, 92], {4: 1, 5: 2}),
        ([1, 10, 11, 90, 93], {4: 3}),
        ([1, 93, 12, 90, 94], {4: 5}),
    ]
    assert kept(selection) == [([1, 10, 11], {2: 0}), ([1, 93, 12], {2: 4})]
    assert dropped(selection) == [{}, {}, {}, {}, {}]


def test_a_compaction_that_a_longer_one_contains_is_kept_and_trained_once():
    script = Script()
    script.call([1, 90], [91], role=Role.COMPACTION)
    script.call([1, 90, 91, 90], [92], role=Role.COMPACTION)
    selection = selected(script, auxiliary=True)
    assert kept(selection, Role.COMPACTION) == [([1, 90, 91], {2: 0}), ([1, 90, 91, 90, 92], {4: 1})]


def test_cut_and_undelivered_auxiliary_calls_are_not_trained():
    script = Script()
    script.call([1, 10], [11])
    script.call([2, 20], [21], role=Role.SUBAGENT)
    script.call([2, 20, 21, 22], [23, 24], role=Role.SUBAGENT)
    script.call([1, 10, 11, 90], [91], role=Role.COMPACTION)
    selection = selected(script, auxiliary=True, cut=[2], undelivered=[3])
    assert [part.role for part in selection.parts] == [Role.MAIN, Role.SUBAGENT]
    assert kept(selection, Role.SUBAGENT) == [([2, 20, 21], {2: 1})]
    assert dropped(selection) == [{}, {}, {DropReason.CUT: 2}, {DropReason.UNDELIVERED: 1}]


def test_a_token_that_main_and_a_sub_agent_sampled_at_one_place_is_trained_with_main():
    script = Script()
    script.call([1, 10], [11, 12])
    script.call([1, 10], [11, 13], role=Role.SUBAGENT)
    selection = selected(script, auxiliary=True)
    assert kept(selection) == [([1, 10, 11, 12], {2: 0, 3: 1})]
    assert kept(selection, Role.SUBAGENT) == [([1, 10, 11, 13], {3: 3})]
    assert dropped(selection) == [{}, {DropReason.DUPLICATE: 1}]


def test_a_token_that_main_left_behind_is_trained_with_the_sub_agent_that_sampled_it_too():
    script = Script()
    script.call([1, 10], [11])  # retried
    script.call([1, 10], [12, 12])
    script.call([1, 10], [11], role=Role.SUBAGENT)
    selection = selected(script, auxiliary=True)
    assert kept(selection) == [([1, 10, 12, 12], {2: 1, 3: 2})]
    assert kept(selection, Role.SUBAGENT) == [([1, 10, 11], {2: 3})]
    assert dropped(selection) == [{DropReason.DUPLICATE: 1}, {}, {}]


def test_what_a_sub_agent_said_is_context_where_main_was_given_it():
    script = Script()
    script.call([1, 10], [11], role=Role.SUBAGENT)
    script.call([1, 10, 11, 12], [13])
    selection = selected(script, auxiliary=True)
    assert kept(selection) == [([1, 10, 11, 12, 13], {4: 1})]
    assert kept(selection, Role.SUBAGENT) == [([1, 10, 11], {2: 0})]


def test_a_rollout_over_the_cap_drops_its_auxiliary_calls_with_it():
    script = Script()
    for leaf in range(3):
        script.call([1, 10 + leaf], [20])
    script.call([2, 20], [21, 22], role=Role.SUBAGENT)
    script.call([2, 30], [31], role=Role.SUBAGENT)
    script.call([5], [6], role=Role.TITLE)
    selection = selected(script, leaf_cap=2, auxiliary=True, cut=[4])
    assert selection.parts == ()
    assert dropped(selection)[3:] == [
        {DropReason.OVER_BRANCHED: 2},
        {DropReason.CUT: 1},
        {DropReason.AUXILIARY_TITLE: 1},
    ]


def test_titles_nudges_memory_and_the_unknown_stay_out_always():
    script = Script()
    script.call([1, 10], [11])
    for role in (Role.TITLE, Role.NUDGE, Role.MEMORY, Role.UNKNOWN):
        script.call([3, 30], [31], role=role)
    selection = selected(script, auxiliary=True)
    assert [part.role for part in selection.parts] == [Role.MAIN]
    assert dropped(selection)[1:] == [
        {DropReason.AUXILIARY_TITLE: 1},
        {DropReason.AUXILIARY_NUDGE: 1},
        {DropReason.AUXILIARY_MEMORY: 1},
        {DropReason.AUXILIARY_UNKNOWN: 1},
    ]


ROLES = (Role.MAIN, Role.MAIN, Role.MAIN, Role.SUBAGENT, Role.COMPACTION)


@given(scripts(roles=ROLES), st.data())
def test_every_sampled_token_is_trained_once_or_dropped_for_a_reason(script, data):
    calls = st.sets(st.integers(0, len(script.records) - 1))
    undelivered, cut = data.draw(calls), data.draw(calls)
    selection = selected(script, leaf_cap=data.draw(st.integers(1, 9)), undelivered=undelivered, cut=cut)
    assert [fate.call_id for fate in selection.fates] == list(script.texts)
    for fate in selection.fates:
        assert fate.sampled == len(script.texts[fate.call_id][1])
        assert fate.sampled == fate.kept + sum(fate.dropped.values())
        assert all(n > 0 for n in fate.dropped.values())
    numbers = Counter(n for _, entries in kept(selection) for n in entries.values())
    assert max(numbers.values(), default=1) == 1
    owner = [call_id for call_id, (_, completion) in script.texts.items() for _ in completion]
    counts = Counter(owner[n] for n in numbers)
    assert {f.call_id: f.kept for f in selection.fates if f.kept} == dict(counts)


@given(scripts(roles=ROLES), st.data())
def test_an_entry_is_the_engines_sample_in_exactly_the_context_that_the_path_gives(script, data):
    undelivered = data.draw(st.sets(st.integers(0, len(script.records) - 1)))
    samples = {}
    for record in script.records:
        prompt, completion = script.texts[record.call_id]
        for k in range(len(completion)):
            version = record.versions[0].version
            samples[len(samples)] = (prompt + completion[:k], completion[k], version, record.role)
    selection = selected(script, undelivered=undelivered)
    for branch, (tokens, entries) in zip(selection.branches, kept(selection), strict=True):
        for (position, number), version in zip(entries.items(), branch.versions.tolist(), strict=True):
            assert samples[number] == (tokens[:position], tokens[position], version, Role.MAIN)


@given(scripts(), st.randoms(use_true_random=False))
def test_the_selection_does_not_depend_on_the_order_of_the_records(script, random):
    expected = selected(script)
    shuffled = Script(records=random.sample(script.records, k=len(script.records)), texts=script.texts)
    found = selected(shuffled)
    assert kept(found) == kept(expected)
    assert found.fates == expected.fates


def select_s(num_histories):
    """Processor seconds for calls that have nothing in common, as of a harness that writes its history anew."""
    script = Script()
    for n in range(num_histories):
        script.call([n], [7], parent=None)
    tree, ids = build(resolve(script.records)), {record.call_id for record in script.records}
    best = []
    for _ in range(3):
        began_s = time.process_time()
        assert select(tree, leaf_cap=ALL, delivered=ids).num_leaves == num_histories
        best.append(time.process_time() - began_s)
    return min(best)


def test_a_rollout_that_shares_nothing_costs_in_proportion_to_its_calls():
    assert select_s(8000) < 10 * select_s(2000)  # 4 times as many; every history against every other would be 16
