"""A rollout of a real harness that has ended, from all sides: what the engine said, what was recorded and trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawpipe.pipeline import closing, tree
from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import CallRecord, IntArray, Outcome, Role, RolloutManifest
from clawpipe.pipeline.segments import CallFate, DropReason
from harness_live.faults import Seen
from harness_live.scripted import Said, ScriptedEngine

LEAF_CAP = 16


@dataclass(frozen=True, eq=False)
class Rollout:
    """A finished rollout from all sides."""

    manifest: RolloutManifest
    records: list[CallRecord]
    closed: closing.Rollout
    tree: tree.PrefixTree | None  # None: the rollout was lost to infrastructure without calls
    engine: ScriptedEngine
    seen: list[Seen]
    output: bytes  # the end of what the harness wrote

    @property
    def outcome(self) -> Outcome:
        return self.manifest.outcome

    @property
    def said(self) -> list[Said]:
        """What the engine said, by call index."""
        order = {record.call_id: record.index for record in self.records}
        return sorted(self.engine.said, key=lambda said: order[said.call_id])

    @property
    def roles(self) -> list[Role]:
        return [record.role for record in self.records]

    @property
    def broken(self) -> Counter[str]:
        """Calls by the reason why one of their turns could not be grafted."""
        return Counter(record.graft_broken for record in self.records if record.graft_broken is not None)

    @property
    def fates(self) -> list[CallFate]:
        """By call index."""
        order = {record.call_id: record.index for record in self.records}
        return sorted(self.closed.fates, key=lambda fate: order[fate.call_id])

    @property
    def branches(self) -> tuple[Branch, ...]:
        return self.closed.branches

    @property
    def dropped(self) -> Counter[DropReason]:
        total: Counter[DropReason] = Counter()
        for fate in self.closed.fates:
            total.update(fate.dropped)
        return total

    def of(self, role: Role) -> list[Said]:
        return [said for said in self.said if said.role is role]

    def text(self, said: Said) -> str:
        """What the model read before it said this."""
        decode = self.engine.renderer.tokenizer.backend_tokenizer.decode
        text: str = decode(said.prompt.tolist(), skip_special_tokens=False)
        return text

    def kept_text(self, said: Said) -> str:
        """The part that is trained of a turn whose beginning is."""
        return self.engine.renderer.decode(said.sampled.ids[: self.fate_of(said).kept])

    @property
    def main(self) -> list[Said]:
        """The main conversation."""
        return self.of(Role.MAIN)

    @property
    def reward(self) -> float:
        return self.closed.reward

    def fate_of(self, said: Said) -> CallFate:
        return next(fate for fate in self.closed.fates if fate.call_id == said.call_id)


def finished(
    records: Sequence[CallRecord],
    manifest: RolloutManifest,
    engine: ScriptedEngine,
    seen: list[Seen],
    output: bytes,
) -> Rollout:
    """From what the broker held at the end of the rollout."""
    ordered = sorted(records, key=lambda record: record.index)
    closed = closing.close(manifest, ordered, LEAF_CAP)
    built = tree.build(tree.resolve(ordered)) if ordered else None
    return Rollout(manifest, ordered, closed, built, engine, seen, output)


def versions(said: Said) -> IntArray:
    """int32 [C]"""
    spans = said.sampled.versions
    found = [span.version for span in spans for _ in range(span.start, span.end)]
    return np.array(found, np.int32)


def extends(earlier: Said, later: Said) -> bool:
    """Whether the later prompt begins with all of the earlier call, its sampled ids included."""
    whole = np.concatenate((earlier.prompt, earlier.sampled.ids))
    return np.array_equal(later.prompt[: len(whole)], whole)


def table(rollout: Rollout) -> str:
    """One line per call, for a person who looks for what went wrong; no text of any prompt."""
    lines = [str(rollout.outcome), f"requests by status: {Counter(seen.status for seen in rollout.seen)}"]
    entries = {entry.call_id: entry for entry in rollout.manifest.calls}
    for record, said, fate in zip(rollout.records, rollout.said, rollout.fates, strict=True):
        entry = entries[record.call_id]
        parent = "-" if record.parent is None else record.parent.rpartition(".c")[2]
        dropped = {str(reason): count for reason, count in fate.dropped.items()}
        lines.append(
            f"{record.index:3} {record.role:10} prompt {record.prompt_tokens:6} of {parent}:{record.parent_tokens:6} "
            f"sampled {fate.sampled:5} kept {fate.kept:5} {dropped} broken={record.graft_broken} "
            f"malformed={record.malformed_tool_call} delivered={entry.delivered} cut={entry.cut} "
            f"{said.text[:60]!r}"
        )
    return "\n".join(lines)
