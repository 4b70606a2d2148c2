"""What must come of a recording, said by whoever knows what the scripted server answered and which fault it played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clawpipe.pipeline.records import Role
from clawpipe.pipeline.segments import CallFate, DropReason, branches_of
from recorded.conversations import Sampled, call_id, conversation, selection, trained

Chains = tuple[tuple[int, ...], ...]  # numbers of the calls that are trained on each kept branch
AUXILIARY = (Role.SUBAGENT, Role.COMPACTION)


@dataclass(frozen=True)
class Expected:
    """The structure of one recording; calls go by their number in it."""

    chains: Chains  # of the main conversation
    leaves: int | None = None  # of the main conversation; None: one for each chain
    refused: tuple[int, ...] = ()  # an error was answered: never sampled, no record
    broken: tuple[int, ...] = ()  # the answer was broken off, or nobody waited for it: not delivered
    begun: Mapping[int, int] = field(default_factory=dict)  # of a call only its first blocks were taken over
    dropped: Mapping[int, Mapping[DropReason, int]] = field(default_factory=dict)  # other calls' blocks, by reason
    subagents: Chains = ()  # in groups of their own
    compactions: Chains = ()
    other: tuple[int, ...] = ()  # calls of other auxiliary roles

    def kept(self, calls: Sequence[Sampled], chains: Chains) -> list[dict[int, int]]:
        """By branch: call number -> how many of its blocks are trained."""
        sampled = {call.number: len(call.completion) for call in calls}
        return [{number: self.begun.get(number, sampled[number]) for number in chain} for chain in chains]

    def fates(self, calls: Sequence[Sampled], *, auxiliary: bool) -> list[CallFate]:
        """What must become of each call."""
        return [self._fate(call, auxiliary=auxiliary) for call in calls]

    def _fate(self, call: Sampled, *, auxiliary: bool) -> CallFate:
        total = len(call.completion)
        reasons = self._reasons(call, total, auxiliary=auxiliary)
        return CallFate(call_id(call.number), call.role, total, total - sum(reasons.values()), reasons)

    def _reasons(self, call: Sampled, total: int, *, auxiliary: bool) -> Mapping[DropReason, int]:
        if call.role is not Role.MAIN and not (auxiliary and call.role in AUXILIARY):
            return {DropReason(f"auxiliary_{call.role.value}"): total}
        if call.number in self.begun:
            return {DropReason.NOT_ADOPTED: total - self.begun[call.number]}
        if call.number in self.broken:
            return self.dropped.get(call.number, {DropReason.UNDELIVERED: total})
        return self.dropped.get(call.number, {})


def line(*numbers: int, **more) -> Expected:
    """Every one of these calls extends the one before: one branch."""
    return Expected((numbers,), **more)


def star(*numbers: int, **more) -> Expected:
    """No one of these calls extends another: a branch each."""
    return Expected(tuple((number,) for number in numbers), **more)


def check(harness: str, scenario: str, expected: Expected) -> None:
    """Runs the recording through tree and segments, without auxiliary groups and with them."""
    calls = conversation(harness, scenario)
    check_script(calls, expected)
    for auxiliary in (False, True):
        found = selection(calls, auxiliary=auxiliary)
        leaves = len(expected.chains) if expected.leaves is None else expected.leaves
        assert found.num_leaves == leaves
        assert trained(found.branches) == expected.kept(calls, expected.chains)
        assert list(found.fates) == expected.fates(calls, auxiliary=auxiliary)
        for role, chains in ((Role.SUBAGENT, expected.subagents), (Role.COMPACTION, expected.compactions)):
            own = expected.kept(calls, chains) if auxiliary else []
            assert trained(branches_of(found.parts, role)) == own


def check_script(calls: Sequence[Sampled], expected: Expected) -> None:
    """That the server played the faults which the expectation was made from, and that it speaks of every call."""
    assert {call.number for call in calls if not call.delivered} == set(expected.broken)
    assert not {call.number for call in calls} & set(expected.refused)
    chains = (*expected.chains, *expected.subagents, *expected.compactions)
    spoken_of = {number for chain in chains for number in chain}
    spoken_of |= {*expected.broken, *expected.dropped, *expected.other}
    assert {call.number for call in calls} == spoken_of
