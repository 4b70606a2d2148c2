from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, simple

from clawpipe.pipeline.admission import Admission
from clawpipe.pipeline.credit import grpo
from clawpipe.pipeline.records import Infra, Role, RolloutRequest, Scored
from clawpipe.pipeline.scheduler import MAX_LOSSES, RolloutName, Scheduler, parse
from clawpipe.pipeline.segments import DropReason

TASKS = [f"t/{n}" for n in range(7)]


def scheduler(*, seed=0, groups_per_step=4, group_size=2, refill=True, harnesses=(("a", 1.0),)):
    return Scheduler(
        tasks=TASKS,
        harnesses=harnesses,
        groups_per_step=groups_per_step,
        group_size=group_size,
        seed=seed,
        refill=refill,
    )


def lost(request):
    return Script(request.rollout_id).closed(Infra(boundary="sandbox", message="gone"))


def test_a_pass_takes_every_task_once_and_the_next_in_another_order():
    planned = scheduler()
    passes = [[planned.assignment(7 * lap + n)[0] for n in range(7)] for lap in range(3)]
    assert all(sorted(tasks) == TASKS for tasks in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_same_seed_gives_the_same_assignments_in_any_order_of_asking_and_another_seed_others():
    forwards = [scheduler().assignment(n) for n in range(50)]
    planned = scheduler()
    assert [planned.assignment(n) for n in reversed(range(50))] == forwards[::-1]
    assert [scheduler(seed=1).assignment(n) for n in range(50)] != forwards
    assert [scheduler(seed=-1).assignment(n) for n in range(50)] != forwards


def test_every_step_has_each_harness_by_its_weight_in_changing_order():
    planned = scheduler(harnesses=(("a", 3.0), ("b", 1.0)))
    steps = [[planned.assignment(4 * step + n)[1] for n in range(4)] for step in range(40)]
    assert all(sorted(step) == ["a", "a", "a", "b"] for step in steps)
    assert len({tuple(step) for step in steps}) == 4
    assert planned.shares == {"a": 3, "b": 1}


def test_weights_that_do_not_divide_a_step_are_met_on_average():
    planned = scheduler(groups_per_step=2, harnesses=(("a", 2.0), ("b", 2.0), ("c", 1.0)))
    steps = [Counter(planned.assignment(2 * step + n)[1] for n in range(2)) for step in range(2000)]
    assert all(max(step.values()) == 1 for step in steps)
    assert sum(step["c"] for step in steps) / 4000 == pytest.approx(0.2, abs=0.02)
    assert planned.shares == {"a": 0, "b": 0, "c": 0}


def test_a_group_is_requested_whole_with_one_task_harness_and_version():
    planned = scheduler(group_size=3)
    planned.open(version=5)
    requests = planned.requests(now_s=9.0)
    assert [r.rollout_id for r in requests] == ["r-000000-0", "r-000000-1", "r-000000-2"]
    assert {(r.group_id, r.version, r.admitted_s) for r in requests} == {("g-000000", 5, 9.0)}
    assert {(r.task_id, r.harness) for r in requests} == {planned.assignment(0)}
    assert planned.requests(10.0) == []


def test_ids_are_read_back_as_they_were_written():
    assert parse("r-000012-3") == RolloutName(12, 3, 0)
    assert parse("r-1234567-3-2") == RolloutName(1234567, 3, 2)
    assert str(RolloutName(12, 3, 2)) == "r-000012-3-2"
    assert parse("r-000012-3.a1") is None
    assert parse("eval-3") is None


def test_a_group_is_complete_when_every_place_is_over():
    planned = scheduler()
    planned.open(0)
    planned.requests(0.0)
    assert not planned.settle(simple("r-000000-1", 1.0)).complete
    settlement = planned.settle(simple("r-000000-0", 0.0))
    assert settlement.complete
    assert [r.rollout_id for r in settlement.group.rollouts] == ["r-000000-0", "r-000000-1"]
    assert planned.open_groups == {}


def test_a_rollout_lost_to_infrastructure_is_requested_again_under_a_new_id():
    planned = scheduler()
    planned.open(0)
    first, _ = planned.requests(0.0)
    settlement = planned.settle(lost(first))
    assert settlement.reason is DropReason.INFRA
    assert not settlement.place_closed
    assert [r.rollout_id for r in planned.requests(0.0)] == ["r-000000-0-1"]


def test_a_place_that_infrastructure_loses_too_often_is_closed():
    planned = scheduler()
    planned.open(0)
    [request, _] = planned.requests(0.0)
    for _ in range(MAX_LOSSES - 1):
        assert not planned.settle(lost(request)).place_closed
        [request] = planned.requests(0.0)
    assert planned.settle(lost(request)).place_closed
    assert planned.requests(0.0) == []


def test_without_refill_a_lost_place_is_closed_at_once():
    planned = scheduler(refill=False)
    planned.open(0)
    first, second = planned.requests(0.0)
    assert planned.settle(lost(first)).place_closed
    settlement = planned.settle(lost(second))
    assert settlement.complete
    assert settlement.group is None


def test_a_rollout_that_was_graded_and_has_nothing_to_train_is_not_run_again():
    planned = scheduler()
    planned.open(0)
    planned.requests(0.0)
    script = Script("r-000000-0")
    script.call([1], [2], role=Role.TITLE)
    assert planned.settle(script.closed()).place_closed
    group = planned.settle(simple("r-000000-1", 1.0)).group
    assert [r.rollout_id for r in group.rollouts] == ["r-000000-1"]


def test_the_second_usable_rollout_of_a_place_is_late():
    planned = scheduler()
    planned.open(0)
    planned.requests(0.0)
    planned.lose("r-000000-0")
    planned.requests(0.0)
    assert planned.settle(simple("r-000000-0", 1.0)).reason is None  # it was heard of after all
    assert planned.settle(simple("r-000000-0-1", 1.0)).reason is DropReason.LATE
    assert planned.settle(simple("r-000000-1", 1.0)).complete
    assert planned.settle(simple("r-000000-1", 1.0)).reason is DropReason.LATE


def test_a_restarted_scheduler_takes_groups_up_from_records_and_requests():
    planned = scheduler()
    planned.settle(simple("r-000004-0", 1.0))
    planned.adopt(RolloutRequest(rollout_id="r-000005-1-2", group_id="g-000005", task_id="t/3", harness="a", version=6))
    planned.know("r-000002-0", over=True)
    assert planned.next_number == 6
    assert planned.in_flight == ("r-000005-1-2",)
    assert [r.rollout_id for r in planned.requests(0.0)] == ["r-000004-1", "r-000005-0"]
    assert planned.settle(simple("r-000002-1", 1.0)).reason is DropReason.LATE
    planned.open(0)
    assert planned.next_number == 7


def test_what_infrastructure_loses_is_in_no_mean_and_no_deviation_of_its_group():
    planned = scheduler(group_size=4, refill=False)
    planned.open(0)
    requests = planned.requests(0.0)
    for request, reward in zip(requests[:3], (1.0, 1.0, 0.0), strict=True):
        assert not planned.settle(simple(request.rollout_id, reward)).complete
    group = planned.settle(lost(requests[3])).group
    found = grpo([rollout.reward for rollout in group.rollouts], eps=0.0)
    assert found.advantages == pytest.approx((0.7071, 0.7071, -1.4142), abs=5e-5)


def test_a_lost_rollout_that_is_run_again_makes_its_group_whole():
    planned = scheduler(group_size=4)
    planned.open(0)
    requests = planned.requests(0.0)
    for request, reward in zip(requests[:3], (1.0, 1.0, 0.0), strict=True):
        planned.settle(simple(request.rollout_id, reward))
    assert planned.settle(lost(requests[3])).group is None
    [again] = planned.requests(0.0)
    group = planned.settle(simple(again.rollout_id, 0.0)).group
    assert grpo([rollout.reward for rollout in group.rollouts], eps=0.0).advantages == (1.0, 1.0, -1.0, -1.0)


def test_a_rollout_that_was_given_up_and_then_tells_of_its_loss_is_lost_once():
    planned = scheduler()
    planned.open(0)
    [request, _] = planned.requests(0.0)
    for _ in range(MAX_LOSSES - 1):
        planned.lose(request.rollout_id)
        [newer] = planned.requests(0.0)
        assert planned.settle(lost(request)).reason is DropReason.INFRA
        request = newer
    assert request.rollout_id in planned.in_flight
    assert not planned.settle(simple(request.rollout_id, 1.0)).place_closed


def test_the_loss_of_a_rollout_whose_place_is_filled_closes_nothing():
    planned = scheduler()
    planned.open(0)
    planned.requests(0.0)
    first, *others, last = (str(RolloutName(0, 0, again)) for again in range(MAX_LOSSES))
    for rollout_id in (first, *others):
        planned.lose(rollout_id)
        planned.requests(0.0)
    assert planned.settle(simple(first, 1.0)).reason is None  # it was heard of after all
    settlement = planned.lose(last)
    assert (settlement.reason, settlement.place_closed) == (DropReason.LOST, False)
    assert planned.open_groups == {"g-000000": 2}


def test_the_loss_of_a_place_that_no_group_has_is_no_crash():
    planned = scheduler(group_size=2)
    planned.open(0)
    assert planned.lose("r-000000-5").reason is DropReason.LOST
    assert planned.lose("r-000009-0").reason is DropReason.LOST
    planned.withdraw("r-000000-5")
    assert planned.open_groups == {"g-000000": 2}


def test_the_head_is_the_oldest_group_that_is_not_complete():
    planned = scheduler(group_size=1)
    assert planned.head is None
    for _ in range(3):
        planned.open(0)
    planned.requests(0.0)
    assert planned.head == 0
    planned.settle(simple("r-000001-0", 1.0))
    assert planned.head == 0
    planned.settle(simple("r-000000-0", 1.0))
    assert planned.head == 2
    planned.settle(simple("r-000002-0", 1.0))
    assert planned.head is None


def test_the_oldest_group_is_requested_first_after_a_restart_too():
    planned = scheduler(group_size=2)
    planned.settle(simple("r-000006-1", 1.0))
    planned.settle(simple("r-000004-0", 1.0))
    assert [r.rollout_id for r in planned.requests(0.0)] == ["r-000004-1", "r-000006-0"]


def test_an_id_that_was_used_is_never_given_out_again():
    planned = scheduler()
    planned.settle(simple("r-000004-0", 1.0))
    planned.know("r-000004-1-3")
    assert [r.rollout_id for r in planned.requests(0.0)] == ["r-000004-1-4"]


def test_credits_bound_what_is_in_flight_at_max_staleness_plus_one_steps():
    admission = Admission(max_staleness=2, rollouts_per_step=8)
    assert [admission.admit(f"g{n}", 8) for n in range(4)] == [True, True, True, False]
    admission.release("g0", 7)
    assert not admission.admit("g3", 8)
    admission.release("g0", 1)
    assert admission.admit("g3", 8)
    assert admission.held == 24


def test_credits_given_back_twice_are_a_crash():
    admission = Admission(max_staleness=0, rollouts_per_step=2)
    admission.admit("g", 2)
    with pytest.raises(AssertionError, match="gives back more than it holds"):
        admission.release("g", 3)


def test_training_that_was_lost_takes_its_credits_even_over_the_capacity():
    admission = Admission(max_staleness=0, rollouts_per_step=2)
    admission.admit("g", 2)
    admission.restore("h", 2)
    assert admission.held == 4
    assert not admission.admit("i", 2)
    admission.release_all("h")
    admission.release_all("h")
    assert admission.held == 2


def test_giving_back_for_a_group_without_credits_is_a_crash():
    admission = Admission(max_staleness=0, rollouts_per_step=2)
    with pytest.raises(AssertionError, match="group g gives back more than it holds"):
        admission.release("g", 1)


# Scheduler and admission together against a plain model -------------------------------------------------------

SIZE = 3
ENDS = ("good", "infra", "useless", "lost")


@dataclass
class Place:
    """What is known of a place from outside."""

    lost: set[str] = field(default_factory=set)
    filled: str | None = None
    closed: bool = False

    @property
    def over(self):
        return self.filled is not None or self.closed

    def end(self, rollout_id, how, refill):
        """The first usable rollout fills it, a useless one closes it, so do too many losses, or one without refill."""
        if self.over:
            return
        if how == "good":
            self.filled = rollout_id
        elif how == "useless":
            self.closed = True
        else:
            self.lost.add(rollout_id)
            self.closed = not refill or len(self.lost) == MAX_LOSSES


class Run:
    """Scheduler and admission, fed as the flow feeds them, beside the places of every group as they should be."""

    def __init__(self, refill):
        self.refill = refill
        self.scheduler = scheduler(group_size=SIZE, refill=refill)
        self.admission = Admission(max_staleness=2, rollouts_per_step=SIZE)
        self.groups = {}  # id -> places
        self.complete = {}  # id -> rollout ids
        self.trained = set()
        self.requested = []
        self.ended = set()

    def open(self):
        key = f"g-{self.scheduler.next_number:06d}"
        room = self.credits() + SIZE <= 3 * SIZE
        assert self.admission.admit(key, SIZE) == room
        if room:
            assert self.scheduler.open(0) == key
            self.groups[key] = [Place() for _ in range(SIZE)]

    def request(self):
        found = [request.rollout_id for request in self.scheduler.requests(0.0)]
        assert not set(found) & set(self.requested)
        assert not any(self.place(rollout_id).over for rollout_id in found)
        self.requested += found

    def end(self, rollout_id, how):
        self.ended.add(rollout_id)
        self.place(rollout_id).end(rollout_id, how, self.refill)
        key = parse(rollout_id).group_id
        settlement = self.settlement(rollout_id, how)
        if settlement.place_closed:
            self.admission.release(key, 1)
        if settlement.complete:
            assert key not in self.complete
            self.complete[key] = [r.rollout_id for r in settlement.group.rollouts] if settlement.group else []

    def settlement(self, rollout_id, how):
        if how == "lost":
            return self.scheduler.lose(rollout_id)
        script = Script(rollout_id)
        script.call([1], [2], role=Role.TITLE if how == "useless" else Role.MAIN)
        outcome = Infra(boundary="sandbox", message="gone") if how == "infra" else Scored(reward=1.0)
        return self.scheduler.settle(script.closed(outcome))

    def train(self, key):
        self.trained.add(key)
        self.admission.release_all(key)

    def place(self, rollout_id):
        name = parse(rollout_id)
        return self.groups[name.group_id][name.place]

    def credits(self):
        return sum(not p.closed for key, places in self.groups.items() if key not in self.trained for p in places)

    def check(self):
        over = {key: all(place.over for place in places) for key, places in self.groups.items()}
        assert self.complete == {
            key: [place.filled for place in self.groups[key] if place.filled] for key in over if over[key]
        }
        left = {key: sum(not p.closed for p in places) for key, places in self.groups.items() if not over[key]}
        assert self.scheduler.open_groups == left
        assert self.scheduler.head == min((int(key[2:]) for key in left), default=None)
        running = {name for name in self.requested if name not in self.ended and not self.place(name).over}
        assert set(self.scheduler.in_flight) == running
        assert self.admission.held == self.credits()


def act(run, data):
    """Something that can happen: a rollout may end twice and in two ways, but only one that has not ended is lost."""
    trainable = sorted(set(run.complete) - run.trained)
    actions = ["open", "request", *(["end"] * 4 if run.requested else []), *(["train"] if trainable else [])]
    action = data.draw(st.sampled_from(actions))
    if action == "train":
        run.train(data.draw(st.sampled_from(trainable)))
    elif action == "end":
        rollout_id = data.draw(st.sampled_from(run.requested))
        ends = [how for how in ENDS if how != "lost" or rollout_id not in run.ended]
        run.end(rollout_id, data.draw(st.sampled_from(ends)))
    else:
        getattr(run, action)()


@given(st.data(), st.booleans())
def test_no_credit_is_lost_or_doubled_whatever_becomes_of_rollouts(data, refill):
    run = Run(refill)
    for _ in range(data.draw(st.integers(0, 40))):
        act(run, data)
        run.check()
    run.request()
    for rollout_id in run.requested:
        run.end(rollout_id, "good")
        run.check()
    assert set(run.complete) == set(run.groups)
    for key in set(run.complete) - run.trained:
        run.train(key)
    assert run.admission.held == 0
