"""What a record that cannot be used costs: its own rollout at most, and a dead letter that says why."""

from __future__ import annotations

import pytest
from flow_scripts import (
    Stream,
    altered,
    cut_short,
    garbage,
    make_flow,
    newer,
    orphaned,
    reasons,
    started,
    totals,
    unsound,
    without_blob,
)
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline.records import (
    Scored,
    StreamCursor,
)


def spoiled(flow, place, how):
    """Runs all requests; in the one at `place` of group 0 `how` changes the messages. Gives the stream."""
    feed = Stream(flow)
    for request in started(flow):
        records = two_turns(request)
        feed(*(how(*records) if request.rollout_id == f"r-000000-{place}" else records))
    return feed


@pytest.mark.parametrize(
    ("spoil", "flaw"),
    [
        (cut_short, "unreadable"),
        (newer, "unknown_schema"),
        (without_blob, "missing_blob"),
        (unsound, "unsound"),
        (orphaned, "missing_parent"),
    ],
)
def test_a_call_that_cannot_be_used_spoils_its_own_rollout_and_no_other(spoil, flaw):
    flow = make_flow()
    feed = spoiled(flow, 1, lambda first, second, manifest: [first, spoil(second), manifest])
    # Rollout r-000000-0 has the sequences 1 to 3, its neighbour 4 to 6.
    assert feed.flaws == [(flaw, "r-000000-1.a1.c1", 5)]
    assert feed.letters[0].detail
    assert reasons(flow) == {"r-000000-1": "malformed"}
    # The first call has 2 tokens, the second 1: that one is known for two of the flaws only.
    known = {"unsound": {"malformed": 2, "quarantined": 1}, "missing_parent": {"malformed": 3}}
    assert totals(flow).dropped == known.get(flaw, {"malformed": 2})
    assert [request.rollout_id for request in started(flow)] == ["r-000000-1-1"]
    assert flow.replay.num_groups == 5
    flow.check()


@pytest.mark.parametrize(
    ("spoil", "flaw"), [(cut_short, "unreadable"), (newer, "unknown_schema"), (unsound, "unsound")]
)
def test_a_manifest_that_cannot_be_used_loses_its_rollout_which_is_run_again(spoil, flaw):
    flow = make_flow()
    feed = spoiled(flow, 1, lambda first, second, manifest: [first, second, spoil(manifest)])
    assert feed.flaws == [(flaw, "r-000000-1.a1.manifest", 6)]
    assert reasons(flow) == {"r-000000-1": "malformed"}
    assert totals(flow).dropped == {"malformed": 3}
    assert [request.rollout_id for request in started(flow)] == ["r-000000-1-1"]
    flow.check()


def test_a_second_copy_with_another_content_spoils_an_open_rollout_and_has_a_call_row_of_its_own():
    flow = make_flow()
    feed = spoiled(flow, 1, lambda first, second, manifest: [first, altered(first), second, manifest])
    assert feed.flaws == [("conflicting", "r-000000-1.a1.c0", 5)]
    assert totals(flow).dropped == {"malformed": 3, "quarantined": 3}
    calls = {row.call_id: row.sampled for row in flow.ledger.changes().calls if row.rollout_id == "r-000000-1"}
    assert calls == {"r-000000-1.a1.c0": 2, "r-000000-1.a1.c1": 1, "r-000000-1.a1.c0@5": 3}
    flow.check()


def test_a_second_copy_with_another_content_changes_nothing_of_a_closed_rollout():
    flow = make_flow()
    feed = spoiled(flow, 1, lambda first, second, manifest: [first, second, manifest, altered(first)])
    assert feed.flaws == [("conflicting", "r-000000-1.a1.c0", 7)]
    assert totals(flow).dropped == {"quarantined": 3}
    assert totals(flow).tokens["queued"] == 36
    flow.check()


def test_garbage_under_a_rollouts_subject_is_set_aside_and_the_rollout_goes_on():
    flow = make_flow()
    feed = spoiled(flow, 1, lambda *records: [garbage("r-000000-1"), *records])
    assert feed.flaws == [("unreadable", "", 4)]
    assert totals(flow).dropped == {}
    assert totals(flow).tokens["queued"] == 36


def test_a_record_of_a_rollout_that_nobody_asked_for_is_a_dead_letter_and_holds_no_cursor():
    flow = make_flow()
    feed = Stream(flow)
    started(flow)
    feed(
        Script("r-000099-0").call([1], [2, 3]),
        Script("r-000000-7").call([1], [2]),
        cut_short(Script("x").call([1], [2])),
    )
    assert feed.flaws == [
        ("unadmitted", "r-000099-0.a1.c0", 1),
        ("unadmitted", "r-000000-7.a1.c0", 2),
        ("unreadable", "x.a1.c0", 3),
    ]
    assert flow.cursor() == StreamCursor(sequence=4)
    assert flow.scheduler.next_number == 6


@pytest.mark.parametrize(
    "rollout_id", ["r-0000000-0", "r-000000-00", "r-000000-0-0", "r-00000\u0660-0", "r-000000-0-1"]
)
def test_a_rollout_that_only_looks_like_one_that_was_asked_for_takes_no_place(rollout_id):
    flow = make_flow()
    stream = Stream(flow)
    requests = started(flow)
    script = Script(rollout_id)
    script.call([1], [2])
    stream(*script.records, script.manifest(Scored(reward=1.0)), *two_turns(requests[0]))
    flow.check()
    assert [letter.flaw for letter in stream.letters] == ["unadmitted", "unadmitted"]
    assert [rollout.rollout_id for rollout in flow.scheduler.waiting] == ["r-000000-0"]


def test_a_dead_letter_holds_the_record_as_it_came():
    flow = make_flow()
    feed = Stream(flow)
    [request, *_] = started(flow)
    feed(cut_short(two_turns(request)[0]))
    [letter] = feed.letters
    entry = cut_short(two_turns(request)[0])(1)
    assert (letter.body, letter.subject, letter.rollout_id) == (entry.body, entry.subject, request.rollout_id)


def test_a_rollout_that_waits_for_a_missing_call_names_its_orphans_when_its_time_is_over():
    flow = make_flow(replay={"close_timeout_s": 10.0})
    feed = Stream(flow)
    [request, *_] = started(flow)
    _, second, manifest = two_turns(request)
    feed(second, manifest)
    flow.tick(11.0)
    assert reasons(flow) == {request.rollout_id: "incomplete"}
    letters = [(letter.flaw.value, letter.message_id, letter.sequence) for letter in flow.dead_letters]
    assert letters == [("missing_parent", second.call_id, 1)]
