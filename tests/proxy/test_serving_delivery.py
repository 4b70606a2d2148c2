"""A harness's requests over a real listening socket: records before answers, retries, settling, slots."""

from __future__ import annotations

import json

import anyio
import httpx
import numpy as np
import pytest
from chat_requests import USER, body, events_of

from clawpipe.actors import link
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import EngineState, FinishReason, Infra, Role, RolloutRequest, Scored, floats, ints

pytestmark = pytest.mark.anyio


async def connected_again(broker) -> None:
    await broker.set_engine(EngineState(name="e", url="u", version=1, healthy=True))  # waits for the connection


async def test_the_record_is_exact_and_stored_before_the_answer_leaves(make_proxy, sampler):
    sampler.script = ["fine"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            await client.post("/chat/completions", json=body(temperature=0.3, max_tokens=50, seed=10**30))
            stored = await proxy.broker.last_records_sequence()
        [record] = await proxy.records(1)
    assert stored == 1
    assert (record.call_id, record.index, record.attempt) == (rollout.call_id(0), 0, rollout.attempt)
    assert (record.parent, record.parent_tokens) == (None, 0)
    assert ints(record.prompt_delta).tolist() == sampler.prompts[0]
    assert record.prompt_tokens == len(sampler.prompts[0])
    assert ints(record.completion_ids).tolist() == sampler.said[0].ids.tolist()
    assert np.array_equal(floats(record.logprobs), sampler.said[0].logprobs)
    assert [(span.version, span.start, span.end) for span in record.versions] == [(3, 0, len(sampler.said[0].ids))]
    assert (record.finish_reason, record.role, record.harness) == (FinishReason.STOP, Role.MAIN, "agentloop")
    assert record.requested == {"temperature": 0.3, "max_tokens": 50, "seed": str(10**30)}
    assert sampler.limits == [50]


async def test_no_answer_without_a_record(make_proxy, sampler, nats_server):
    sampler.script = ["lost"]
    async with make_proxy(publish_timeout_s=0.3) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            nats_server.kill()
            response = await client.post("/chat/completions", json=body())
            nats_server.start()
            await connected_again(proxy.broker)
        assert await rollout.settle() == link.Settled(num_calls=0, ends_aborted=True)
        await rollout.close()
        manifest = await proxy.manifest()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert "lost" not in response.text
    assert manifest.calls == ()
    assert manifest.num_aborted == 1


async def test_a_repeated_request_gets_the_same_answer_and_no_second_sample(make_proxy, sampler):
    sampler.script = ["first", "second"]
    sampler.hold = anyio.Event()
    async with make_proxy(retry_window_s=1.0) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            answers = []

            async def ask(**fields):
                answers.append(await client.post("/chat/completions", json=body(**fields)))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                group.start_soon(ask)
                await anyio.sleep(0.2)
                sampler.hold.set()
            streamed = await client.post("/chat/completions", json=body(stream=True))
            await anyio.sleep(1.1)
            later = await client.post("/chat/completions", json=body())
        assert (await rollout.settle()).num_calls == 2
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert texts == {"first"}
    assert "first" in streamed.text
    assert later.json()["choices"][0]["message"]["content"] == "second"
    assert len(sampler.prompts) == 2


async def test_a_client_that_hangs_up_finds_its_answer_when_it_comes_back(make_proxy, sampler):
    sampler.script = ["patience"]
    sampler.hold = anyio.Event()
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/chat/completions", json=body(), timeout=0.3)
            sampler.hold.set()
            again = await client.post("/chat/completions", json=body())
        await rollout.settle()
        await rollout.close()
        manifest = await proxy.manifest()
    assert again.json()["choices"][0]["message"]["content"] == "patience"
    assert [(call.call_id, call.delivered, call.cut) for call in manifest.calls] == [(rollout.call_id(0), True, False)]


async def test_an_answer_that_nobody_took_is_not_delivered(make_proxy, sampler):
    sampler.script = ["unheard"]
    sampler.hold = anyio.Event()
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/chat/completions", json=body(stream=True), timeout=0.3)
        sampler.hold.set()
        await rollout.settle()
        await rollout.close()
        manifest = await proxy.manifest()
    assert [(call.delivered, call.cut) for call in manifest.calls] == [(False, False)]


async def test_keepalives_go_out_while_the_turn_is_sampled(make_proxy, sampler):
    sampler.script = ["slow", "slow too"]
    sampler.hold = anyio.Event()
    async with make_proxy(keepalive_s=0.1) as proxy:
        rollout = await proxy.rollout()
        times = []
        async with rollout.client() as client, anyio.create_task_group() as group:

            async def release():
                await anyio.sleep(0.6)
                sampler.hold.set()

            group.start_soon(release)
            async with client.stream("POST", "/chat/completions", json=body(stream=True)) as response:
                text = ""
                async for part in response.aiter_text():
                    times.append(anyio.current_time())
                    text += part
            sampler.hold = anyio.Event()
            group.start_soon(release)
            whole = await client.post("/chat/completions", json=body(USER, USER))
    assert text.count(": keep-alive\n\n") >= 4
    assert max(np.diff(times)) < 0.4
    assert "slow" in "".join(e["choices"][0]["delta"].get("content") or "" for e in events_of(text))
    assert whole.text.startswith("    ")
    assert whole.json()["choices"][0]["message"]["content"] == "slow too"


async def test_an_engine_that_is_gone_for_good_is_an_error_of_ours(make_proxy, sampler):
    sampler.script = [EngineError("gone"), EngineError("gone"), "back"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            whole = await client.post("/chat/completions", json=body())
            streamed = await client.post("/chat/completions", json=body(stream=True))
            third = await client.post("/chat/completions", json=body())
        settled = await rollout.settle()
        await rollout.close()
        manifest = await proxy.manifest()
    assert whole.status_code == 503
    assert "error" in json.loads(streamed.text.split("data: ")[1])
    assert "[DONE]" not in streamed.text
    assert third.status_code == 200
    assert settled == link.Settled(num_calls=1)  # the harness got over it
    assert manifest.num_aborted == 2
    assert len(manifest.calls) == 1


async def test_after_settling_no_call_is_taken_and_the_manifest_lists_what_exists(make_proxy, sampler):
    sampler.script = ["only"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as kept:
            await kept.post("/chat/completions", json=body())
            settled = await rollout.settle()
            with pytest.raises(httpx.TransportError):
                await kept.post("/chat/completions", json=body(USER, USER))
        async with rollout.client() as fresh:
            with pytest.raises(httpx.ConnectError):
                await fresh.post("/chat/completions", json=body(USER, USER))
        await rollout.close(Scored(reward=0.25, checks={"a": 0.25}))
        manifest = await proxy.manifest()
        left = await proxy.broker.pending_requests()
    assert settled == link.Settled(num_calls=1)
    assert [(call.call_id, call.delivered) for call in manifest.calls] == [(rollout.call_id(0), True)]
    assert manifest.outcome == Scored(reward=0.25, checks={"a": 0.25})
    assert (manifest.started_s, manifest.ended_s, manifest.group_id, manifest.task_id) == (1.0, 2.0, "g-0", "t/0")
    assert left == ()


async def test_settling_lets_a_call_in_flight_finish(make_proxy, sampler):
    sampler.script = ["in time"]
    sampler.hold = anyio.Event()
    async with make_proxy(settle_timeout_s=10) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client, anyio.create_task_group() as group:
            answers = []

            async def ask():
                answers.append(await client.post("/chat/completions", json=body()))

            async def release():
                await anyio.sleep(0.3)
                sampler.hold.set()

            group.start_soon(ask)
            await anyio.sleep(0.2)
            group.start_soon(release)
            settled = await rollout.settle()
    assert settled == link.Settled(num_calls=1)
    assert answers[0].json()["choices"][0]["message"]["content"] == "in time"


async def test_settling_cuts_what_takes_too_long_and_keeps_its_tokens(make_proxy, sampler):
    sampler.script = ["endless"]
    sampler.hold = anyio.Event()
    async with make_proxy(settle_timeout_s=0.3) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client, anyio.create_task_group() as group:

            async def ask():
                response = await client.post("/chat/completions", json=body())
                assert response.status_code == 503

            group.start_soon(ask)
            await anyio.sleep(0.2)
            settled = await rollout.settle()
        await rollout.close()
        record, manifest = await proxy.records(2)
    assert settled == link.Settled(num_calls=1)
    assert record.finish_reason is FinishReason.CUT
    assert ints(record.completion_ids).tolist() == sampler.turn("endless").ids[:2].tolist()
    assert [(call.cut, call.delivered) for call in manifest.calls] == [(True, False)]
    assert manifest.num_aborted == 0


async def test_a_broken_connection_hands_the_rollout_back_as_the_next_attempt(make_proxy, sampler):
    sampler.script = ["first life", "second life"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            await client.post("/chat/completions", json=body())
            rollout.slot.close()
            with anyio.fail_after(10):
                slot = proxy.slot()
                assigned = await slot.take()
            with pytest.raises(httpx.TransportError):
                await client.post("/chat/completions", json=body(USER, USER))
        again = await slot.open(assigned.request)
        async with again.client() as client:
            await client.post("/chat/completions", json=body())
        await again.settle()
        await again.close()
        manifest = await proxy.manifest()
    assert assigned.request == rollout.request
    assert manifest.attempt == assigned.attempt > rollout.attempt
    assert [call.call_id for call in manifest.calls] == [f"r-0.a{assigned.attempt}.c0"]


async def test_a_slot_that_built_no_sandbox_closes_without_opening(make_proxy):
    async with make_proxy() as proxy:
        request = RolloutRequest(rollout_id="r-7", group_id="g", task_id="t", harness="agentloop")
        await proxy.broker.publish_request(request)
        slot = proxy.slot()
        await slot.take()
        outcome = Infra(boundary="sandbox", message="no space")
        message = link.Close(rollout_id="r-7", outcome=outcome, started_s=1.0, ended_s=2.0)
        assert await slot.ask(message) == link.Closed()
        manifest = await proxy.manifest()
        assert await proxy.broker.pending_requests() == ()
    assert manifest.outcome == outcome
    assert manifest.calls == ()


@pytest.mark.parametrize("message", [link.Settle(rollout_id="r"), link.Open(rollout_id="r", harness="agentloop")])
async def test_a_slot_out_of_order_is_cut_off_and_the_others_go_on(make_proxy, message):
    async with make_proxy() as proxy:
        rude = proxy.slot()
        rude.sock.send(link.encode(message))
        with anyio.fail_after(5):
            await anyio.wait_readable(rude.sock)
        assert rude.sock.recv(100) == b""
        assert (await proxy.rollout("r-1")).request.rollout_id == "r-1"


async def test_when_the_run_drains_slots_finish_their_rollout_and_get_no_other(make_proxy, sampler):
    sampler.script = ["last"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        idle = proxy.slot()
        await proxy.broker.request_drain()
        with anyio.fail_after(10):
            assert await idle.take() == link.Drained()
        async with rollout.client() as client:
            assert (await client.post("/chat/completions", json=body())).status_code == 200
        await rollout.settle()
        await rollout.close()
        assert await rollout.slot.take() == link.Drained()


async def test_two_rollouts_at_once_never_mix(make_proxy, sampler):
    sampler.script = ["one", "two"]
    async with make_proxy() as proxy:
        first, second = await proxy.rollout("r-1"), await proxy.rollout("r-2")
        async with first.client() as a, second.client() as b:
            one = await a.post("/chat/completions", json=body())
            two = await b.post("/chat/completions", json=body())
        records = await proxy.records(2)
    assert [answer.json()["choices"][0]["message"]["content"] for answer in (one, two)] == ["one", "two"]
    assert [record.call_id for record in records] == [first.call_id(0), second.call_id(0)]
    assert [record.parent for record in records] == [None, None]
