"""The role `pipeline`: one task group that carries records, requests and the learner's messages to the flow.

Everything that decides is in `flow` and `restart`; here are the clock, NATS, the ledger file and the order of
beginning and end. Any task that fails brings the process down; the launcher starts it again and `restart`
takes the run up.
"""

from __future__ import annotations

import errno
import json
import signal
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from clawpipe.pipeline import report, restart
from clawpipe.pipeline.answers import Answers
from clawpipe.pipeline.books import Changes, Standing
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import BrokerError, ConfigError
from clawpipe.pipeline.flow import Flow
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile, NoRoomError, Stored
from clawpipe.pipeline.letters import Letters
from clawpipe.pipeline.observe import EventLog, write_json
from clawpipe.pipeline.pacing import LoopLag, Signal, StreamClock
from clawpipe.pipeline.records import (
    AskCursor,
    LearnerMessage,
    LearnerReply,
    PushReport,
    RolloutRequest,
    StreamCursor,
)
from clawpipe.pipeline.runtime import Runtime

AUDIT_INTERVAL_S = 60.0
LAST_AUDIT_S = 10.0
LAG_WARNING_S = 1.0
FULL_DISK_PAUSE_S = 2.0


def main(config: Config, runtime: Runtime) -> None:
    """Runs until the updates are done or the run is drained. Raises ClawpipeError for what a user can act on."""
    anyio.run(serve, config, runtime, EventLog("pipeline"), backend_options={"use_uvloop": True})


async def serve(config: Config, runtime: Runtime, log: EventLog, audit_interval_s: float = AUDIT_INTERVAL_S) -> None:
    """The role on a running event loop. Writes status.json, and summary.json at the end."""
    runtime.path("summary.json").unlink(missing_ok=True)  # of a service before this one: it is behind the ledger now
    ledger_file = LedgerFile(runtime.path("ledger.sqlite"))
    try:
        async with Broker.of_run(runtime, config.nats, log) as broker:
            ledger = Ledger()
            tasks = read_tasks(runtime.path("tasks.json"))
            stored = ledger_file.read()
            flow = Flow(config, tasks, ledger, log, uuid.uuid4().hex[:8], restart.decided_caps(stored))
            service = Service(broker, config, runtime, flow, ledger_file, stored, log, audit_interval_s)
            await service.run()
    finally:
        ledger_file.close()


def read_tasks(path: Path) -> tuple[str, ...]:
    """The task ids that the launcher wrote. ConfigError when there are none."""
    try:
        tasks = tuple(json.loads(path.read_bytes()))
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path}: no list of tasks ({err}); start the run with `clawpipe up`") from err
    if not tasks:
        raise ConfigError(f"{path}: the list of tasks is empty; check the [[tasks]] tables")
    return tasks


class Service:
    """One run of the role. `run` is the table of contents."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        runtime: Runtime,
        flow: Flow,
        ledger_file: LedgerFile,
        stored: Stored,
        log: EventLog,
        audit_interval_s: float,
    ) -> None:
        self._broker = broker
        self._config = config
        self._runtime = runtime
        self._flow = flow
        self._file = ledger_file
        self._stored = stored
        self._log = log
        self._audit_interval_s = audit_interval_s
        self._clock = StreamClock()
        self._changed = Signal()
        self._pushes: list[PushReport] = []
        self._writing = anyio.Lock()
        self._unwritten: list[Changes] = []  # at most one, and one more where writing was cancelled on a full disk
        self._anchored = anyio.Event()  # it is known where to read from
        self._ready = anyio.Event()  # all that an earlier process had read is read
        self._letters = Letters(broker, flow.dead_letters)
        self._answers = Answers(flow, self._changed, flush=self._flush, purge=self._purge)
        self._lag = LoopLag()
        self._start = StreamCursor()
        self._anchor: restart.Anchor | None = None
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """From the first record to the summary."""
        if self._stored.empty and not self._runtime.resume:
            await self._begin_anew()
        elif self._is_trained():
            await self._take_up(AskCursor())
            self._answers.suppose_told()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signal, tasks.cancel_scope)
            tasks.start_soon(self._read_records)
            tasks.start_soon(self._schedule)
            tasks.start_soon(self._broker.serve_learner, self._answer)
            tasks.start_soon(self._read_pushes)
            tasks.start_soon(self._audit)
            tasks.start_soon(self._publish_status)
            tasks.start_soon(self._watch_drain)
            tasks.start_soon(self._lag.watch)
            await self._farewell()
            tasks.cancel_scope.cancel()
        await self._close()

    def _is_trained(self) -> bool:
        """Whether a checkpoint with all updates has been told: the learner may have ended, and nobody would ask."""
        standing = self._stored.standing
        return standing is not None and standing.updates >= self._flow.limits.updates

    async def _begin_anew(self) -> None:
        """A run's first start. From here on the ledger file is not empty, so a crash leads to `restart`."""
        if await self._broker.last_records_sequence() or await self._broker.pending_requests():
            raise BrokerError(
                f"the streams of [nats] prefix {self._config.nats.prefix!r} hold another run's records; "
                "resume that run in its own folder, or give this one another prefix"
            )
        self._flow.ledger.stands(Standing())
        await self._flush()
        self._anchored.set()

    # Tasks ------------------------------------------------------------------------------------------------

    async def _read_records(self) -> None:
        """Stream -> flow. Stops pulling while the replay queue is full."""
        await self._anchored.wait()
        pending, last = await self._what_there_is()
        if self._anchor is None or last < max(1, self._start.sequence):  # sequences count from 1
            await self._caught_up(pending)
        async for entry in self._broker.records(self._start.sequence):
            closed = self._flow.record(entry, self._clock.now())
            await self._letters.publish()
            if not self._ready.is_set() and entry.sequence >= last:
                await self._caught_up(pending)
            if closed:
                self._changed.fire()
                await anyio.lowlevel.checkpoint()  # closing is the costly part: others come between two of them
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        if not self._ready.is_set() or not self._flow.full:
            return
        self._log.info("replay queue full", groups=self._flow.replay.num_groups)
        with self._clock.stopped():
            while self._flow.full:
                await self._changed.wait(1.0)

    async def _what_there_is(self) -> tuple[tuple[RolloutRequest, ...], int]:
        """Requests in the work queue, then the last record: what is in neither will never come."""
        pending = await self._broker.pending_requests()
        last = await self._broker.last_records_sequence()
        there = await self._broker.has_records(self._start.sequence)
        return pending, last if there else 0

    async def _caught_up(self, pending: tuple[RolloutRequest, ...]) -> None:
        if self._anchor is not None:
            await self._rejoin(self._anchor, pending)
            self._log.info(
                "run taken up",
                updates=self._flow.updates,
                in_flight=len(self._flow.scheduler.in_flight),
                queued_groups=self._flow.replay.num_groups,
            )
        await self._flush()
        self._ready.set()
        self._changed.fire()

    async def _rejoin(self, anchor: restart.Anchor, pending: tuple[RolloutRequest, ...]) -> None:
        """Batches are built in a worker thread; until it is done nothing but this task touches the flow."""
        flow, stored = self._flow, self._stored
        restart.rejoin(flow, stored, anchor, pending)
        for batch in restart.claims(stored, anchor):
            if groups := restart.groups_of(flow, batch):
                build = partial(flow.recipe.build, batch.batch_id, batch.version, groups)
                restart.claim(flow, stored, batch, await anyio.to_thread.run_sync(build))
        restart.finish(flow)

    async def _schedule(self) -> None:
        """Flow -> work queue."""
        await self._ready.wait()
        while True:
            for request in self._flow.requests(time.time()):
                if self._flow.draining:
                    self._flow.scheduler.withdraw(request.rollout_id)
                    continue
                await self._broker.publish_request(request)
                self._flow.requested(request)
            await self._changed.wait(1.0)

    async def _read_pushes(self) -> None:
        async for push in self._broker.pushes():
            self._pushes.append(push)

    async def _publish_status(self) -> None:
        """The tick: deadlines, conservation, ledger file, status file."""
        while True:
            if self._ready.is_set():
                self._flow.tick(self._clock.now())
                self._changed.fire()
                await self._letters.publish()
            await self._flush()
            await self._write_status()
            await anyio.sleep(self._config.observe.status_interval_s)

    async def _write_status(self) -> None:
        try:
            write_json(self._runtime.path("status.json"), await self._status())
        except OSError as err:
            if err.errno != errno.ENOSPC:
                raise
            self._log.warning("no room on the disk for the status", detail=str(err))  # the next one comes soon

    async def _audit(self) -> None:
        """Looks for rollouts that vanished: acknowledged, or gone from the work queue, without a manifest."""
        await self._ready.wait()
        while True:
            await anyio.sleep(self._audit_interval_s)
            await self._find_lost()

    async def _find_lost(self) -> None:
        before = set(self._flow.ledger.in_flight)
        pending, last = await self._what_there_is()
        while self._flow.spans.position < last:
            await self._changed.wait(1.0)
        gone = before - {request.rollout_id for request in pending}
        for rollout_id in sorted(gone & set(self._flow.ledger.in_flight)):
            self._flow.lost(rollout_id)
        self._changed.fire()

    async def _watch_drain(self) -> None:
        """No new rollouts; those in flight are awaited, those that nobody has taken are taken back."""
        await self._broker.drained()
        self._flow.draining = True
        self._log.info("draining", in_flight=len(self._flow.scheduler.in_flight))
        for request in await self._broker.withdraw_requests():
            self._flow.withdrawn(request)
        with anyio.move_on_after(self._config.run.drain_timeout_s):
            await self._ready.wait()
            while self._flow.scheduler.in_flight:
                await self._changed.wait(1.0)
        self._answers.no_more()
        self._changed.fire()

    async def _stop_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self._log.info("stopping", signal=number.name)
                scope.cancel()
                return

    # The learner ------------------------------------------------------------------------------------------

    async def _answer(self, message: LearnerMessage) -> LearnerReply:
        self._answers.heard()
        if not self._anchored.is_set():
            await self._take_up(message)
        await self._ready.wait()
        await self._letters.publish()  # a cursor must not lie above a record that is not set aside yet
        return await self._answers.reply(message)

    async def _take_up(self, message: LearnerMessage) -> None:
        self._anchor = restart.anchor(message, self._stored)
        self._start = self._anchor.cursor
        restart.prepare(self._flow, self._stored, self._anchor, await self._letters.read())
        self._anchored.set()

    async def _purge(self, below: int) -> None:
        await self._broker.purge_records(below, self._config.nats.keep_records_bytes)

    # The end ----------------------------------------------------------------------------------------------

    async def _farewell(self) -> None:
        """Waits until the learner knows that it is over, and for its last checkpoint."""
        while not self._answers.is_over(self._config.run.drain_timeout_s):
            await self._changed.wait(0.2)
        if self._ready.is_set():
            with anyio.move_on_after(LAST_AUDIT_S):
                await self._find_lost()

    async def _close(self) -> None:
        if not self._anchored.is_set():
            self._flow.ledger.restore(self._stored.rows, (), self._stored.updates)
        if self._flow.finished and self._ready.is_set():
            self._flow.close()
        with anyio.CancelScope(shield=True), anyio.move_on_after(30):
            await self._flush()
            write_json(self._runtime.path("summary.json"), self.summary())
            write_json(self._runtime.path("status.json"), await self._status() | {"phase": "ended"})
            self._log.info("pipeline ended", updates=self._flow.updates)

    def summary(self) -> dict[str, Any]:
        """What the run measured so far."""
        found = report.summary(self._flow.ledger, self._pushes, time.monotonic() - self._began_s)
        return found | {"max_staleness": self._flow.max_staleness}

    async def _status(self) -> dict[str, Any]:
        flow = self._flow
        held = {
            "in_flight": len(flow.scheduler.in_flight),
            "open_groups": len(flow.scheduler.open_groups),
            "queued_groups": flow.replay.num_groups,
            "queued_tokens": flow.replay.num_tokens,
            "credits": flow.admission.held,
            "uncommitted_batches": flow.batches.uncommitted,
        }
        found = report.status(flow.ledger, phase=self._phase(), updates_total=flow.limits.updates, held=held)
        return found | {
            "max_staleness": flow.max_staleness,
            "dead_letters": await self._letters.status(),
            "loop_lag_s": self._loop_lag_s(),
        }

    def _loop_lag_s(self) -> float:
        lag_s = self._lag.take()
        if lag_s > LAG_WARNING_S:
            self._log.warning(
                "event loop was blocked", seconds=round(lag_s, 3), detail="is the machine short of processor time?"
            )
        return lag_s

    def _phase(self) -> str:
        if not self._ready.is_set():
            return "waiting for the learner" if not self._anchored.is_set() else "reading records again"
        if self._answers.told:
            return "finishing"
        return "draining" if self._flow.draining else "running"

    async def _flush(self) -> None:
        """Hands the ledger's changes to the file, in a worker thread, in their order; waits while the disk is full.

        Not while records are read again: what an earlier process wrote is whole, and must stay so till then.
        """
        if self._flow.catching_up:
            return
        async with self._writing:
            self._unwritten.append(self._flow.ledger.changes())
            while self._unwritten:
                try:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(self._file.write, self._unwritten[0])
                except NoRoomError as err:
                    self._log.warning("waiting for room on the disk", detail=str(err))
                    await anyio.sleep(FULL_DISK_PAUSE_S)
                else:
                    del self._unwritten[0]
