"""Publishing and assembling through a real nats-server: how fast, how many bytes, how much memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from data_path_load import Conversation, Load, conversations
from data_path_setup import POLL_S, Where, World, world

TOKEN_BYTES, CALL_BYTES = 8, 256  # what the promises allow for a unique token and for a call
SETTLE_S = 1.0
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Passage:
    """One pass of the whole load."""

    wall_s: float  # from the first publish to the last closed rollout
    publisher_s: float  # processor time of each
    service_s: float
    server_s: float
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """Resident memory of the service, over what it was before the first record."""

    open_bytes: int  # all calls are there, no manifest is
    closed_bytes: int
    peak_bytes: int  # at any moment


async def passage(load: Load, where: Where, profile: Path | None = None) -> Passage:
    """256 publishers, each of which waits for the acknowledgement of a call before the next, as proxies do."""
    async with world(load, where, profile) as made:
        talks = list(conversations(load, made.requests))
        before = _spent(made)
        began_s = time.time()
        await _publish(made, talks, manifests=True)
        closed = await _until_closed(made, load)
        after = _spent(made)
        publisher_s, service_s, server_s = (late - early for early, late in zip(before, after, strict=True))
        return Passage(max(closed) - began_s, publisher_s, service_s, server_s, await made.stored_bytes())


async def memory(load: Load, where: Where) -> Held:
    """The service's memory when it holds everything, and when everything is closed."""
    async with world(load, where) as made:
        talks = list(conversations(load, made.requests))
        before = await _resident(made)
        await _publish(made, talks, manifests=False)
        with anyio.fail_after(DEADLINE_S):
            while made.sampled_tokens() < sum(talk.num_sampled for talk in talks):
                made.check()
                await anyio.sleep(0.2)
        opened = await _resident(made)
        for talk in talks:
            await made.broker.publish_manifest(talk.manifest)
        await _until_closed(made, load)
        return Held(opened - before, await _resident(made) - before, _peak(made) - before)


async def _publish(made: World, talks: list[Conversation], *, manifests: bool) -> None:
    """All conversations at the same time, each with its manifest at the end if so said."""

    async def publish(talk: Conversation) -> None:
        for call in talk.calls:
            await made.broker.publish_call(call)
        if manifests:
            await made.broker.publish_manifest(talk.manifest)

    async with anyio.create_task_group() as group:
        for talk in talks:
            group.start_soon(publish, talk)


async def _until_closed(made: World, load: Load) -> list[float]:
    with anyio.fail_after(DEADLINE_S):
        while len(closed := made.closed_s()) < load.rollouts:
            made.check()
            await anyio.sleep(POLL_S)
    return closed


async def _resident(made: World) -> int:
    """Bytes, when what was only on its way is gone."""
    await anyio.sleep(SETTLE_S)
    return int(made.service.memory_info().rss)


def _peak(made: World) -> int:
    """Bytes: the most that was ever resident (VmHWM)."""
    lines = Path(f"/proc/{made.service.pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def _spent(made: World) -> tuple[float, float, float]:
    """Seconds of processor time of this process, the service and the server."""
    found = []
    for process in (psutil.Process(), made.service, made.server):
        times = process.cpu_times()
        found.append(float(times.user + times.system))
    return found[0], found[1], found[2]
