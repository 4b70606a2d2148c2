"""Records takes: the real harness in the real sandbox, the real proxy, and a script in place of the engine.

A run in miniature, with a NATS server, a proxy in this process and the role `actor` as a child. Its folder is a
temporary one that is removed: the records hold the harnesses' prompts. The proxy works on a tokenizer that knows none
of them (`syllables`) and gives back the exact text. A harness is told the same context window as later, since what it
says may depend on that; what it is told of its usage stays below the point at which it would compact.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.scripted import ScriptedSampler
from clawpipe.actors.proxy.service import load_model, serve
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.recording.takes import Take
from clawpipe.actors.sandbox.identity import is_dead, new_identity
from clawpipe.actors.tasks.filing import CHECK, as_row
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import nats_server
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.assembler import Assembler, Rollout
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import ClawGymTasksConfig, Config, HarnessConfig, NatsConfig
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.launch import console_entry
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.models import syllables_dir
from clawpipe.pipeline.observe import EventLog, Progress
from clawpipe.pipeline.processes import start
from clawpipe.pipeline.records import CallRecord, Outcome, RolloutRequest
from clawpipe.pipeline.runtime import Runtime

CONTEXT_TOKENS = 1_000_000  # of the proxy: it refuses nothing
MAX_COMPLETION_TOKENS = 10_000
MAX_SLOTS = 3
LEAF_CAP = 16
STORE_BYTES = 512 * 1024**2
NATS_START_TIMEOUT_S = 30.0
STILL_S = 60.0  # on top of the wall clock of all takes: starting, grading, settling
SOURCE = "takes"  # of the tasks
FOLDER = "clawpipe-recording"


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A take and what became of it; `calls` are all of its calls, by order of arrival."""

    take: Take
    rollout: Rollout
    calls: tuple[CallRecord, ...]
    tries: int = 1  # how often the take was run until it was this

    @property
    def outcome(self) -> Outcome:
        """How its run ended."""
        return self.rollout.manifest.outcome


async def record(
    config: Config, runtime: Runtime, takes: Sequence[Take], progress: Progress
) -> tuple[Renderer, list[Recording]]:
    """All takes, and the renderer that reads their tokens. ClawpipeError when they cannot be run."""
    with _stage(config, runtime, takes) as stage:
        renderer, parser = await load_model(stage.config.model, syllables_dir(Path(runtime.demos_path)))
        scripts = {take.name: take.script for take in takes}
        sampler = ScriptedSampler(renderer, scripts)
        with listening(stage.runtime.proxy_socket) as server:
            async with _broker(stage) as broker, anyio.create_task_group() as group:
                log = EventLog("demos")
                group.start_soon(serve, stage.config, server, broker, sampler, renderer, parser, log)
                group.start_soon(_act, stage)
                for take in takes:
                    await broker.publish_request(_request(take))
                found = await _collect(broker, takes, _patience_s(stage.config, len(takes)), progress)
                await broker.request_drain()  # proxy and actor end by themselves
        return renderer, found


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The run in miniature: its configuration and its folder."""

    config: Config  # of the proxy
    runtime: Runtime
    nats: nats_server.NatsServer
    owner: str  # of its processes: they belong to the run that wants the demonstrations
    actor_log: Path  # stays when the folder goes: it holds no prompts


@contextmanager
def _stage(config: Config, runtime: Runtime, takes: Sequence[Take]) -> Iterator[_Stage]:
    _sweep()
    # A short path: sockets below it have names of 107 bytes at most.
    folder = Path(tempfile.gettempdir(), f"{FOLDER}-{new_identity()}")
    folder.mkdir(mode=0o700)
    try:
        tasks = folder / "tasks.jsonl"
        tasks.write_bytes(_rows(takes))
        shown = _config(config, [take.harness for take in takes], tasks)
        nats = nats_server.prepare(folder, port=0, token="", max_store_bytes=STORE_BYTES)
        own = Runtime(run_id=f"{runtime.run_id}-demos", run_dir=str(folder), nats_url=nats.url, nats_token=nats.token)
        (folder / "config.json").write_bytes(configuration.dump(shown))
        runtimes.save(own)
        model = msgspec.structs.replace(shown.model, context_tokens=CONTEXT_TOKENS)
        yield _Stage(
            config=msgspec.structs.replace(shown, model=model),
            runtime=own,
            nats=nats,
            owner=f"{runtime.run_id}/demos",
            actor_log=runtime.path("logs", "demos-actor.log"),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Takes away what recordings left that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}-*"):
        if is_dead(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _config(config: Config, harnesses: Sequence[HarnessConfig], tasks: Path) -> Config:
    """The run's configuration with the takes as tasks, as the sandboxes' side of the run has it."""
    replace = msgspec.structs.replace
    named = {entry.name: entry for entry in harnesses}
    return replace(
        config,
        model=replace(config.model, tool_parser="hermes", reasoning_parser=""),
        harness=tuple(named.values()),
        tasks=(ClawGymTasksConfig(path=str(tasks), name=SOURCE),),
        nats=NatsConfig(),
        sandbox=replace(config.sandbox, slots=min(config.sandbox.slots, MAX_SLOTS)),
        # A script would break the same call again and again.
        proxy=replace(config.proxy, max_completion_tokens=MAX_COMPLETION_TOKENS, on_malformed_tool_call="text"),
    )


def _rows(takes: Sequence[Take]) -> bytes:
    check = CHECK.read_text(encoding="utf-8")
    rows = [msgspec.structs.replace(as_row(take.errand, check), task_id=take.name) for take in takes]
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _request(take: Take) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=take.name, group_id=take.name, task_id=f"{SOURCE}/{take.name}", harness=take.harness.name
    )


@asynccontextmanager
async def _broker(stage: _Stage) -> AsyncIterator[Broker]:
    """A NATS server of our own, and a connection to it."""
    log = stage.runtime.path("nats.log")
    async with start(stage.nats.argv, log=log, owner=f"{stage.owner}/nats", name="nats"):
        if not await nats_server.answers(stage.nats.url, NATS_START_TIMEOUT_S):
            raise ClawpipeError(f"nats-server did not start: {_end_of(log)}")
        async with Broker.of_run(stage.runtime, stage.config.nats) as broker:
            await broker.setup(STORE_BYTES)
            yield broker


async def _act(stage: _Stage) -> None:
    """The role `actor`, until the run drains."""
    argv = [console_entry(), "run", "actor", "--run-dir", stage.runtime.run_dir]
    async with start(argv, log=stage.actor_log, owner=f"{stage.owner}/actor", name="actor") as child:
        code = await child.wait()
    if code:
        raise ClawpipeError(f"the sandboxes of the demonstrations ended with code {code}: {_end_of(stage.actor_log)}")


async def _collect(broker: Broker, takes: Sequence[Take], patience_s: float, progress: Progress) -> list[Recording]:
    """Every take with its calls, in the order of `takes`. ClawpipeError when they take too long."""
    assembler = Assembler(close_timeout_s=patience_s, leaf_caps=LeafCaps(LEAF_CAP), auxiliary=False)
    calls: dict[str, list[CallRecord]] = {take.name: [] for take in takes}
    closed: dict[str, Rollout] = {}
    progress.at(0, f"0 of {len(takes)} runs", len(takes))
    with anyio.move_on_after(patience_s):
        async for entry in broker.records():
            assert entry.record is not None, f"a record of {entry.rollout_id} cannot be read: {entry.detail}"
            if isinstance(entry.record, CallRecord):
                calls[entry.rollout_id].append(entry.record)
            rollout = assembler.add(entry.record, anyio.current_time()).rollout
            if rollout is not None:
                closed[rollout.rollout_id] = rollout
                progress.at(len(closed), f"{len(closed)} of {len(takes)} runs", len(takes))
            if len(closed) == len(takes):
                break
    late = [take.name for take in takes if take.name not in closed]
    if late:
        raise ClawpipeError(
            f"demonstrations: {len(late)} of {len(takes)} runs did not end within {patience_s:.0f} s, {late[0]} for "
            "one; raise wall_clock_s of [sandbox], or end other programs"
        )
    return [
        Recording(
            take=take,
            rollout=closed[take.name],
            calls=tuple(sorted(calls[take.name], key=lambda call: (call.attempt, call.index))),
        )
        for take in takes
    ]


def _patience_s(config: Config, num_takes: int) -> float:
    rounds = -(-num_takes // config.sandbox.slots)
    return STILL_S + rounds * (config.sandbox.wall_clock_s + config.verify.timeout_s)


def _end_of(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote nothing"
    return f"{lines[-1] if lines else 'it wrote nothing'} (see {log})"
