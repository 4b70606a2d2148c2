"""`clawpipe up`: prepares the run folder, starts what is not external, keeps it running, ends it in order.

Every child is a role started through the console entry in a session of its own, so Ctrl-C reaches us alone:
the first one drains the run, the second one stops it at once. A child that dies is started again; the run
ends when the pipeline service and the learner have ended by themselves.
"""

from __future__ import annotations

import shutil
import signal
import sysconfig
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from clawpipe.pipeline import nats_server
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.checks import run_checks
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import BrokerError, ClawpipeError, ConfigError
from clawpipe.pipeline.models import model_folders
from clawpipe.pipeline.nats_disk import NatsDisk
from clawpipe.pipeline.processes import start, sweep
from clawpipe.pipeline.run_folder import locked, prepare
from clawpipe.pipeline.runtime import Runtime

RESTART_PAUSE_S = 1.0
ROLES_THAT_END = ("proxy", "actor", "pipeline", "learner")
MAX_RESTARTS = 5
STABLE_S = 300.0  # a role that lived this long starts with a clean record
USER_ERROR = 2  # the exit code of an error that starting again does not mend
NATS_START_TIMEOUT_S = 30.0
LEARNER_END_TIMEOUT_S = 30.0
ERROR_TAIL_BYTES = 4096


class Screen(Protocol):
    """Where the user sees what happens."""

    def say(self, line: str) -> None:
        """One line that stays."""

    async def watch(self) -> None:
        """Shows steps and status until cancelled."""


class Ended(StrEnum):
    """How a run ended."""

    IN_ORDER = "in_order"  # the updates are done, or it was drained
    STOPPED = "stopped"  # at once, by the second Ctrl-C; --resume goes on


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be run, and where."""

    config: Config
    run_dir: Path
    resume: bool = False


@dataclass
class _Run:
    """A launched run: its children's common context and the two ways in which it ends."""

    config: Config
    runtime: Runtime
    screen: Screen
    how: Ended = Ended.IN_ORDER
    stopping: bool = False
    ended: dict[str, anyio.Event] = field(default_factory=dict)

    def owner(self, role: str) -> str:
        return f"{self.runtime.run_id}/{role}"

    def log(self, role: str) -> Path:
        return self.runtime.path("logs", f"{role}.log")


async def launch(wanted: Launch, screen: Screen) -> Ended:
    """Runs to the end and says how it ended; nothing is left running.

    ClawpipeError for what the user can act on.
    """
    with locked(wanted.run_dir):
        report = await anyio.to_thread.run_sync(lambda: run_checks(wanted.config, offline=False))
        if report.problems:
            raise ConfigError("; ".join(report.problems))
        runtime = prepare(wanted.config, wanted.run_dir, report.task_ids, resume=wanted.resume)
        run = _Run(wanted.config, runtime, screen)
        await anyio.to_thread.run_sync(sweep, runtime.run_id, runtime.path("logs"))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_handle_signals, run, tasks.cancel_scope)
                tasks.start_soon(screen.watch)
                await _run_all(run)
                tasks.cancel_scope.cancel()
        finally:
            sweep(runtime.run_id, runtime.path("logs"))
            shutil.rmtree(runtime.push_dir, ignore_errors=True)
        return run.how


async def _run_all(run: _Run) -> None:
    async with anyio.create_task_group() as services:
        run.runtime = await _start_nats(run, services)
        await _setup_broker(run)
        await _start_roles(run, services)
        run.screen.say(f"running; run folder {run.runtime.run_dir}")
        await run.ended["pipeline"].wait()
        with anyio.move_on_after(LEARNER_END_TIMEOUT_S):
            await run.ended["learner"].wait()
        run.stopping = True
        services.cancel_scope.cancel()


async def _start_roles(run: _Run, services: anyio.abc.TaskGroup) -> None:
    """Makes what is missing of the model; everything that can start without it starts beside the making.

    Engines start from the model's first weights and get the learner's by a push, so they need no cold start.
    """
    missing = model_folders(run.config).missing()
    for role in ("syllables", "demos", "model"):
        if role in missing:
            await _run_once(run, role)
    for role in ("engine", "proxy", "actor", "pipeline"):
        _keep(run, services, role)
    if "coldstart" in missing:
        await _run_once(run, "coldstart")
    _keep(run, services, "learner")


async def _start_nats(run: _Run, services: anyio.abc.TaskGroup) -> Runtime:
    if run.config.nats.url:
        return run.runtime
    server = nats_server.prepare(
        Path(run.runtime.run_dir),
        port=run.config.nats.port,
        token=run.runtime.nats_token,
        max_store_bytes=run.config.nats.max_store_bytes,
    )
    runtime = msgspec.structs.replace(run.runtime, nats_url=server.url, nats_token=server.token)
    runtimes.save(runtime)
    run.runtime = runtime
    disk = NatsDisk(Path(run.runtime.run_dir, "nats"), run.log("nats"), run.screen.say)
    run.ended["nats"] = anyio.Event()
    services.start_soon(_keep_running, run, "nats", list(server.argv), disk)
    if not await nats_server.answers(server.url, NATS_START_TIMEOUT_S):
        raise BrokerError(f"nats-server did not start: {_last_error(run.log('nats'))}")
    return runtime


async def _setup_broker(run: _Run) -> None:
    async with _broker(run) as broker:
        await broker.setup(run.config.nats.max_store_bytes)
        await broker.clear_drain()


def _broker(run: _Run) -> AbstractAsyncContextManager[Broker]:
    return Broker.of_run(run.runtime, run.config.nats)


async def _run_once(run: _Run, role: str) -> None:
    async with start(_argv(run, role), log=run.log(role), owner=run.owner(role), name=role) as child:
        code = await child.wait()
    if code:
        raise ClawpipeError(f"{role} failed: {_last_error(run.log(role))}")


def _keep(run: _Run, services: anyio.abc.TaskGroup, role: str) -> None:
    run.ended[role] = anyio.Event()
    services.start_soon(_keep_running, run, role, _argv(run, role))


async def _keep_running(run: _Run, role: str, argv: list[str], disk: NatsDisk | None = None) -> None:
    """Starts the role again whenever it dies; some end by themselves when the run is finished or drained."""
    most = run.config.learner.max_restarts if role == "learner" else MAX_RESTARTS
    restarts = 0
    while True:
        began_s = time.monotonic()
        code = await _live(run, role, argv, disk)
        if code == 0 and role in ROLES_THAT_END:
            run.ended[role].set()
            return
        if run.stopping:
            return
        await anyio.to_thread.run_sync(sweep, run.owner(role), run.log(role))
        restarts = 1 if time.monotonic() - began_s > STABLE_S else restarts + 1
        if code == USER_ERROR or restarts > most:
            raise ClawpipeError(f"{role} cannot be kept running: {_last_error(run.log(role))}")
        run.screen.say(f"{role} ended with code {code}; starting it again ({restarts} of {most})")
        await anyio.sleep(RESTART_PAUSE_S)


async def _live(run: _Run, role: str, argv: list[str], disk: NatsDisk | None) -> int:
    """One life of a role; gives its exit code. With a `disk` it begins when there is room, and ends when it is full."""
    if disk is not None:
        await disk.await_room()
    async with (
        start(argv, log=run.log(role), owner=run.owner(role), name=role) as child,
        anyio.create_task_group() as beside,
    ):
        if disk is not None:
            beside.start_soon(disk.watch, child)
        code = await child.wait()
        beside.cancel_scope.cancel()
    return code


def _argv(run: _Run, role: str) -> list[str]:
    return [console_entry(), "run", role, "--run-dir", run.runtime.run_dir]


def console_entry() -> str:
    """Path of the installed `clawpipe` command of this Python."""
    return str(Path(sysconfig.get_path("scripts"), "clawpipe"))


async def _handle_signals(run: _Run, whole: anyio.CancelScope) -> None:
    """The second signal stops the run at once, even while NATS is still to hear of the first."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as draining:
            asked = False
            async for _ in signals:
                if asked or "learner" not in run.ended:
                    break
                asked = True
                run.screen.say("draining: rollouts in flight are finished; once more to stop at once")
                draining.start_soon(_request_drain, run)
            run.screen.say("stopping at once; --resume goes on with this run")
            run.how = Ended.STOPPED
            run.stopping = True
            whole.cancel()


async def _request_drain(run: _Run) -> None:
    async with _broker(run) as broker:
        await broker.request_drain()


def _last_error(log: Path) -> str:
    """The last line of a log that says something, and where to read on."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - ERROR_TAIL_BYTES))
            data = file.read(ERROR_TAIL_BYTES)
    except OSError:
        return f"no output; see {log}"
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].removeprefix('clawpipe: ') if lines else 'no output'} (see {log})"
