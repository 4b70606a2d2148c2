"""One rollout of a real harness: real sandbox, link, proxy and broker; only the engine is scripted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import trio

from clawpipe.actors import link
from clawpipe.actors.harness import mcp
from clawpipe.actors.harness.base import Harness, Launch, ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.proxy import listen, service
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.proxy_link import connect
from clawpipe.actors.rollout import Workshop, run_rollout
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline import assembler, tree
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import (
    Config,
    FilingTasksConfig,
    HarnessConfig,
    ModelConfig,
    ProxyConfig,
    SandboxConfig,
    TinyModelConfig,
    VerifyConfig,
)
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.packing import Path as TrainedPath
from clawpipe.pipeline.records import CallRecord, IntArray, Outcome, Role, RolloutManifest, RolloutRequest
from clawpipe.pipeline.segments import CallFate, DropReason
from harness_live.faults import Fault, Faulty, Seen
from harness_live.scripted import Said, Script, ScriptedEngine

MIB = 1024**2
LEAF_CAP = 16
# The grader: which of the expected files hold exactly what they should.
GRADER = b"""
import json, pathlib, sys
here = pathlib.Path(__file__).parent
expected = json.loads((here / "expected.json").read_text())
work = pathlib.Path(sys.argv[1])
def holds(name, text):
    path = work / name
    return path.is_file() and path.read_text() == text
print(json.dumps({name: float(holds(name, text)) for name, text in expected.items()} or {"any": 1.0}))
"""


@dataclass(frozen=True)
class Errand:
    """What a harness is told and given, and the files that it must leave behind."""

    prompt: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    mcp: tuple[McpServer, ...] = ()

    def task(self) -> Task:
        import json

        grader = {"check.py": GRADER, "expected.json": json.dumps(dict(self.expected)).encode()}
        return Task(
            task_id="live/0",
            prompt=self.prompt,
            files=self.files,
            grader=grader,
            grader_entry="check.py",
            mcp=self.mcp,
        )


@dataclass(frozen=True, eq=False)
class Rollout:
    """A finished rollout from all sides."""

    manifest: RolloutManifest
    records: list[CallRecord]
    closed: assembler.Rollout
    tree: tree.PrefixTree | None  # None: the rollout was lost to infrastructure without calls
    engine: ScriptedEngine
    seen: list[Seen]
    events: list[tuple[str, dict[str, Any]]]
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
    def paths(self) -> tuple[TrainedPath, ...]:
        return self.closed.paths

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


@dataclass
class Watched:
    """The harness's own adapter, with what its program wrote."""

    harness: Harness
    output: bytes = b""

    @property
    def name(self) -> str:
        return self.harness.name

    @property
    def port(self) -> int:
        return self.harness.port

    def launch(self, task: Task) -> Launch:
        return self.harness.launch(task)

    def classify(self, call: ModelCall) -> Role:
        return self.harness.classify(call)

    def agent_error(self, exit_code: int, output: bytes) -> str | None:
        self.output = output
        return self.harness.agent_error(exit_code, output)


@dataclass
class Live:
    """Runs rollouts. `options` of `run` are those of [model], [proxy] and [sandbox] that a test wants otherwise."""

    renderer: Renderer
    parser: TurnParser
    nats: Any
    folder: Path
    patch: pytest.MonkeyPatch
    rootfs: str = ""
    last: Rollout | None = None  # to be looked at when its books do not balance

    def run(
        self,
        harness: HarnessConfig,
        errand: Errand,
        script: Script,
        faults: Mapping[int, Fault] | None = None,
        *,
        context_tokens: int = 400_000,
        proxy: Mapping[str, Any] | None = None,
        wall_clock_s: float = 240.0,
    ) -> Rollout:
        """One rollout of `harness` on the errand; its books are checked before it is given back."""
        config = _config(harness, context_tokens, proxy or {}, wall_clock_s, self.rootfs)
        engine = ScriptedEngine(self.renderer, script)
        watched = Watched(make_harness(harness, config.model))
        faulty: list[Faulty] = []
        self.patch.setattr(service, "serving", partial(_serving, faulty, dict(faults or {})))
        events = _Events()
        logging.getLogger("clawpipe").addHandler(events)
        logging.getLogger("clawpipe").setLevel(logging.INFO)
        try:
            records, manifest = anyio.run(self._roll, config, engine, watched, errand)
        finally:
            logging.getLogger("clawpipe").removeHandler(events)
        rollout = _rollout(records, manifest, engine, faulty[0].seen, events.found, watched.output)
        self.last = rollout
        check_books(rollout)
        return rollout

    async def _roll(
        self, config: Config, engine: ScriptedEngine, watched: Watched, errand: Errand
    ) -> tuple[list[CallRecord], RolloutManifest]:
        path = self.folder / "proxy.sock"
        request = RolloutRequest(rollout_id="live", group_id="g", task_id="live/0", harness=config.harness[0].name)
        log = EventLog("proxy")
        async with Broker.connect(self.nats.url, self.nats.token) as broker:
            await broker.setup(512 * MIB)
            with listening(path) as server:
                async with anyio.create_task_group() as group:
                    group.start_soon(service.serve, config, server, broker, engine, self.renderer, self.parser, log)
                    await broker.publish_request(request)
                    act = partial(trio.run, _act, config, watched, errand.task(), path, self.folder)
                    await anyio.to_thread.run_sync(act)
                    group.cancel_scope.cancel()
            return await _read_back(broker)


async def _read_back(broker: Broker) -> tuple[list[CallRecord], RolloutManifest]:
    """All that the broker holds of the only rollout, the manifest last."""
    left = await broker.last_records_sequence()
    found: list[CallRecord] = []
    with anyio.fail_after(20):
        async for sequence, record in broker.records():
            if isinstance(record, RolloutManifest):
                assert sequence == left, "the manifest is not the last record"
                return found, record
            found.append(record)
    raise AssertionError("the stream ended")


async def _act(config: Config, watched: Watched, task: Task, path: Path, folder: Path) -> None:
    """What the role `actor` does for one slot and one rollout."""
    await trio.to_thread.run_sync(mcp.prepare, mcp.of(config.harness[0]))
    async with Supervisor.open(config.sandbox, "live", folder / "sandboxes") as host:
        workshop = Workshop(
            host=host,
            tasks={task.task_id: task},
            harnesses={watched.name: watched},
            sandbox=config.sandbox,
            verify=config.verify,
            store=folder / "workspaces",
            log=EventLog("actor"),
        )
        async with connect(path) as slot:
            assigned = await slot.ask(link.Take(), link.Assigned)
            await run_rollout(slot, assigned, workshop)


def _config(
    harness: HarnessConfig, context_tokens: int, proxy: Mapping[str, Any], wall_clock_s: float, rootfs: str
) -> Config:
    return Config(
        model=ModelConfig(tiny=TinyModelConfig(), context_tokens=context_tokens, reasoning_parser="qwen3"),
        harness=(harness,),
        tasks=(FilingTasksConfig(),),
        proxy=ProxyConfig(**{"settle_timeout_s": 3.0, **proxy}),
        verify=VerifyConfig(timeout_s=30.0),
        sandbox=SandboxConfig(
            rootfs=rootfs,
            slots=1,
            wall_clock_s=wall_clock_s,
            memory_bytes=3072 * MIB,
            cpus=2.0,
            max_processes=512,
            scratch_bytes=512 * MIB,
            workspace_bytes=256 * MIB,
            first_uid=320_000,
        ),
    )


def _serving(faulty: list[Faulty], faults: dict[int, Fault], app: Any) -> Any:
    faulty.append(Faulty(app, faults))
    return listen.serving(faulty[0])


class _Events(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.getMessage(), getattr(record, "fields", {})))


def _rollout(
    records: Sequence[CallRecord],
    manifest: RolloutManifest,
    engine: ScriptedEngine,
    seen: list[Seen],
    events: list[tuple[str, dict[str, Any]]],
    output: bytes,
) -> Rollout:
    ordered = sorted(records, key=lambda record: record.index)
    closed = assembler.close(manifest, ordered, LEAF_CAP)
    built = tree.build(tree.resolve(ordered)) if ordered else None
    return Rollout(manifest, ordered, closed, built, engine, seen, events, output)


def check_books(rollout: Rollout) -> None:
    """What holds for every rollout, whatever happened in it."""
    said = {each.call_id: each for each in rollout.engine.said}
    assert len(said) == len(rollout.engine.said), "a call was sampled twice"
    listed = sorted(entry.call_id for entry in rollout.manifest.calls)
    assert listed == sorted(record.call_id for record in rollout.records) == sorted(said)
    assert all(record.role is said[record.call_id].role for record in rollout.records)
    if rollout.tree is not None:
        for placed in rollout.tree.calls:
            _check_call(rollout, placed, said[placed.call.call_id])
    for fate in rollout.closed.fates:
        assert fate.sampled == len(said[fate.call_id].sampled.ids)
        assert fate.sampled == fate.kept + sum(fate.dropped.values())
    _check_trained(rollout)


def _check_call(rollout: Rollout, placed: tree.Placed, said: Said) -> None:
    """The record spells the engine's own prompt and sample, number by number."""
    assert rollout.tree is not None
    np.testing.assert_array_equal(rollout.tree.spell(placed.prompt_node), said.prompt)
    np.testing.assert_array_equal(placed.call.completion, said.sampled.ids)
    np.testing.assert_array_equal(placed.call.logprobs, said.sampled.logprobs)
    np.testing.assert_array_equal(placed.call.versions, versions(said))


def _check_trained(rollout: Rollout) -> None:
    """Every trained token is one that the engine sampled at that very place, with its logprob and version; as many
    of each call as its fate says."""
    origin = {
        _key(logprob): (said, n) for said in rollout.engine.said for n, logprob in enumerate(said.sampled.logprobs)
    }
    kept: Counter[str] = Counter()
    for path in rollout.paths:
        for entry, logprob, version in zip(path.entries, path.logprobs, path.versions, strict=True):
            said, n = origin[_key(logprob)]
            whole = np.concatenate((said.prompt, said.sampled.ids[: n + 1]))
            assert entry == len(said.prompt) + n
            assert np.array_equal(path.tokens[: entry + 1], whole)
            assert version == versions(said)[n]
            kept[said.call_id] += 1
    assert kept == Counter({fate.call_id: fate.kept for fate in rollout.closed.fates if fate.kept})


def _key(logprob: np.float32) -> bytes:
    return np.float32(logprob).tobytes()


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


def is_chain(rollout: Rollout) -> bool:
    """Whether every main prompt begins with all of the main call before it: nothing was encoded anew."""
    return all(extends(one, other) for one, other in pairwise(rollout.main)) and not rollout.broken


def check_one_branch(rollout: Rollout) -> None:
    """The main conversation is one branch, every sampled token of it is trained, and nothing else is."""
    assert is_chain(rollout), table(rollout)
    assert len(rollout.paths) == 1
    assert rollout.closed.num_kept == sum(len(said.sampled.ids) for said in rollout.main)
    assert all(reason.startswith("auxiliary_") for reason in rollout.dropped), rollout.dropped
