from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from clawpipe.pipeline.config import LeafQuantile
from clawpipe.pipeline.leaf_caps import LeafCaps


def quantile(q, *, at_least=1, at_most=64):
    return LeafQuantile(quantile=q, window_rollouts=16, at_least=at_least, at_most=at_most)


def noted(caps, harness, leaves):
    for num_leaves in leaves:
        caps.note(harness, num_leaves)
    return caps


def test_a_fixed_cap_stays_whatever_was_seen():
    caps = noted(LeafCaps(16), "codex", [1] * 1000)
    assert caps.cap_for("r-000000-0", "codex") == 16


def test_the_cap_is_the_most_until_the_window_is_full():
    caps = noted(LeafCaps(quantile(0.5, at_most=40)), "codex", range(1, 16))
    assert caps.cap_for("r-000000-0", "codex") == 40
    caps.note("codex", 16)  # 1..16 now
    assert caps.cap_for("r-000000-0", "codex") == 8


def test_a_quantile_is_the_smallest_number_that_so_many_do_not_exceed():
    seen = [1] * 12 + [5] * 3 + [30]
    assert noted(LeafCaps(quantile(0.75)), "codex", seen).cap_for("r", "codex") == 1  # 12 of 16
    assert noted(LeafCaps(quantile(0.76)), "codex", seen).cap_for("r", "codex") == 5
    assert noted(LeafCaps(quantile(1.0)), "codex", seen).cap_for("r", "codex") == 30


def test_the_cap_stays_between_its_bounds():
    caps = LeafCaps(quantile(1.0, at_least=4, at_most=10))
    assert noted(caps, "codex", [2] * 16).cap_for("r", "codex") == 4
    assert noted(caps, "codex", [99]).cap_for("r", "codex") == 10


def test_only_the_latest_rollouts_count():
    caps = noted(LeafCaps(quantile(1.0)), "codex", [50, *[3] * 15])
    assert caps.cap_for("r", "codex") == 50
    caps.note("codex", 2)
    assert caps.cap_for("r", "codex") == 3


def test_harnesses_do_not_see_each_other():
    caps = noted(LeafCaps(quantile(1.0)), "codex", [3] * 16)
    assert caps.cap_for("r", "openclaw") == 64
    assert caps.cap_for("r", "codex") == 3


def test_what_an_earlier_process_decided_stands():
    caps = noted(LeafCaps(quantile(1.0), {"r-000007-0": 12}), "codex", [3] * 16)
    assert caps.cap_for("r-000007-0", "codex") == 12
    assert caps.cap_for("r-000007-1", "codex") == 3


def test_asking_changes_nothing():
    caps = noted(LeafCaps(quantile(1.0)), "codex", range(1, 17))
    assert [caps.cap_for("r-000000-0", "codex") for _ in range(3)] == [16, 16, 16]


@given(st.lists(st.integers(1, 30), min_size=16, max_size=60), st.integers(1, 100))
def test_the_window_agrees_with_sorting_it_anew(seen, percent):
    caps = noted(LeafCaps(quantile(percent / 100)), "codex", seen)
    latest = sorted(seen[-16:])
    assert caps.cap_for("r", "codex") == latest[math.ceil(percent * 16 / 100) - 1]
