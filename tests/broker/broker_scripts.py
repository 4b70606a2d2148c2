"""Records of a chosen size, readers that end, a client without our manners, and what was logged."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import anyio
import nats
import numpy as np

from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.patience import Pace
from clawpipe.pipeline.records import CallRecord, FinishReason, Role, RolloutRequest, float_bytes, int_bytes

STORE_BYTES = 64 * 1024**2
QUICK = Pace(request_s=1.0, first_try_s=0.3, try_s=0.5, say_again_s=1.5, fetch_s=0.3)
WAITING = "waiting for NATS to store records"
THROUGH = "no longer waiting for NATS to store records"


def call(rollout: str, index: int, prompt_tokens: int = 3) -> CallRecord:
    """A call with a prompt of 4 * `prompt_tokens` bytes that no other call has."""
    return CallRecord(
        rollout_id=rollout,
        attempt=1,
        call_id=f"{rollout}.a1.c{index}",
        index=index,
        parent=None,
        parent_tokens=0,
        prompt_delta=int_bytes(np.arange(prompt_tokens) + index),
        prompt_tokens=prompt_tokens,
        completion_ids=int_bytes([4, 5]),
        logprobs=float_bytes([-0.5, -0.25]),
        versions=(),
        finish_reason=FinishReason.STOP,
        role=Role.MAIN,
        harness="agentloop",
        digest="d",
    )


def request(index: int) -> RolloutRequest:
    return RolloutRequest(rollout_id=f"r-{index}", group_id="g-0", task_id="t/0", harness="agentloop")


@asynccontextmanager
async def set_up(server, max_store_bytes=STORE_BYTES, **options):
    async with Broker.connect(server.url, server.token, **options) as broker:
        await broker.setup(max_store_bytes)
        yield broker


@asynccontextmanager
async def plain_client(server):
    """NATS without the broker between: what somebody else may do to the streams."""

    async def quiet(_):
        pass

    client = await nats.connect(server.url, token=server.token, error_cb=quiet)
    try:
        yield client.jetstream()
    finally:
        with suppress(nats.errors.Error):
            await client.close()


async def take(iterator, count, timeout_s=30):
    found = []
    with anyio.fail_after(timeout_s):
        async for item in iterator:
            found.append(item)
            if len(found) == count:
                break
    await iterator.aclose()
    return found


async def take_one(iterator):
    """Leaves the iterator open."""
    with anyio.fail_after(30):
        return await anext(iterator)


async def until(condition, timeout_s=30):
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.05)


def logged(caplog, event):
    """The fields of each such event."""
    return [record.fields for record in caplog.records if record.getMessage() == event]
