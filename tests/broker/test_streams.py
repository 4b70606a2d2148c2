"""Every stream has limits that the server keeps."""

from __future__ import annotations

import pytest
from broker_scripts import call, plain_client, request, set_up, take
from nats.js.api import DiscardPolicy, StorageType

pytestmark = pytest.mark.anyio

MIB = 1024**2
LIMITS = {  # [nats] max_store_bytes = 64 MiB: bytes of the stream, bytes of a message, what happens when it is full
    "clawpipe-REQUESTS": (8 * MIB, 64 * 1024, DiscardPolicy.NEW),
    "clawpipe-RECORDS": (64 * MIB, 528 * 1024, DiscardPolicy.NEW),
    "clawpipe-WEIGHTS": (8 * MIB, 64 * 1024, DiscardPolicy.OLD),
    "clawpipe-DEADLETTERS": (4 * MIB, 528 * 1024, DiscardPolicy.OLD),
    "OBJ_clawpipe-BLOBS": (32 * MIB, -1, DiscardPolicy.NEW),
    "KV_clawpipe-CONTROL": (2 * MIB, 64 * 1024, DiscardPolicy.NEW),
}


async def test_all_streams_lie_in_files_with_limits_that_leave_the_embedded_server_room(nats_server):
    async with set_up(nats_server, 64 * MIB), plain_client(nats_server) as js:
        configs = [info.config for info in await js.streams_info()]
        assert {c.name: (c.max_bytes, c.max_msg_size, c.discard) for c in configs} == LIMITS
        assert {c.storage for c in configs} == {StorageType.FILE}
        assert sum(c.max_bytes for c in configs) <= 2 * 64 * MIB
        runners = (await js.consumer_info("clawpipe-REQUESTS", "runners")).config
        assert (runners.ack_wait, runners.max_ack_pending) == (30.0, 10_000)


async def test_the_streams_of_a_run_take_new_limits_and_keep_what_they_hold(nats_server):
    async with set_up(nats_server, 64 * MIB) as broker, plain_client(nats_server) as js:
        await broker.publish_call(call("r-1", 0))
        await broker.publish_request(request(0))
        await broker.setup(128 * MIB)
        assert (await js.stream_info("clawpipe-RECORDS")).config.max_bytes == 128 * MIB
        assert [entry.record for entry in await take(broker.records(), 1)] == [call("r-1", 0)]
        assert (await broker.pull_request()).request == request(0)


async def test_runs_with_different_prefixes_do_not_meet(nats_server):
    async with set_up(nats_server) as one, set_up(nats_server, prefix="other") as other:
        await one.publish_call(call("r-1", 0))
        await other.publish_call(call("r-2", 0))
        assert [entry.rollout_id for entry in await take(other.records(), 1)] == ["r-2"]
        assert await one.last_records_sequence() == 1
