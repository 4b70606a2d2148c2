"""Which groups are trained, how often, and in which order: one option of the configuration at a time."""

from __future__ import annotations

import logging

import msgspec
import pytest
from flow_scripts import (
    Stream,
    lease,
    make_flow,
    reasons,
    started,
    step,
    totals,
)
from pipeline_scripts import Script, own, two_turns

from clawpipe.pipeline.records import (
    Committed,
    Hello,
    Infra,
    NotYet,
    Role,
    StreamCursor,
)

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
