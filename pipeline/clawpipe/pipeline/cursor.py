"""Where in the record stream the run stands. Pure.

A group is open until it is trained or dropped whole; the cursor is the lowest sequence of any open group's
records. What is done above it is named, so that a resumed run reads from the cursor on and trains nothing
twice. Since it holds on to whole groups, everything about an open group can be read again from the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clawpipe.pipeline.records import StreamCursor


@dataclass(slots=True)
class _Span:
    first: int
    last: dict[str, int] = field(default_factory=dict)  # of each rollout
    over: bool = False


class Spans:
    """The sequences of each group's records."""

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}
        self.position = 0  # sequence of the last record that was read

    def start_at(self, sequence: int) -> None:
        """Everything below was done before this process began."""
        self.position = sequence - 1

    def note(self, group_id: str, rollout_id: str, sequence: int, *, over: bool = False) -> None:
        """A record of the group was read. `over`: of a group that was finished before this process began."""
        span = self._spans.setdefault(group_id, _Span(first=sequence, over=over))
        span.first = min(span.first, sequence)
        span.last[rollout_id] = max(sequence, span.last.get(rollout_id, 0))
        self.position = max(self.position, sequence)

    def pass_by(self, sequence: int) -> None:
        """A message that belongs to no group was read: it holds nothing up."""
        self.position = max(self.position, sequence)

    def last(self, group_id: str, rollout_id: str) -> int:
        """The newest sequence of a rollout's records; 0 without any."""
        span = self._spans.get(group_id)
        return span.last.get(rollout_id, 0) if span else 0

    def rollouts(self, group_id: str) -> tuple[str, ...]:
        """The rollouts of a group of which records were read."""
        span = self._spans.get(group_id)
        return tuple(span.last) if span else ()

    def set_over(self, group_id: str, over: bool) -> None:
        """The group is trained or dropped whole, or (False) its training was lost."""
        span = self._spans.get(group_id)
        if span is not None:
            span.over = over

    @property
    def open(self) -> tuple[str, ...]:
        """The groups that hold the cursor."""
        return tuple(key for key, span in self._spans.items() if not span.over)

    def cursor(self) -> StreamCursor:
        """The cursor of a checkpoint taken now."""
        sequence = min((s.first for s in self._spans.values() if not s.over), default=self.position + 1)
        done = (
            rollout_id
            for span in self._spans.values()
            if span.over
            for rollout_id, last in span.last.items()
            if last >= sequence
        )
        return StreamCursor(sequence=sequence, done=tuple(sorted(done)))

    def forget_below(self, sequence: int) -> None:
        """Drops what no cursor can name any more: finished groups that lie wholly below."""
        self._spans = {
            key: span for key, span in self._spans.items() if not span.over or max(span.last.values()) >= sequence
        }
