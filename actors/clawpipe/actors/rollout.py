"""One rollout, from the request to its outcome: sandbox, harness, settling, collecting, grading.

The order is what makes a rollout trustworthy: the harness and all that it started are dead before the list of
its calls is fixed, that list is fixed before the workspace is collected, and grading sees the collected copy in
a sandbox of its own. A failure of ours is an outcome too (`Infra`, `VerifierInfra`); only a lost link is an
exception, since then there is nobody to tell.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from clawpipe.actors import link
from clawpipe.actors.harness.base import Harness, Launch
from clawpipe.actors.proxy_link import ProxyLink
from clawpipe.actors.sandbox.collect import Snapshot, WorkspaceRefused, dump_snapshot
from clawpipe.actors.sandbox.process import Exit, Reason
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import Task
from clawpipe.actors.verify.code import GradeFailed, grade
from clawpipe.pipeline.config import SandboxConfig, VerifyConfig
from clawpipe.pipeline.errors import SandboxError, TaskError, one_line
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import AgentFailed, Infra, Outcome, Scored, TimedOut, VerifierInfra

MAX_MESSAGE_CHARS = 2000
MAX_CHECKS_CHARS = 32 * 1024  # their names; an outcome must fit into one packet


@dataclass(frozen=True, slots=True)
class Workshop:
    """What every rollout of this host uses."""

    host: Supervisor
    tasks: Mapping[str, Task]
    harnesses: Mapping[str, Harness]
    sandbox: SandboxConfig
    verify: VerifyConfig
    store: Path  # where workspaces are kept that could not be graded
    log: EventLog


@dataclass(frozen=True, slots=True)
class Ended:
    """What a harness left behind. `workspace` None: refused by the collector, for the reason in `refused`.

    `shortage` says that the memory did not suffice; empty when it did.
    """

    exit: Exit
    num_calls: int
    ends_aborted: bool  # the newest call ended in an error of ours
    workspace: Snapshot | None
    refused: str = ""
    shortage: str = ""


async def run_rollout(proxy: ProxyLink, assigned: link.Assigned, workshop: Workshop) -> Outcome:
    """Runs what was assigned and tells the proxy how it ended. LinkLost."""
    request = assigned.request
    started_s = time.time()
    try:
        outcome = await _outcome(proxy, assigned, workshop)
    except SandboxError as err:
        outcome = _infra("sandbox", one_line(err))
    except TaskError as err:
        outcome = _infra("task", one_line(err))
    message = link.Close(rollout_id=request.rollout_id, outcome=outcome, started_s=started_s, ended_s=time.time())
    await proxy.ask(message, link.Closed)
    return outcome


async def _outcome(proxy: ProxyLink, assigned: link.Assigned, workshop: Workshop) -> Outcome:
    task, harness = _chosen(assigned, workshop)
    ended = await _run_harness(proxy, assigned, harness, harness.launch(task), task, workshop)
    error = None if ended.exit.code is None else harness.agent_error(ended.exit.code, ended.exit.output)
    _report(assigned, ended, error, workshop.log)
    lost = _lost_to_us(ended, error)
    if lost is not None:
        return lost
    if ended.workspace is None:
        return AgentFailed(reward=0.0, message=_with_shortage(ended, ended.refused))
    verdict = await proxy.guard(partial(grade, workshop.host, task, ended.workspace, workshop.verify))
    if isinstance(verdict, GradeFailed):
        path = await trio.to_thread.run_sync(_keep, workshop.store, assigned, ended.workspace)
        return VerifierInfra(message=verdict.message[:MAX_MESSAGE_CHARS], workspace=str(path))
    return _graded(ended, error, verdict.reward, verdict.checks)


def _chosen(assigned: link.Assigned, workshop: Workshop) -> tuple[Task, Harness]:
    request = assigned.request
    if request.task_id not in workshop.tasks:
        raise TaskError(f"the task {request.task_id} is not in this host's [[tasks]]; give all hosts the same tasks")
    if request.harness not in workshop.harnesses:
        raise TaskError(f"the harness {request.harness} is not in this host's [[harness]]; give all hosts the same")
    return workshop.tasks[request.task_id], workshop.harnesses[request.harness]


async def _run_harness(
    proxy: ProxyLink, assigned: link.Assigned, harness: Harness, launch: Launch, task: Task, workshop: Workshop
) -> Ended:
    """The harness's life in its sandbox, which is gone when this returns."""
    rollout_id = assigned.request.rollout_id
    name = f"{rollout_id}.a{assigned.attempt}"
    async with workshop.host.sandbox(
        task.files, name=name, port=launch.port, binds=launch.binds, home_files=launch.home_files
    ) as box:
        assert box.listener is not None
        opening = link.Open(rollout_id=rollout_id, harness=harness.name)
        await proxy.ask(opening, link.Opened, listener=box.listener)
        box.listener.close()  # the proxy's now: when it closes its own, connections are refused
        run = partial(box.run, launch.argv, launch.env, wall_clock_s=workshop.sandbox.wall_clock_s)
        exit = await proxy.guard(run)
        settled = await proxy.ask(link.Settle(rollout_id=rollout_id), link.Settled)
        try:
            workspace, refused = await box.collect(), ""
        except WorkspaceRefused as err:
            workspace, refused = None, str(err)
    shortage = _shortage(exit, workshop.sandbox.memory_bytes)
    return Ended(exit, settled.num_calls, settled.ends_aborted, workspace, refused, shortage)


def _shortage(exit: Exit, memory_bytes: int) -> str:
    if not exit.oom_kills:
        return ""
    ended = f"{exit.oom_kills} process{'es were' if exit.oom_kills > 1 else ' was'} ended"
    return f"the sandbox ran out of memory ({ended} at memory_bytes = {memory_bytes}); raise [sandbox] memory_bytes"


def _with_shortage(ended: Ended, message: str) -> str:
    """The message, behind what most likely brought it about: it may be long, and is cut at its end."""
    return f"{ended.shortage}; {message}" if ended.shortage else message


def _lost_to_us(ended: Ended, error: str | None) -> Infra | None:
    """What the policy is not to blame for: a harness without a single call, or one that failed for want of the next.

    A failure that the harness got over is no reason: leaving those out would leave the long rollouts out.
    """
    end = ended.exit.output.decode("utf-8", "replace")[-500:]
    if ended.num_calls == 0:
        return _infra("harness", f"{_how(ended, error)} without a single finished model call: {end}")
    if ended.ends_aborted and (error is not None or ended.exit.reason is not Reason.EXITED):
        return _infra("engine", f"{_how(ended, error)} when its last model call had failed: {end}")
    return None


def _how(ended: Ended, error: str | None) -> str:
    exit = ended.exit
    if exit.reason is Reason.EXITED:
        return _with_shortage(ended, f"the harness ended with {exit.code}" + (f" ({error})" if error else ""))
    return _with_shortage(ended, f"the harness was ended ({exit.reason}) after {exit.wall_s:.0f} s")


def _graded(ended: Ended, error: str | None, reward: float, checks: Mapping[str, float]) -> Outcome:
    exit = ended.exit
    kept = dict(checks) if sum(map(len, checks)) <= MAX_CHECKS_CHARS else {}
    if exit.reason is Reason.WALL_CLOCK:
        return TimedOut(reward=reward, checks=kept)
    if exit.reason is Reason.OUTPUT:
        error = f"the harness wrote more than {exit.output_bytes} bytes of output"
    if error is not None:
        return AgentFailed(reward=reward, message=_with_shortage(ended, error)[:MAX_MESSAGE_CHARS], checks=kept)
    return Scored(reward=reward, checks=kept)


def _infra(boundary: str, message: str) -> Infra:
    return Infra(boundary=boundary, message=message[:MAX_MESSAGE_CHARS])


def _keep(store: Path, assigned: link.Assigned, workspace: Snapshot) -> Path:
    """Stores the workspace so that it can be graded again (`collect.restore_snapshot`)."""
    store.mkdir(parents=True, exist_ok=True)
    path = store / f"{assigned.request.rollout_id.replace('/', '_')}.a{assigned.attempt}.msgpack"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(dump_snapshot(workspace))
    temporary.replace(path)
    return path


def _report(assigned: link.Assigned, ended: Ended, error: str | None, log: EventLog) -> None:
    log.info(
        "harness ended",
        rollout=assigned.request.rollout_id,
        attempt=assigned.attempt,
        reason=str(ended.exit.reason),
        code=ended.exit.code,
        error=error,
        wall_s=round(ended.exit.wall_s, 3),
        calls=ended.num_calls,
        peak_memory_bytes=ended.exit.peak_memory_bytes,
        oom_kills=ended.exit.oom_kills,
        skipped=0 if ended.workspace is None else len(ended.workspace.skipped),
        refused=ended.refused or None,
    )
