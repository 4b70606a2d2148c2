"""The staleness that is admitted follows the effective sample size of the updates."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from flow_scripts import Stream, lease, make_flow, started, step, totals
from hypothesis import given
from hypothesis import strategies as st
from pipeline_scripts import two_turns

from clawpipe.pipeline import restart
from clawpipe.pipeline.config import AutoThrottle
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.records import AskCursor, BatchReady, Hello, NotYet, StreamCursor
from clawpipe.pipeline.throttle import allowed_staleness

LOW, HIGH = 0.2, 0.8
RULE = AutoThrottle(ess_below=0.5, for_updates=2)


@pytest.mark.parametrize(
    ("ess", "allowed"),
    [
        ([], 4),
        ([LOW], 4),
        ([LOW, LOW], 3),
        ([LOW, HIGH, LOW, HIGH], 4),  # not in a row
        ([LOW, LOW, LOW], 3),  # the count begins anew after each step
        ([LOW] * 4, 2),
        ([LOW] * 4 + [HIGH], 2),
        ([LOW] * 4 + [HIGH] * 2, 3),
        ([LOW] * 4 + [HIGH] * 4, 4),
        ([HIGH] * 8, 4),  # never over what is configured
        ([LOW] * 20, 0),  # never under 0
        ([LOW] * 20 + [HIGH] * 2, 1),
        ([0.5, 0.5], 4),  # at the bound is not below it
    ],
)
def test_so_many_in_a_row_below_lower_it_by_one_and_as_many_above_raise_it_again(ess, allowed):
    assert allowed_staleness(ess, RULE, 4) == allowed


@given(st.lists(st.floats(0, 1)), st.integers(1, 4), st.integers(0, 5))
def test_it_stays_within_0_and_what_is_configured_and_moves_by_one(ess, for_updates, configured):
    rule = AutoThrottle(ess_below=0.5, for_updates=for_updates)
    course = [allowed_staleness(ess[:n], rule, configured) for n in range(len(ess) + 1)]
    assert all(0 <= allowed <= configured for allowed in course)
    assert all(abs(a - b) <= 1 for a, b in pairwise(course))


def throttled(**tables):
    """2 groups of 2 per step, max_staleness 2; two updates below 0.5 lower it."""
    correction = {"kind": "truncated", "auto_throttle": {"ess_below": 0.5, "for_updates": 2}}
    return {"run": {"updates": 100}, "correction": correction, **tables}


def run_all(flow, feed, version=0):
    for request in started(flow):
        feed(*two_turns(request, version=version))


def train(flow, *ess):
    for value in ess:
        ready = lease(flow, flow.version)
        assert isinstance(ready, BatchReady)
        step(flow, ready, metrics={} if value is None else {"ess": value})


def test_credits_over_the_lowered_capacity_drain_before_anything_is_admitted():
    flow = make_flow(**throttled())
    feed = Stream(flow)
    requests = started(flow)

    def train_next(ess):
        requests.extend(started(flow))
        for request in requests[:4]:
            feed(*two_turns(request, version=flow.version))
        del requests[:4]
        train(flow, ess)

    assert (flow.admission.capacity, flow.admission.held) == (12, 12)
    for ess in (LOW, LOW, HIGH):
        train_next(ess)
    requests.extend(started(flow))
    assert (flow.admission.capacity, flow.admission.held) == (8, 8)
    flow.hello(Hello(version=3, updates=2, cursor=StreamCursor()))  # the third update's rollouts are back
    assert (flow.admission.capacity, flow.admission.held) == (8, 12)
    assert started(flow) == []
    train(flow, HIGH)
    assert (flow.admission.held, started(flow)) == (8, [])
    train_next(LOW)
    assert len(started(flow)) == 4


def test_it_is_raised_again_and_both_are_said(caplog):
    flow = make_flow(**throttled())
    feed = Stream(flow)
    with caplog.at_level(logging.WARNING, logger="clawpipe"):
        for ess in (LOW, LOW, HIGH, HIGH):
            run_all(flow, feed, version=flow.version)
            train(flow, ess)
    said = [(record.message, record.fields) for record in caplog.records]
    reason = "the effective sample size, by [correction.auto_throttle]"
    assert said == [
        (
            "max_staleness lowered",
            {"before": 2, "now": 1, "configured": 2, "updates": 2, "reason": reason},
        ),
        (
            "max_staleness raised",
            {"before": 1, "now": 2, "configured": 2, "updates": 4, "reason": reason},
        ),
    ]
    assert flow.admission.capacity == 12


def test_the_check_at_the_take_follows():
    flow = make_flow(**throttled())
    feed = Stream(flow)
    run_all(flow, feed)  # 6 groups of version 0: two are for each of the versions 0, 1 and 2
    train(flow, LOW, LOW)
    assert flow.version == 2
    assert isinstance(lease(flow, 2), NotYet)  # staleness 2 is one too many now
    assert totals(flow).dropped == {"stale": 12}


def test_an_update_without_the_metric_counts_for_neither():
    flow = make_flow(**throttled())
    feed = Stream(flow)
    for ess in (LOW, None, LOW):
        run_all(flow, feed, version=flow.version)
        train(flow, ess)
    assert flow.max_staleness == {"now": 1, "configured": 2}


def test_nothing_is_lowered_without_the_table():
    flow = make_flow(**throttled(correction={"kind": "truncated"}))
    run_all(flow, Stream(flow))
    train(flow, 0.0, 0.0, 0.0)
    assert flow.max_staleness == {"now": 2, "configured": 2}


def test_updates_that_a_learners_crash_undoes_are_undone_here_too():
    flow = make_flow(**throttled())
    run_all(flow, Stream(flow))
    train(flow, LOW, LOW)
    flow.hello(Hello(version=9, updates=1, cursor=StreamCursor()))
    assert flow.max_staleness == {"now": 2, "configured": 2}


@pytest.mark.parametrize(
    ("first", "now"),
    [(AskCursor(), 1), (Hello(version=9, updates=1, cursor=StreamCursor()), 2)],
    ids=["service alone", "learner from its checkpoint"],
)
def test_a_service_that_starts_again_finds_what_holds_in_the_books(tmp_path, first, now):
    flow, file = make_flow(**throttled()), LedgerFile(tmp_path / "ledger.sqlite")
    feed = Stream(flow)
    records = [record for request in started(flow) for record in two_turns(request)]
    feed(*records)
    train(flow, LOW, LOW)
    file.write(flow.ledger.changes())

    stored, again = file.read(), make_flow(**throttled())
    at = restart.anchor(first, stored)
    restart.prepare(again, stored, at)
    Stream(again)(*records)
    restart.complete(again, stored, at, ())
    assert again.max_staleness == {"now": now, "configured": 2}
