"""What went wrong in the data paths of other systems, as their issue trackers tell it: here it must not.

Each docstring names the public issues. Those that another room's tests hold already are listed in `docs/data_path.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import partial

import msgspec
import numpy as np
import pytest
from flow_scripts import lease, started, step
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import Script, configuration, entry, simple, two_turns
from short_run import GROUP_SIZE, TASKS, Killed, ShortRun

from clawpipe.pipeline.batches import Recipe
from clawpipe.pipeline.credit import grpo
from clawpipe.pipeline.flow import Flow
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import (
    AgentFailed,
    Infra,
    NotYet,
    Role,
    Scored,
    TimedOut,
    VerifierInfra,
    ints,
)
from clawpipe.pipeline.replay import ReadyGroup, Replay
from clawpipe.pipeline.report import summary
from clawpipe.pipeline.scheduler import Scheduler
from clawpipe.pipeline.segments import DropReason

RECIPE = Recipe(credit=partial(grpo, eps=0.0), pack_tokens=10_000, align=1, max_staleness=2)


def rows(*groups, version=0):
    """The rows of a batch of the groups."""
    return msgspec.msgpack.decode(RECIPE.build("b", version, groups).body, type=Batch).rollouts


def group(number, rollouts):
    return ReadyGroup(f"g-{number:06d}", number, 0, tuple(rollouts))


# From text to tokens ----------------------------------------------------------------------------------------

WHAT_ENCODES = ("transformers", "tokenizers", "tiktoken", "sentencepiece", "torch", "vllm")
LOOK = """
import importlib, json, pkgutil, sys
import clawpipe.pipeline as room
for module in pkgutil.iter_modules(room.__path__, "clawpipe.pipeline."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def test_nothing_in_the_data_path_can_make_tokens_of_text():
    """trl#5224: text that was decoded is encoded again in the tool loop, into other tokens."""
    path = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    found = subprocess.run([sys.executable, "-c", LOOK], env=path, capture_output=True, check=True, timeout=60)
    modules = set(json.loads(found.stdout))
    assert "clawpipe.pipeline.tree" in modules
    assert not modules & set(WHAT_ENCODES)
    assert not {name for name in modules if name.startswith(("clawpipe.actors", "clawpipe.learner"))}


# From calls to branches -------------------------------------------------------------------------------------


def test_a_history_that_does_not_go_on_from_what_was_sampled_costs_what_it_changed_and_no_more():
    """rllm#352, rllm#272: one prompt that is no continuation masks the whole trajectory, and nobody is told."""
    flow, feed = a_flow(max_staleness=0)
    first, second = started(flow)
    script = Script(first.rollout_id, task_id=first.task_id)
    script.call([1, 2], [3, 4])
    script.call([1, 2, 3, 4, 5], [6])
    script.call([1, 2, 3, 4, 5, 60, 7], [8, 9])  # the second turn in another token
    feed(*script.records, script.manifest(Scored(reward=1.0)))
    plain = Script(second.rollout_id, task_id=second.task_id)
    plain.call([1, 2], [3])
    feed(*plain.records, plain.manifest(Scored(reward=0.0)))
    step(flow, lease(flow))
    assert summary(flow.ledger, (), 1.0)["tokens"] == {
        "sampled": 6,
        "trained": 5,
        "dropped": {"dead_leaf": 1},
        "in_flight": 0,
        "queued": 0,
        "leased": 0,
    }


def test_agents_that_take_turns_in_one_session_are_one_row_and_every_prefix_is_there_once():
    """rllm#774, rllm#775: a second conversation resets the first one's accumulator, and every turn is a row."""
    script = Script("r-000000-0")
    script.call([1, 10], [11])  # A1
    script.call([1, 20], [21])  # B1
    script.call([1, 10, 11, 12], [13])  # A2
    script.call([1, 20, 21, 22], [23])  # B2
    interleaved = script.closed(Scored(reward=1.0))
    batch = RECIPE.build("b", 0, [group(0, [interleaved, simple("r-000000-1", 0.0, prompt=(1,))])])
    found = msgspec.msgpack.decode(batch.body, type=Batch)
    assert [(row.rollout_id, row.num_trainable) for row in found.rollouts] == [("r-000000-0", 4), ("r-000000-1", 3)]
    [forest] = found.forests
    assert Counter(ints(forest.tokens).tolist()) == Counter([1, 10, 11, 12, 13, 20, 21, 22, 23, 201, 200, 202])
    new_tokens = sum(len(record.prompt_delta) + len(record.completion_ids) for record in script.records) // 4
    assert new_tokens == 9


# From rewards to credit -------------------------------------------------------------------------------------


def test_a_rollout_of_many_branches_counts_once_in_the_mean_of_its_group():
    """miles#1325: samples are fanned out before the baseline, and a rollout counts once for each of its parts."""
    script = Script("r-000000-0")
    for segment in range(3):
        script.call([1, 10 * segment], [10 * segment + 1])
        script.call([1, 10 * segment, 10 * segment + 1, 9], [8], role=Role.COMPACTION)
    long = script.closed(Scored(reward=1.0))
    assert len(long.branches) == 3
    others = [simple(f"r-000000-{place}", 0.0) for place in (1, 2, 3)]
    found = rows(group(0, [long, *others]))
    assert [row.rollout_id for row in found] == [f"r-000000-{place}" for place in range(4)]
    # mean 1/4, population deviation sqrt(3)/4
    assert [row.advantage for row in found] == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)])


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5))
def test_groups_that_lack_members_are_each_measured_by_their_own(rewards):
    """AReaL#1419, AReaL#1559: a partial group shifts the stride by which all later rewards are cut into groups."""
    groups = [
        group(number, [simple(f"r-{number:06d}-{place}", reward) for place, reward in enumerate(mine)])
        for number, mine in enumerate(rewards)
    ]
    found = rows(*groups)
    for number, mine in enumerate(rewards):
        own = [row.advantage for row in found if row.group_id == f"g-{number:06d}"]
        deviation = np.std(mine)
        expected = (np.array(mine) - np.mean(mine)) / deviation if deviation else np.zeros(len(mine))
        assert own == pytest.approx(expected.tolist())


def unusable(rollout_id):
    """Ways to end that leave nothing to learn from."""
    plain, auxiliary, wide, broken = (Script(rollout_id) for _ in range(4))
    plain.call([1], [2])
    auxiliary.call([1], [2], role=Role.TITLE)
    for leaf in range(17):
        wide.call([leaf], [99])
    broken.call([1], [2])
    return {
        DropReason.INFRA: plain.closed(Infra(boundary="engine", message="gone")),
        DropReason.VERIFIER_INFRA: plain.closed(VerifierInfra(message="killed")),
        DropReason.NO_TOKENS: auxiliary.closed(Scored(reward=1.0)),
        DropReason.OVER_BRANCHED: wide.closed(Scored(reward=1.0)),
        DropReason.MALFORMED: broken.closed(Scored(reward=float("nan"))),
        DropReason.INCOMPLETE: broken.closed(Scored(reward=1.0), listed=["r-000000-1.a1.c7"]),
    }


@pytest.mark.parametrize("reason", unusable("r-000000-1"))
def test_what_cannot_be_trained_is_in_neither_mean_nor_deviation_nor_denominator(reason):
    """verl#6452, NeMo-RL#3467: a masked sample still shifts its group's mean. open-instruct#1887, agentcore#122,
    miles#2800: a sandbox that failed is trained as a reward of 0."""
    scheduler = Scheduler(
        tasks=TASKS, harnesses=[("agentloop", 1)], groups_per_step=1, group_size=4, seed=0, refill=False
    )
    scheduler.open(0)
    lost = unusable("r-000000-1")[reason]
    assert lost.dropped is reason
    usable = [simple(f"r-000000-{place}", reward) for place, reward in ((0, 1.0), (2, 0.0), (3, 0.0))]
    *_, last = [scheduler.settle(rollout) for rollout in (lost, *usable)]
    built = RECIPE.build("b", 0, [last.group])
    found = msgspec.msgpack.decode(built.body, type=Batch).rollouts
    # [1, 0, 0]: differences of .667, -.333 and -.333 from the mean, population deviation sqrt(2)/3
    assert [row.advantage * 2**0.5 / 3 for row in found] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert built.reward_mean == pytest.approx(1 / 3)


def test_a_session_that_ended_with_a_failing_engine_is_not_graded_and_one_that_got_over_it_is():
    """A fork of Polar: sessions whose last call failed were trained as finished; then, when every session with any
    failed call was dropped, 118 of 198 were lost, the long ones first. A context that ran full is the agent's own."""
    flow, feed = a_flow(group_size=4, max_staleness=0)
    outcomes = (
        (Scored(reward=0.2), 3),  # three calls failed on the way
        (Infra(boundary="engine", message="exit 1 after 1 model calls failed"), 1),
        (AgentFailed(reward=0.5, message="prompt too long"), 0),
        (TimedOut(reward=0.8), 1),
    )
    requests = started(flow)
    for request, (outcome, aborted) in zip(requests, outcomes, strict=True):
        script = Script(request.rollout_id, task_id=request.task_id)
        script.call([1, 2], [3])
        feed(*script.records, script.manifest(outcome, aborted=aborted))
    [again] = started(flow)  # the lost one, in the same place
    assert (again.rollout_id, again.group_id) == ("r-000000-1-1", requests[0].group_id)
    feed(*two_turns(again, reward=0.1))
    lease(flow)
    batch = msgspec.msgpack.decode(flow.batches.lease.body, type=Batch)
    assert {row.rollout_id: row.reward for row in batch.rollouts} == {
        "r-000000-0": 0.2,
        "r-000000-1-1": 0.1,
        "r-000000-2": 0.5,
        "r-000000-3": 0.8,
    }
    found = summary(flow.ledger, (), 1.0)
    assert (found["calls_aborted"], found["rollouts"]["infra"]) == (5, 1)


# In the queue -----------------------------------------------------------------------------------------------


@given(st.data())
def test_what_is_put_into_a_full_queue_leaves_it_in_a_batch_or_by_name(data):
    """AReaL#1481: work beyond the capacity pushes the oldest out of a `deque(maxlen=...)`, and nobody is told."""
    queue = Replay(capacity_tokens=1, capacity_rollouts=1, max_staleness=1, groups_per_step=2, min_group=2)
    put, left, newest = set(), [], 0
    for number in range(data.draw(st.integers(1, 12))):
        version = data.draw(st.integers(0, 5))
        newest = max(newest, version)
        sizes = data.draw(st.integers(1, 3))
        mine = [simple(f"r-{number:06d}-{place}", 0.0, version=version) for place in range(sizes)]
        queue.put(group(number, mine))
        put |= {rollout.rollout_id for rollout in mine}
        if data.draw(st.booleans()):
            taken = queue.take(data.draw(st.integers(newest, 6)))
            left += [rollout.rollout_id for each in taken.groups for rollout in each.rollouts]
            left += [rollout.rollout_id for _, rollout, _ in taken.dropped]
            assert {reason for *_, reason in taken.dropped} <= {DropReason.STALE, DropReason.SMALL_GROUP}
    waiting = [rollout.rollout_id for each in queue.groups for rollout in each.rollouts]
    assert Counter(left + waiting) == Counter(put)
    assert queue.num_rollouts == len(waiting)


def test_staleness_is_that_of_the_tokens_and_not_of_the_request_or_the_queue():
    """verl#6975: the version is stamped when a sample is queued, and all samples of a step may be dropped."""
    flow, feed = a_flow()
    requests = started(flow)
    for request in requests:  # all admitted at version 0
        feed(*two_turns(request, version=3 if request.group_id != "g-000000" else 1))
    ready = lease(flow, version=4)
    assert flow.batches.lease.rollout_ids == ("r-000001-0", "r-000001-1")  # group 0 was 3 versions old, 2 are allowed
    assert flow.batches.lease.staleness_max == 1
    step(flow, ready)
    assert totals(flow)["dropped"] == {"stale": 6}


def test_a_step_whose_samples_are_all_stale_is_waited_for_and_its_places_are_free():
    """verl#6975: an update on an empty batch. verl#7938, verl#7940: finished work that counts as outstanding for ever
    starves the run."""
    flow, feed = a_flow()
    for request in started(flow):
        feed(*two_turns(request, version=0))
    assert isinstance(flow.lease(9), NotYet)
    assert flow.admission.held == 0
    for request in started(flow):
        feed(*two_turns(request, version=9))
    step(flow, lease(flow, version=9))
    assert flow.updates == 1


def test_a_long_rollout_over_many_versions_is_trained_for_its_fresh_tokens():
    """prime-rl#2329, prime-rl#2960, prime-rl#3313: groups over the bound are aborted in flight, which kills the longest
    first."""
    long = Script("r-000000-0")
    history = [1]
    for version in range(6):
        long.call(history, [10 + version], version=version)
        history = [*history, 10 + version, 50 + version]
    mine = group(0, [long.closed(Scored(reward=1.0)), simple("r-000000-1", 0.0, version=5)])
    queue = Replay(capacity_tokens=100, capacity_rollouts=10, max_staleness=2, groups_per_step=1)
    queue.put(mine)
    taken = queue.take(6)
    assert taken.dropped == ()
    built = RECIPE.build("b", 6, taken.groups)
    assert built.set_aside == {"r-000000-0": {DropReason.STALE: 4}}  # of versions 0 to 3
    assert built.num_entries == 6 + 3


def test_what_staleness_takes_is_reported_by_length_against_what_is_trained():
    """prime-rl#2960, and the fork of Polar: a filter that takes the longest leaves a biased rest, unseen."""
    flow, feed = a_flow()
    for number, request in enumerate(started(flow)):
        stale, script = request.group_id == "g-000000", Script(request.rollout_id, task_id=request.task_id)
        script.call([1], [100 * number + k for k in range(30 if stale else 10)], version=0 if stale else 9)
        feed(*script.records, script.manifest())
    step(flow, lease(flow, version=9))
    found = summary(flow.ledger, (), 1.0)["survivors"]
    assert {end: (means["rollouts"], means["sampled"]) for end, means in found.items()} == {
        "stale": (2, 30.0),
        "trained": (2, 10.0),
    }


ENDS = ("trained", "refused", "no_step", "stale", "infra", "malformed", "no_tokens", "over_branched", "lost", "late")


@pytest.mark.parametrize("end", ENDS)
def test_a_place_is_free_again_however_its_rollout_ended(end):
    """verl#7938, verl#7940: reservations that nobody gives back starve the run."""
    flow, feed = a_flow()
    first, *others = started(flow)
    for request in others:
        feed(*two_turns(request, version=0 if end == "stale" and request.group_id == first.group_id else 9))
    end_badly(flow, feed, first, end)
    while not isinstance(reply := lease(flow, version=9), NotYet):
        failed = end in ("refused", "no_step") and first.rollout_id in flow.batches.lease.rollout_ids
        changes = {"updates": flow.updates, "version": flow.version} if failed else {}
        step(flow, reply, **changes, refused="damaged" if failed and end == "refused" else "")
    assert flow.admission.held == 0
    assert flow.scheduler.in_flight == ()
    assert len(flow.requests(0.0)) == len(others) + 1
    reasons = totals(flow)["dropped"]
    assert bool(reasons) == (end != "trained")
    flow.check()


def end_badly(flow, feed, request, end):
    """The rollout of this request ends in the named way."""
    script = Script(request.rollout_id, task_id=request.task_id)
    match end:
        case "infra" | "malformed":
            outcome = Infra(boundary="sandbox", message="") if end == "infra" else Scored(reward=float("inf"))
            for _ in range(3):  # run again until its place is closed
                script = Script(request.rollout_id, task_id=request.task_id)
                script.call([1], [2])
                feed(*script.records, script.manifest(outcome))
                request = next(iter(started(flow)), request)
        case "lost":
            for _ in range(3):
                feed(two_turns(request)[0])
                flow.lost(request.rollout_id)
                request = next(iter(started(flow)), request)
        case "no_tokens":
            script.call([1], [2], role=Role.TITLE)
            feed(*script.records, script.manifest())
        case "over_branched":
            for leaf in range(17):
                script.call([leaf], [99])
            feed(*script.records, script.manifest())
        case "late":
            feed(*two_turns(request, version=9), *two_turns(request, attempt=2, version=9))
        case _:
            feed(*two_turns(request, version=0 if end == "stale" else 9))


# After a death ----------------------------------------------------------------------------------------------


def moments_of_a_run(folder):
    run = ShortRun(folder)
    run.go()
    run.file.close()
    return run.moments


DEATHS = ({}, {"learner_too": True}, {"learner_too": True, "ledger_too": True})  # the service dies in all of them


@pytest.mark.parametrize("deaths", DEATHS, ids=["service", "and learner", "and ledger"])
def test_killed_at_any_moment_a_run_skips_no_task_and_trains_no_rollout_twice(tmp_path, deaths):
    """NeMo-RL#3599: a resumed run skipped 675 of 736 prompts, the long ones first. OpenRLHF#1322, trl#5911: a resumed
    run repeats what it had."""
    (tmp_path / "whole").mkdir()
    moments = moments_of_a_run(tmp_path / "whole")
    assert moments > 50
    for dies_at in range(1, moments + 1):
        folder = tmp_path / str(dies_at)
        folder.mkdir()
        run = ShortRun(folder, dies_at)
        with pytest.raises(Killed):
            run.go()
        run.revive(**deaths)
        run.go()
        trained = [rollout_id for _, rollouts in run.trained for rollout_id in rollouts]
        expected = [f"r-{number:06d}-{place}" for number in range(6) for place in range(GROUP_SIZE)]
        assert sorted(trained) == expected, dies_at
        assert [updates for updates, _ in run.trained] == [1, 2, 3], dies_at
        run.flow.check()
        run.file.close()


@pytest.mark.parametrize("deaths", DEATHS, ids=["service", "and learner", "and ledger"])
def test_credits_after_a_death_are_counted_from_stream_and_work_queue(tmp_path, deaths):
    """AReaL#1388: a counter of accepted work that no restart brings back makes all later staleness wrong."""
    (tmp_path / "whole").mkdir()
    for dies_at in range(1, moments_of_a_run(tmp_path / "whole") + 1):
        folder = tmp_path / str(dies_at)
        folder.mkdir()
        run = ShortRun(folder, dies_at)
        with pytest.raises(Killed):
            run.go()
        run.revive(**deaths)
        assert run.flow.admission.held == GROUP_SIZE * len(run.groups - run.trained_groups), dies_at
        run.file.close()


# A flow, its stream and its learner -------------------------------------------------------------------------


def a_flow(*, group_size=2, max_staleness=2):
    """A flow of one group per step, and what feeds records to it."""
    schedule = {"groups_per_step": 1, "group_size": group_size, "max_staleness": max_staleness}
    config = configuration(run={"updates": 100}, schedule=schedule)
    flow = Flow(config, TASKS, Ledger(), EventLog("pipeline"), "p")
    sequences = iter(range(1, 10_000))

    def feed(*records):
        for record in records:
            flow.record(entry(next(sequences), record), 0.0)

    return flow, feed


def totals(flow):
    return summary(flow.ledger, (), 1.0)["tokens"]
