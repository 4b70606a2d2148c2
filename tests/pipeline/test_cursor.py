from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawpipe.pipeline.cursor import Spans
from clawpipe.pipeline.records import StreamCursor


def test_nothing_read_and_nothing_open_points_at_where_reading_begins():
    spans = Spans()
    assert spans.cursor() == StreamCursor(sequence=1)
    spans.start_at(500)
    assert spans.cursor() == StreamCursor(sequence=500)


def test_the_lowest_open_record_holds_the_cursor_and_what_is_done_above_is_named():
    spans = Spans()
    spans.note("g1", "a", 1)
    spans.note("g2", "b", 2)
    spans.note("g1", "a", 3)
    spans.set_over("g1", True)
    assert spans.cursor() == StreamCursor(sequence=2, done=("a",))
    spans.set_over("g2", True)
    assert spans.cursor() == StreamCursor(sequence=4)


def test_a_group_whose_training_was_lost_is_open_again():
    spans = Spans()
    spans.note("g1", "a", 1)
    spans.set_over("g1", True)
    spans.set_over("g1", False)
    assert spans.cursor() == StreamCursor(sequence=1)


def test_a_message_of_nobodys_rollout_moves_the_position_and_is_not_named():
    spans = Spans()
    spans.note("g1", "a", 1)
    spans.pass_by(2)
    spans.set_over("g1", True)
    assert (spans.position, spans.cursor()) == (2, StreamCursor(sequence=3))
    assert spans.open == ()


records = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=30)


@given(records, st.sets(st.integers(0, 4)), st.integers(1, 40))
def test_a_reader_from_the_cursor_meets_every_record_of_an_open_group_and_can_skip_the_done(found, over, below):
    spans = Spans()
    where = {}
    for sequence, (group, rollout) in enumerate(found, start=1):
        spans.note(f"g{group}", f"r{group}-{rollout}", sequence)
        where.setdefault((group, rollout), []).append(sequence)
    for group in over:
        spans.set_over(f"g{group}", True)
    cursor = spans.cursor()
    for (group, rollout), sequences in where.items():
        if group not in over:
            assert min(sequences) >= cursor.sequence
            assert f"r{group}-{rollout}" not in cursor.done
        else:
            assert (f"r{group}-{rollout}" in cursor.done) == (max(sequences) >= cursor.sequence)
    spans.forget_below(min(below, cursor.sequence))
    assert spans.cursor() == cursor
