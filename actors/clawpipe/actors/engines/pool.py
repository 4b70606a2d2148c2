"""The engines as the proxy sees them: which are healthy and have weights, and which has the least to do.

Follows the engines' entries in the control bucket, so engines that clawpipe starts and those of others look alike.
A call that breaks the connection to its engine keeps the next ones away from it for a moment, since the entry
in the bucket follows only when the engine role has noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import anyio
import httpx

from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import EngineState

AVOID_S = 2.0


class EngineStates(Protocol):
    """Where the engines' entries come from; `Broker` is one."""

    def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        """All entries now, and again whenever one changes; never ends."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """A healthy engine and the weight version that it serves."""

    name: str
    url: str
    version: int


class EnginePool:
    """Use it as `async with EnginePool(broker) as pool`; then `async with pool.acquire() as engine`."""

    def __init__(self, states: EngineStates, wait_s: float = 600.0) -> None:
        self._source = states
        self._wait_s = wait_s
        self._states: dict[str, EngineState] = {}
        self._leases: Counter[str] = Counter()
        self._avoid_until: dict[str, float] = {}
        self._changed = anyio.Event()
        self._group = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._group.start_soon(self._follow)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._group.cancel_scope.cancel()
        return await self._group.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Engine]:
        """Lends the healthy engine with the fewest leases for the length of the block.

        Waits while there is none, `wait_s` at most, then raises EngineError.
        """
        engine = await self._wait()
        self._leases[engine.name] += 1
        try:
            yield engine
        except httpx.TransportError:
            self._avoid_until[engine.name] = anyio.current_time() + AVOID_S
            raise
        finally:
            self._leases[engine.name] -= 1

    async def ready(self) -> None:
        """Waits, without a limit, until there is an engine to lend."""
        while self._least_loaded() is None:
            with anyio.move_on_after(AVOID_S / 2):
                await self._changed.wait()

    async def _follow(self) -> None:
        async for states in self._source.engines():
            for name, state in states.items():
                if state != self._states.get(name):
                    self._avoid_until.pop(name, None)
            self._states = states
            self._changed.set()
            self._changed = anyio.Event()

    async def _wait(self) -> Engine:
        with anyio.move_on_after(self._wait_s):
            while True:
                if engine := self._least_loaded():
                    return engine
                with anyio.move_on_after(AVOID_S / 2):
                    await self._changed.wait()
        raise EngineError(
            f"no healthy engine with weights for {self._wait_s:.0f} s ({self._describe()}); look into "
            "logs/engine.log and logs/vllm-*.log of the run folder, or raise [proxy] engine_wait_s"
        )

    def _least_loaded(self) -> Engine | None:
        now = anyio.current_time()
        usable = [
            Engine(state.name, state.url, state.version)
            for state in self._states.values()
            if state.healthy and state.version is not None and self._avoid_until.get(state.name, 0.0) <= now
        ]
        return min(usable, key=lambda engine: self._leases[engine.name], default=None)

    def _describe(self) -> str:
        def word(state: EngineState) -> str:
            if not state.healthy:
                return "not healthy"
            return "without weights" if state.version is None else "breaks connections"

        return ", ".join(f"{s.name} at {s.url}: {word(s)}" for s in self._states.values()) or "none is known"
