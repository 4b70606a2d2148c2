"""The proxy's side of the link to the supervisor's slots: one connection per slot, one rollout at a time on it.

Every slot's loop is Take, Open, Settle, Close (`link`). A connection that breaks in between drops its rollout and
hands the request back to the work queue, where it comes again as the next attempt.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.abc
import uvicorn

from clawpipe.actors import link
from clawpipe.actors.proxy.identity import Classify, Session
from clawpipe.actors.proxy.listen import Listener
from clawpipe.actors.proxy.slot_link import LinkBroken, SlotLink
from clawpipe.pipeline.broker import Broker, Delivery
from clawpipe.pipeline.config import ProxyConfig
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import RolloutManifest

BACKLOG = 1024
HEARTBEAT_S = 10.0  # well below the work queue's redelivery clock
HAND_BACK_S = 5.0
READY_POLL_S = 1.0


class Slots:
    """Accepts the slots of this host and serves each until it is drained or gone."""

    def __init__(
        self,
        broker: Broker,
        listeners: uvicorn.Config,
        classifiers: dict[str, Classify],
        config: ProxyConfig,
        log: EventLog,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._ready = ready
        self._listeners = listeners
        self._classifiers = classifiers
        self._config = config
        self._log = log
        self._pulling = anyio.Lock()  # one fetch at a time, first come, first served
        self._draining = anyio.Event()
        self._empty = anyio.Event()  # set when the run drains and the last slot has left
        self._connected = 0
        self._kept: dict[tuple[str, int], Delivery] = {}

    async def serve(self, server: socket.socket) -> None:
        """Runs until the run drains and no slot is left."""
        server.setblocking(False)
        async with anyio.create_task_group() as group:
            group.start_soon(self._accept, server, group)
            group.start_soon(self._beat)
            await self._broker.drained()
            self._draining.set()
            if self._connected:
                await self._empty.wait()
            group.cancel_scope.cancel()

    async def _accept(self, server: socket.socket, group: anyio.abc.TaskGroup) -> None:
        while True:
            await anyio.wait_readable(server)
            try:
                sock, _ = server.accept()
            except BlockingIOError:
                continue
            except OSError as err:  # no descriptor is free just now: the slot waits in the backlog
                self._log.warning("a slot waits", reason=str(err))
                await anyio.sleep(READY_POLL_S)
                continue
            self._connected += 1
            group.start_soon(self._slot, sock)

    async def _beat(self) -> None:
        """Tells the work queue that the requests in our hands are still being worked on."""
        while True:
            await anyio.sleep(HEARTBEAT_S)
            for delivery in tuple(self._kept.values()):
                await delivery.in_progress()

    async def _slot(self, sock: socket.socket) -> None:
        with sock:
            try:
                await self._rollouts(SlotLink(sock))
            except LinkBroken as err:
                self._log.info("slot gone", why=str(err))
            finally:
                self._connected -= 1
                if self._draining.is_set() and not self._connected:
                    self._empty.set()

    async def _rollouts(self, slot: SlotLink) -> None:
        while True:
            await slot.expect(link.Take)
            delivery = await self._next(slot)
            if delivery is None:
                await slot.send(link.Drained())
                return
            async with self._hold(delivery):
                await slot.send(link.Assigned(request=delivery.request, attempt=delivery.attempt))
                await self._rollout(slot, delivery)
            await slot.send(link.Closed())

    async def _next(self, slot: SlotLink) -> Delivery | None:
        """The next request of the work queue; None when there will be none. LinkBroken when the slot leaves."""
        while not self._draining.is_set():
            async with self._pulling:
                if slot.broken():
                    raise LinkBroken("closed while waiting for a rollout")
                if not await self._can_sample():
                    continue
                if not self._draining.is_set() and (delivery := await self._broker.pull_request()) is not None:
                    return delivery
        return None

    async def _can_sample(self) -> bool:
        """Whether an engine serves: a harness that is started before one does only spends its wall clock."""
        with anyio.move_on_after(READY_POLL_S):
            await self._ready()
            return True
        return False

    @asynccontextmanager
    async def _hold(self, delivery: Delivery) -> AsyncIterator[None]:
        """Keeps the request ours while the block runs; hands it back when the block does not end well."""
        over = False
        key = (delivery.request.rollout_id, delivery.attempt)
        self._kept[key] = delivery
        try:
            yield
            over = True
        finally:
            del self._kept[key]
            if not over:
                await self._hand_back(delivery)

    async def _hand_back(self, delivery: Delivery) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(HAND_BACK_S):
            await delivery.nak()
        self._log.warning("rollout handed back", rollout=delivery.request.rollout_id, attempt=delivery.attempt)

    async def _rollout(self, slot: SlotLink, delivery: Delivery) -> None:
        """From Assigned to Close. A slot that could not build its sandbox closes without having opened."""
        message, sock = await slot.expect(link.Open, link.Close)
        if isinstance(message, link.Close):
            await self._conclude(delivery, message, None)
            return
        assert isinstance(message, link.Open)
        assert sock is not None
        session = self._session(delivery, message)
        listener = await self._listen(sock, session)
        try:
            await slot.send(link.Opened())
            await self._serve_session(slot, delivery, session, listener)
        finally:
            session.drop()
            listener.close()

    def _session(self, delivery: Delivery, message: link.Open) -> Session:
        request = delivery.request
        if (message.rollout_id, message.harness) != (request.rollout_id, request.harness):
            raise LinkBroken(f"Open for {message.rollout_id} where {request.rollout_id} was assigned")
        classify = self._classifiers[request.harness]
        return Session(request.rollout_id, delivery.attempt, request.harness, classify)

    async def _listen(self, sock: socket.socket, session: Session) -> Listener:
        try:
            return await Listener.open(sock, self._listeners, {"session": session}, self._config.max_connections)
        except OSError as err:
            sock.close()
            raise LinkBroken(f"the socket that came with Open cannot be served: {err}") from err

    async def _serve_session(self, slot: SlotLink, delivery: Delivery, session: Session, listener: Listener) -> None:
        """Serves until Settle, settles, and concludes with the outcome that Close brings."""
        message, _ = await slot.expect(link.Settle, link.Close)
        listener.fence()
        await session.settle(self._config.settle_timeout_s)
        listener.close()
        if isinstance(message, link.Settle):
            await slot.send(link.Settled(num_calls=len(session.entries), ends_aborted=session.ends_aborted))
            message, _ = await slot.expect(link.Close)
        assert isinstance(message, link.Close)
        await self._conclude(delivery, message, session)

    async def _conclude(self, delivery: Delivery, message: link.Close, session: Session | None) -> None:
        """Stores the manifest, and only then tells the queue that the rollout is over."""
        manifest = _manifest(delivery, message, session)
        await self._broker.publish_manifest(manifest, self._config.publish_timeout_s)
        await delivery.ack()
        broken = session.broken if session else {}
        self._log.info(
            "rollout closed",
            rollout=manifest.rollout_id,
            attempt=manifest.attempt,
            outcome=type(manifest.outcome).__name__,
            calls=len(manifest.calls),
            cut=sum(entry.cut for entry in manifest.calls),
            aborted=manifest.num_aborted,
            **{f"graft/broken/{reason}": count for reason, count in broken.items()},
        )


def _manifest(delivery: Delivery, message: link.Close, session: Session | None) -> RolloutManifest:
    request = delivery.request
    return RolloutManifest(
        rollout_id=request.rollout_id,
        attempt=delivery.attempt,
        group_id=request.group_id,
        task_id=request.task_id,
        harness=request.harness,
        calls=session.entries if session else (),
        outcome=message.outcome,
        version=request.version,
        admitted_s=request.admitted_s,
        started_s=message.started_s,
        ended_s=message.ended_s,
        num_aborted=session.num_aborted if session else 0,
    )


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """The listening socket for slots, removed at the end.

    ClawpipeError when another proxy serves this run folder, or the path is too long for a socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        if path.exists() and _answers(path):
            raise ClawpipeError(f"{path}: another proxy serves this run folder; stop it first")
        path.unlink(missing_ok=True)
        try:
            server.bind(str(path))
        except OSError as err:
            raise ClawpipeError(f"{path}: cannot listen there ({err}); give a shorter --run-dir") from err
        try:
            server.listen(BACKLOG)
            yield server
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
