"""The flow between stream and learner, one rule at a time."""

from __future__ import annotations

import pytest
from flow_scripts import (
    Stream,
    lease,
    make_flow,
    started,
    step,
    totals,
)
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.records import (
    BatchReady,
    Committed,
    Hello,
    Infra,
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
