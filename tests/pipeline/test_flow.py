"""The flow between stream and learner, one rule at a time."""

from __future__ import annotations

import logging

import msgspec
import pytest
from flow_scripts import (
    Stream,
    altered,
    cut_short,
    garbage,
    lease,
    make_flow,
    newer,
    orphaned,
    started,
    step,
    totals,
    unsound,
    without_blob,
)
from pipeline_scripts import Script, own, two_turns

from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.records import (
    BatchReady,
    Committed,
    Hello,
    Infra,
    NotYet,
    Role,
    Scored,
    StreamCursor,
)


def test_no_more_is_requested_than_the_credits_allow_and_a_step_frees_them():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)
    requests = started(flow)
    assert len(requests) == 12  # (2 + 1) steps of 2 groups of 2
    assert started(flow) == []
    for request in requests:
        feed(*two_turns(request))
    assert started(flow) == []  # queued is still in flight
    ready = lease(flow)
    assert started(flow) == []  # and so is leased
    step(flow, ready)
    assert len(started(flow)) == 4


def test_no_group_is_requested_that_no_update_is_left_for():
    assert len(started(make_flow(run={"updates": 1}))) == 4


def test_a_lease_asked_for_twice_is_the_same_batch():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    first = lease(flow)
    assert lease(flow) == first
    assert flow.batches.chunk("another", 0) == b""


def test_a_group_whose_rollouts_are_all_stale_is_dropped_whole_and_its_credits_return():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)
    requests = started(flow)
    for request in requests:
        feed(*two_turns(request, version=0 if request.group_id == "g-000000" else 4))
    ready = lease(flow, version=4)
    assert {r.group_id for r in flow.batches.lease.groups} == {"g-000001", "g-000002"}
    assert isinstance(ready, BatchReady)
    assert totals(flow).dropped == {"stale": 6}
    assert flow.admission.held == 10
    assert flow.spans.cursor().sequence == 7  # group 0, the first six records, is done


def test_equal_rewards_make_rows_without_entries_and_their_tokens_are_counted():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request, reward=0.5 if request.group_id == "g-000000" else None))
    ready = lease(flow)
    batch = flow.batches.lease
    assert batch.set_aside == {"r-000000-0": {"zero_spread": 3}, "r-000000-1": {"zero_spread": 3}}
    assert batch.num_entries == 6
    step(flow, ready)
    assert flow.ledger.updates[1].groups_without_spread == 1
    assert totals(flow).dropped == {"zero_spread": 6}
    assert totals(flow).tokens["trained"] == 6


def test_a_refused_batch_is_dropped_and_five_in_a_row_end_the_run():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)

    def refuse():
        for request in started(flow):
            feed(*two_turns(request))
        step(flow, lease(flow), updates=0, version=0, refused="no")

    for _ in range(4):
        refuse()
    with pytest.raises(ClawpipeError, match="refused 5 batches in a row, the last one because: no"):
        refuse()
    assert totals(flow).dropped == {"refused": 60}
    assert flow.updates == 0


def test_a_batch_without_a_step_is_dropped_and_no_update():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    step(flow, lease(flow), updates=0, version=0)
    assert flow.ledger.updates == {}
    assert totals(flow).dropped == {"no_step": 12}


def test_infrastructure_that_always_fails_ends_the_run_with_the_reason():
    flow = make_flow(run={"updates": 100})
    feed = Stream(flow)

    def fail():
        for request in started(flow):
            script = Script(request.rollout_id, task_id=request.task_id)
            feed(script.manifest(Infra(boundary="sandbox", message="no space")))

    fail()
    with pytest.raises(ClawpipeError, match=r"16 rollouts in a row .* infra: sandbox: no space"):
        fail()


def test_manifests_that_are_never_usable_end_the_run_with_the_reason():
    flow = make_flow()
    feed = Stream(flow)

    def fail():
        for request in started(flow):
            feed(Script(request.rollout_id, task_id=request.task_id).manifest(Scored(reward=float("nan"))))

    fail()
    with pytest.raises(ClawpipeError, match=r"16 rollouts in a row .* of its manifest: its reward is nan"):
        fail()
    assert feed.flaws[0] == ("unsound", "r-000000-0.a1.manifest", 1)


def test_a_version_that_the_learner_has_not_made_costs_its_rollout_and_no_other():
    flow = make_flow()
    stream = Stream(flow)
    first, *others = started(flow)
    stream(*two_turns(first, version=7), *(record for request in others for record in two_turns(request)))
    ready = lease(flow)
    flow.check()
    assert first.rollout_id not in flow.ledger.batches[ready.batch_id].rollouts
    assert len(flow.ledger.batches[ready.batch_id].rollouts) == 3
    assert flow.ledger.rows[first.rollout_id].reason == "malformed"


def test_a_metric_that_is_no_number_can_be_read_again(tmp_path):
    flow = make_flow()
    stream = Stream(flow)
    for request in started(flow):
        stream(*two_turns(request))
    step(flow, lease(flow), metrics={"loss": 0.5, "kl": float("nan"), "grad_norm": float("inf")})
    file = LedgerFile(tmp_path / "ledger.sqlite")
    file.write(flow.ledger.changes())
    assert [update.metrics for update in file.read().updates] == [{"loss": 0.5}]
    file.close()


def test_a_learner_that_starts_from_a_checkpoint_before_the_last_one_is_told_to_resume():
    flow = make_flow()
    stream = Stream(flow)
    for request in started(flow):
        stream(*two_turns(request))
    older = flow.cursor()
    for _ in range(2):
        step(flow, lease(flow), version=0)
    flow.committed(Committed(version=2, updates=2, cursor=flow.cursor(), path="x"))
    with pytest.raises(ClawpipeError, match=r"a checkpoint of 1 updates, and one of 2 was written: .* --resume"):
        flow.hello(Hello(version=3, updates=1, cursor=older))
    flow.hello(Hello(version=3, updates=2, cursor=flow.cursor()))
    flow.check()


def test_a_checkpoint_of_more_updates_than_the_run_has_made_is_refused_and_nothing_is_given_up():
    flow = make_flow()
    message = Committed(version=1, updates=1, cursor=StreamCursor(sequence=1000), path="x")
    with pytest.raises(ClawpipeError, match=r"has seen 1 updates, this run 0; resume the run folder"):
        flow.committed(message)
    assert flow.ledger.changes().standing is None


def test_a_second_manifest_of_a_rollout_trains_nothing_again():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    for request in requests:
        feed(*two_turns(request))
    feed(*two_turns(requests[0], attempt=2))  # its acknowledgement was lost: it was run again
    assert totals(flow).dropped == {"late": 3}
    assert totals(flow).tokens["queued"] == 36
    flow.check()


def test_a_record_that_nobody_asked_for_is_counted_and_disturbs_nothing():
    flow = make_flow()
    feed = Stream(flow)
    started(flow)
    feed(Script("r-000099-0").call([1], [2, 3]), Script("elsewhere").call([1], [2]))
    assert totals(flow).dropped == {"unadmitted": 3}
    assert flow.spans.cursor() == StreamCursor(sequence=3)
    flow.check()


def test_a_rollout_whose_request_vanished_is_lost_by_name_and_requested_again():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    feed(two_turns(requests[0])[0])
    flow.lost(requests[0].rollout_id)
    assert totals(flow).reasons == {"lost": 1}
    assert totals(flow).dropped == {"lost": 2}
    assert [r.rollout_id for r in started(flow)] == ["r-000000-0-1"]


def test_a_broken_account_names_the_first_rollout():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    flow.ledger.rows["r-000001-1"].kept += 1
    flow.ledger.rows["r-000002-0"].kept += 1
    with pytest.raises(AssertionError, match="rollout r-000001-1"):
        flow.check()


def test_a_rollout_that_somebody_holds_and_the_books_do_not_is_a_crash():
    flow = make_flow()
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    flow.replay.remove("g-000001")
    with pytest.raises(AssertionError, match=r"rollout r-000001-0: booked .*, held None"):
        flow.check()


def test_the_cursor_stays_below_an_open_group_and_names_what_is_done_above():
    flow = make_flow()
    feed = Stream(flow)
    requests = started(flow)
    slow, *others = [two_turns(request) for request in requests]
    feed(slow[0])
    for records in others:
        feed(*records)
    step(flow, lease(flow))
    cursor = flow.cursor()
    assert cursor.sequence == 1
    assert cursor.done == ("r-000001-0", "r-000001-1", "r-000002-0", "r-000002-1")


# Bad records ----------------------------------------------------------------------------------------------


def spoiled(flow, place, how):
    """Runs all requests; in the one at `place` of group 0 `how` changes the messages. Gives the stream."""
    feed = Stream(flow)
    for request in started(flow):
        records = two_turns(request)
        feed(*(how(*records) if request.rollout_id == f"r-000000-{place}" else records))
    return feed


def reasons(flow):
    return {row.rollout_id: row.reason for row in flow.ledger.rows.values() if row.reason}


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


# Groups ---------------------------------------------------------------------------------------------------


def test_a_group_below_min_group_is_dropped_whole_and_its_credits_return():
    flow = make_flow(schedule={"min_group": 2, "refill": False}, run={"updates": 100})
    feed = Stream(flow)
    for request in started(flow):
        *calls, manifest = two_turns(request)
        if request.rollout_id == "r-000001-1":
            manifest = msgspec.structs.replace(manifest, outcome=Infra(boundary="sandbox", message="gone"))
        feed(*calls, manifest)
    assert reasons(flow) == {"r-000001-0": "small_group", "r-000001-1": "infra"}
    assert totals(flow).dropped == {"infra": 3, "small_group": 3}
    assert flow.admission.held == 10
    assert "g-000001" not in flow.spans.open
    flow.check()


def test_a_group_without_spread_is_skipped_and_four_steps_of_nothing_else_are_worth_a_warning(caplog):
    flow = make_flow(schedule={"skip_zero_spread": True}, run={"updates": 100})
    feed = Stream(flow)

    def run_all(reward):
        for request in started(flow):
            feed(*two_turns(request, reward=reward))

    with caplog.at_level(logging.WARNING, logger="clawpipe"):
        run_all(0.5)  # 6 groups, and each that is dropped lets another one in
        assert "only groups of equal rewards" not in caplog.text
        run_all(0.5)
    assert caplog.text.count("only groups of equal rewards") == 1  # at the 8th: 4 steps of 2 groups
    assert flow.replay.num_groups == 0
    assert totals(flow).dropped == {"zero_spread": 72}
    run_all(None)
    assert flow.replay.num_groups == 6
    assert flow.admission.held == 12


def test_a_leaf_cap_that_was_decided_before_stands():
    flow = make_flow({"r-000000-1": 5})
    feed = Stream(flow)
    for request in started(flow)[:2]:
        feed(*two_turns(request))
    assert {row.rollout_id: row.leaf_cap for row in flow.ledger.rows.values() if row.leaf_cap} == {
        "r-000000-0": 16,
        "r-000000-1": 5,
    }


def test_with_ppo_a_group_of_equal_rewards_is_trained():
    flow = make_flow(algorithm={"kind": "ppo"}, schedule={"skip_zero_spread": True})
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request, reward=0.5))
    step(flow, lease(flow))
    assert totals(flow).tokens["trained"] == 12
    assert totals(flow).dropped == {}


def test_a_sub_agents_tokens_are_trained_in_a_group_of_their_own_when_asked_for():
    flow = make_flow(replay={"auxiliary": "own_group"})
    feed = Stream(flow)
    for request in started(flow):
        script = Script(request.rollout_id, task_id=request.task_id)
        t = own(request.rollout_id)
        script.call([1, t], [t + 1])
        if request.rollout_id != "r-000001-1":
            script.call([5, t], [t + 2, t + 3], role=Role.SUBAGENT)
        feed(*script.records, script.manifest())
    ready = lease(flow)
    batch = flow.batches.lease
    # Group 0 has two rollouts with a sub-agent, group 1 one, which has nobody to be compared with.
    assert batch.set_aside == {"r-000001-0": {"single": 2}}
    assert batch.num_entries == 2 * 3 + 2 * 1
    step(flow, ready)
    assert totals(flow).tokens["trained"] == 8
    assert totals(flow).dropped == {"single": 2}
    flow.check()


def test_a_windowed_queue_waits_for_the_oldest_running_group():
    flow = make_flow(replay={"sampling": "windowed", "window_groups": 2})
    feed = Stream(flow)
    requests = started(flow)
    for request in requests[2:]:
        feed(*two_turns(request))
    assert isinstance(lease(flow), NotYet)  # group 0 runs still, and of the two first groups one is here
    feed(*two_turns(requests[0]), *two_turns(requests[1]))
    lease(flow)
    assert [group.number for group in flow.batches.lease.groups] == [0, 1]


# A group that is trained more than once -------------------------------------------------------------------


def reusing(updates=100, **tables):
    flow = make_flow(replay={"max_reuse": 2}, run={"updates": updates}, **tables)
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    return flow, feed


def numbers(flow):
    return [group.number for group in flow.batches.lease.groups]


def test_a_group_is_trained_twice_fresh_ones_first_and_holds_its_credits_until_the_first_time():
    flow, _ = reusing()
    trained = []
    for _ in range(6):
        ready = lease(flow)
        trained.append(numbers(flow))
        step(flow, ready, version=0)
        flow.check()
        assert flow.admission.held == 12 - 4 * min(3, len(trained))
    assert trained == [[0, 1], [2, 3], [4, 5]] * 2
    assert totals(flow).tokens["trained"] == 36  # every token once
    assert flow.ledger.rows["r-000000-0"].updates == [1, 4]
    assert flow.cursor() == StreamCursor(sequence=37)


def test_the_cursor_says_how_often_an_open_group_was_trained():
    flow, _ = reusing()
    step(flow, lease(flow))
    assert flow.cursor() == StreamCursor(sequence=1, uses={"g-000000": 1, "g-000001": 1})


def test_a_learner_that_starts_anew_gets_a_group_back_as_often_as_its_checkpoint_has_not_seen_it():
    flow, _ = reusing()
    for _ in range(4):
        step(flow, lease(flow), version=0)
    assert flow.ledger.rows["r-000000-0"].updates == [1, 4]
    flow.hello(Hello(version=0, updates=1, cursor=StreamCursor(sequence=1)))
    flow.check()
    assert flow.ledger.rows["r-000000-0"].updates == [1]
    assert flow.ledger.rows["r-000002-0"].updates == []
    assert {group.number: group.uses for group in flow.replay.groups} == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}
    assert flow.admission.held == 8  # of the groups that were never trained
    assert totals(flow).tokens["trained"] == 12
    assert totals(flow).tokens["queued"] == 24


def test_a_trained_group_that_grows_stale_before_its_second_training_ends_as_trained():
    flow, _ = reusing()
    step(flow, lease(flow))
    assert isinstance(lease(flow, version=3), NotYet)
    assert totals(flow).dropped == {"stale": 24}
    assert totals(flow).tokens["trained"] == 12
    assert flow.ledger.rows["r-000000-0"].state == "trained"
    assert flow.admission.held == 0
    flow.check()


@pytest.mark.parametrize("max_reuse", [1, 2])
def test_groups_that_wait_to_be_trained_again_keep_no_new_rollout_waiting(max_reuse):
    flow = make_flow(replay={"max_reuse": max_reuse}, run={"updates": 100})
    feed = Stream(flow)
    for request in started(flow):
        feed(*two_turns(request))
    for _ in range(3):
        step(flow, lease(flow), version=0)
        assert len(started(flow)) == 4
    assert flow.replay.num_groups == {1: 0, 2: 6}[max_reuse]


def test_no_more_groups_are_asked_for_than_the_trainings_that_are_left_can_use():
    # 3 updates of 2 groups are 6 places. Three groups that are trained twice would fill them.
    assert len(started(make_flow(replay={"max_reuse": 2}, run={"updates": 3}))) == 3 * 2
    # One update needs two groups, however often a group may be trained.
    assert len(started(make_flow(replay={"max_reuse": 2}, run={"updates": 1}))) == 2 * 2


def test_rollouts_of_a_checkpoint_leave_the_memory_and_those_that_wait_again_stay():
    flow, _ = reusing()
    for _ in range(4):
        step(flow, lease(flow), version=0)
    flow.committed(Committed(version=4, updates=4, cursor=flow.cursor(), path=""))
    assert {row.group_id for row in flow.ledger.rows.values()} == {f"g-00000{n}" for n in (2, 3, 4, 5)}
    flow.check()


def test_a_batch_that_is_refused_at_its_second_training_leaves_the_first():
    flow, _ = reusing()
    for _ in range(3):
        step(flow, lease(flow), version=0)
    step(flow, lease(flow), updates=3, version=3, refused="damaged")
    assert totals(flow).tokens["trained"] == 36
    assert totals(flow).dropped == {}
    assert flow.ledger.rows["r-000000-0"].state == "trained"


# The end --------------------------------------------------------------------------------------------------


def test_what_is_in_flight_when_a_run_has_had_its_updates_ends_by_name():
    flow = make_flow(run={"updates": 1}, schedule={"skip_zero_spread": True})
    feed = Stream(flow)
    requests = started(flow)
    feed(two_turns(requests[0])[0])
    flow.close()
    states = {row.rollout_id: (row.state.value, row.reason) for row in flow.ledger.rows.values()}
    assert states[requests[0].rollout_id] == ("dropped", "late")
    assert {states[request.rollout_id] for request in requests[1:]} == {("withdrawn", "")}
    assert totals(flow).tokens["in_flight"] == 0
    assert totals(flow).dropped == {"late": 2}
