"""The proxy's view of the engines: who is lent, who waits, and what is said when nobody comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx

from clawpipe.actors.engines.pool import Engine, EnginePool
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import EngineState


class Bucket:
    """The control bucket, filled by the test."""

    def __init__(self, *states: EngineState) -> None:
        self.states = states

    async def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        seen = None
        while True:
            if self.states != seen:
                seen = self.states
                yield {state.name: state for state in seen}
            await anyio.sleep(0.005)

    async def put(self, *states: EngineState) -> None:
        self.states = states
        await anyio.sleep(0.05)


def state(name: str, version: int | None = 1, *, healthy: bool = True, since_s: float = 0.0) -> EngineState:
    return EngineState(name=name, url=f"http://{name}", version=version, healthy=healthy, since_s=since_s)


def test_the_engine_with_the_fewest_leases_is_lent() -> None:
    async def lend() -> list[str]:
        bucket, names = Bucket(), []
        async with EnginePool(bucket) as pool:
            await bucket.put(state("a"), state("b"))
            async with pool.acquire() as first, pool.acquire() as second, pool.acquire() as third:
                names += [first.name, second.name, third.name]
            async with pool.acquire() as again:
                names.append(again.name)
        return names

    names = anyio.run(lend)
    assert names[0] != names[1]
    assert names[2] in "ab"
    assert names[3] == "a"


def test_only_healthy_engines_with_weights_are_lent_with_their_version() -> None:
    async def lend() -> list[Engine]:
        bucket = Bucket()
        async with EnginePool(bucket) as pool:
            await bucket.put(state("a", None), state("b", 3, healthy=False), state("c", 0))
            async with pool.acquire() as first, pool.acquire() as second:
                lent = [first, second]
        return lent

    assert anyio.run(lend) == [Engine("c", "http://c", 0), Engine("c", "http://c", 0)]


def test_a_call_waits_for_an_engine_that_gets_its_weights() -> None:
    async def wait() -> Engine:
        bucket = Bucket()
        async with EnginePool(bucket, wait_s=10) as pool, anyio.create_task_group() as group:
            await bucket.put(state("a", None))
            group.start_soon(bucket.put, state("a", 7))
            async with pool.acquire() as engine:
                return engine
        raise AssertionError

    assert anyio.run(wait) == Engine("a", "http://a", 7)


def test_no_engine_in_time_is_an_error_that_names_each_and_its_state() -> None:
    async def wait() -> str:
        async with EnginePool(Bucket(state("a", None), state("b", healthy=False)), wait_s=0.1) as pool:
            try:
                async with pool.acquire():
                    raise AssertionError
            except EngineError as err:
                return str(err)

    message = anyio.run(wait)
    assert "(a at http://a: without weights, b at http://b: not healthy)" in message
    assert "[proxy] engine_wait_s" in message


def test_a_broken_connection_sends_the_next_calls_elsewhere_until_the_entry_changes() -> None:
    async def lend() -> list[str]:
        bucket, names = Bucket(), []
        async with EnginePool(bucket) as pool:
            await bucket.put(state("a"), state("b"))
            try:
                async with pool.acquire() as engine:
                    names.append(engine.name)
                    raise httpx.ConnectError("refused")
            except httpx.ConnectError:
                names.append("broken")
            async with pool.acquire() as first, pool.acquire() as second:
                names += [first.name, second.name]
            await bucket.put(state("a", since_s=1.0), state("b"))
            async with pool.acquire() as engine:
                names.append(engine.name)
        return names

    assert anyio.run(lend) == ["a", "broken", "b", "b", "a"]
