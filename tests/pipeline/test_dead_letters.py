"""Bad records on a real nats-server: each is set aside once, with its flaw, and everything else is trained."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import nats
import pytest
from flow_scripts import altered, newer, orphaned, unsound
from pipeline_scripts import Script, two_turns

from clawpipe.pipeline.ledger_file import reading
from clawpipe.pipeline.proof import first_breach
from clawpipe.pipeline.records import CallRecord, encode

EACH_FLAW_ONCE = {
    "unreadable": 1,
    "unknown_schema": 1,
    "unsound": 1,
    "missing_parent": 1,
    "conflicting": 1,
    "missing_blob": 1,
    "unadmitted": 1,
}


@asynccontextmanager
async def raw(run):
    """Publishes bytes as they are, like a process with a fault would."""
    client = await nats.connect(run.server.url, token=run.server.token)
    try:
        stream = client.jetstream()

        async def publish(kind, rollout_id, name, body, last=""):
            await stream.publish(
                f"clawpipe.records.{kind}.{rollout_id}{last}", body, headers={"Nats-Msg-Id": name}, timeout=10
            )

        yield publish
    finally:
        await client.close()


async def spoil(publish, broker, request, version):
    """What a rollout leaves in the stream, one of the first six with a flaw of its own."""
    first, second, manifest = two_turns(request, version=version)
    match request.rollout_id:
        case "r-000000-0":
            await publish("call", request.rollout_id, first.call_id, encode(first)[:-9])
            first = None
        case "r-000000-1":
            first = newer(first)
        case "r-000001-0":
            second = unsound(second)
        case "r-000001-1":
            second = orphaned(second)
        case "r-000002-0":
            await broker.publish_call(first)
            await publish("call", request.rollout_id, f"{first.call_id}.again", encode(altered(first)))
            first = None
        case "r-000002-1":
            await publish("call", request.rollout_id, first.call_id, b"\x80", ".claim")
            first = None
    for record in filter(None, (first, second, manifest)):
        await (broker.publish_call if isinstance(record, CallRecord) else broker.publish_manifest)(record)


async def act(publish, broker, learner):
    await broker.publish_call(Script("r-900000-0").call([1], [2, 3]))
    while True:
        delivery = await broker.pull_request(0.5)
        if delivery is not None:
            await spoil(publish, broker, delivery.request, learner.version)
            await delivery.ack()


@pytest.mark.parametrize("killed", [False, True], ids=["at_once", "after_a_restart"])
def test_each_bad_record_is_visible_in_the_status_once_and_the_other_rollouts_are_trained(run, killed):
    run = run(run={"updates": 3}, schedule={"max_staleness": 8})
    learner = run.learner

    async def first():
        await learner.hello()
        with anyio.fail_after(30):
            while run.status().get("dead_letters", {}).get("counts") != EACH_FLAW_ONCE:  # noqa: ASYNC110
                await anyio.sleep(0.05)

    async def main():
        async with run.around(play=None) as (broker, tasks), raw(run) as publish:
            # The service begins with empty streams; what an actor publishes comes after.
            async with anyio.create_task_group() as acting:

                async def begin():
                    while not (run.runtime.path("status.json").exists() and run.status()["held"]["in_flight"]):  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                    await act(publish, broker, learner)

                acting.start_soon(begin)
                if killed:
                    await run.serve_until(first)
                    tasks.start_soon(learner.train)
                else:
                    tasks.start_soon(learner.hello_and_train)
                await run.serve()
                acting.cancel_scope.cancel()
            return await broker.read_dead_letters()

    letters = anyio.run(main)
    found = run.status()["dead_letters"]
    assert found["counts"] == EACH_FLAW_ONCE
    assert len(found["newest"]) == 5
    assert sorted(letter.flaw.value for letter in letters) == sorted(EACH_FLAW_ONCE)
    by_flaw = {letter.flaw.value: letter for letter in letters}
    assert by_flaw["unadmitted"].body == encode(Script("r-900000-0").call([1], [2, 3]))
    assert {flaw: letter.rollout_id for flaw, letter in by_flaw.items()} == {
        "unreadable": "r-000000-0",
        "unknown_schema": "r-000000-1",
        "unsound": "r-000001-0",
        "missing_parent": "r-000001-1",
        "conflicting": "r-000002-0",
        "missing_blob": "r-000002-1",
        "unadmitted": "r-900000-0",
    }
    bad = {f"r-00000{n}-{place}" for n in range(3) for place in range(2)}
    assert len(learner.rollouts()) == len(set(learner.rollouts())) == 12
    assert not bad & set(learner.rollouts())
    assert {f"{name}-1" for name in bad} <= set(learner.rollouts())  # each was run again
    reasons = dict(run.rows("SELECT rollout_id, reason FROM rollouts WHERE state = 'dropped'"))
    assert {name: reasons[name] for name in bad} == dict.fromkeys(bad, "malformed")
    with reading(run.runtime.path("ledger.sqlite")) as ledger:
        assert first_breach(ledger.read(), ledger.calls(), max_reuse=1, over=True) is None
