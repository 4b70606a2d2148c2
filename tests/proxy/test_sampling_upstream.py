"""Sampling over HTTP: what is asked of an engine, what is accepted from it, and what happens when it goes away."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from clawpipe.actors.engines.pool import EnginePool
from clawpipe.actors.proxy.engine_http import EngineClient
from clawpipe.actors.proxy.listen import Listener, serving
from clawpipe.actors.proxy.upstream import EngineSampler, Wanted
from clawpipe.pipeline.config import ProxyConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import EngineState, FinishReason, VersionSpan

pytestmark = pytest.mark.anyio

PROMPT = np.array([5, 6, 7], np.int32)


def choice(ids=(8, 9, 2), logprobs=(-0.5, -0.25, -1.0), spans=(("3", 0, 3),), finish: str = "stop") -> dict[str, Any]:
    content = [{"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []} for i, p in zip(ids, logprobs, strict=True)]
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "weight_versions": versions,
        "finish_reason": finish,
    }


class Engine:
    """An engine that answers by its script: a choice, a status, "hang" until it is asked to abort, or "die"."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        self.aborted = anyio.Event()
        self.abort_asked: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        body = json.loads((await receive())["body"])
        if scope["path"] == "/inference/v1/abort_requests":
            self.abort_asked += body["request_ids"]
            self.aborted.set()
            await self._reply(send, 200, {})
            return
        self.asked.append(body)
        entry = self.script.pop(0)
        if entry == "die":
            return  # no answer: the connection is closed
        if entry == "hang":
            await self.aborted.wait()
            entry = choice(ids=(8,), logprobs=(-0.5,), spans=(("3", 0, 1),), finish="abort")
        if isinstance(entry, int):
            await self._reply(send, entry, {"error": "no"})
        else:
            await self._reply(send, 200, {"choices": [entry]})

    async def _reply(self, send, status: int, body: dict[str, Any]) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class States:
    """The engines' entries, as the broker gives them; `now` may be changed while somebody follows."""

    def __init__(self, **states: EngineState) -> None:
        self.now = states

    async def engines(self) -> AsyncIterator[dict[str, EngineState]]:
        while True:
            yield dict(self.now)
            await anyio.sleep(0.02)


@asynccontextmanager
async def served(engine: Engine, version: int | None = 3, **options: Any):
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    listener = await Listener.open(sock, serving(engine), {}, 16)
    states = States(e=EngineState(name="e", url=url, version=version, healthy=True))
    config = ProxyConfig(**{"engine_wait_s": 10.0, **options})
    async with EnginePool(states, config.engine_wait_s) as pool, EngineClient() as client:
        yield EngineSampler(pool, client, config, (1, 2), EventLog("proxy")), states
    listener.close()


async def sample(sampler: EngineSampler, cut: anyio.Event | None = None):
    return await sampler.sample(Wanted(prompt=PROMPT, max_tokens=64, call_id="r.a1.c0"), cut or anyio.Event())


async def test_ids_go_in_and_ids_logprobs_and_versions_come_out():
    engine = Engine(choice(spans=(("3", 0, 1), ("4", 1, 3))))
    async with served(engine) as (sampler, _):
        sampled = await sample(sampler)
    assert sampled.ids.tolist() == [8, 9, 2]
    assert sampled.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert sampled.logprobs.dtype == np.float32
    assert sampled.versions == (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    assert sampled.finish_reason is FinishReason.STOP


async def test_sampling_parameters_are_the_configurations_alone():
    engine = Engine(choice())
    async with served(engine, temperature=0.7) as (sampler, _):
        await sample(sampler)
    [asked] = engine.asked
    assert asked["token_ids"] == [5, 6, 7]
    assert asked["cache_salt"] == "3"
    assert asked["stream"] is False
    assert asked["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 64,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
        "stop_token_ids": [1, 2],
    }
    assert "seed" not in asked["sampling_params"]


@pytest.mark.parametrize(
    "fault",
    [
        "die",
        500,
        503,
        choice(finish="abort"),
        choice(spans=(("default", 0, 3),)),
        choice(spans=()),
        choice(spans=(("3", 0, 1), ("4", 2, 3))),
        choice(spans=(("3", 0, 2),)),
        {"nonsense": True},
    ],
    ids=str,
)
async def test_a_call_that_loses_its_engine_is_sampled_again_from_the_start(fault):
    engine = Engine(fault, fault, choice())
    async with served(engine) as (sampler, _):
        sampled = await sample(sampler)
    assert sampled.ids.tolist() == [8, 9, 2]
    assert [asked["token_ids"] for asked in engine.asked] == [[5, 6, 7]] * 3
    assert len({asked["request_id"] for asked in engine.asked}) == 3


async def test_a_call_waits_for_an_engine_that_has_its_weights():
    engine = Engine(choice(spans=(("5", 0, 3),)))
    async with served(engine, version=None) as (sampler, states), anyio.create_task_group() as group:

        async def load() -> None:
            await anyio.sleep(0.3)
            url = states.now["e"].url
            assert engine.asked == []
            states.now = {"e": EngineState(name="e", url=url, version=5, healthy=True)}

        group.start_soon(load)
        sampled = await sample(sampler)
    assert engine.asked[0]["cache_salt"] == "5"
    assert sampled.versions == (VersionSpan(version=5, start=0, end=3),)


async def test_without_any_engine_the_call_fails_after_the_configured_wait():
    async with served(Engine(), version=None, engine_wait_s=0.2) as (sampler, _):
        with pytest.raises(EngineError, match="no healthy engine"):
            await sample(sampler)


async def test_an_engine_that_only_fails_is_given_up_after_the_configured_wait():
    engine = Engine(*[500] * 50)
    async with served(engine, engine_wait_s=0.5) as (sampler, _):
        with pytest.raises(EngineError, match="status 500"):
            await sample(sampler)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (400, "refused a call with 400"),
        (choice(logprobs=(-0.5, -9999.0, -1.0)), "NaN"),
        ({**choice(), "logprobs": None}, "3 token ids and logprobs of 0"),
        ({**choice(), "token_ids": [8, 9, 3]}, "other ones"),
    ],
    ids=["refused", "nan", "no logprobs", "other ids"],
)
async def test_an_answer_that_another_try_would_not_mend_is_an_error_at_once(answer, message):
    engine = Engine(answer)
    async with served(engine) as (sampler, _):
        with pytest.raises(EngineError, match=message):
            await sample(sampler)
    assert len(engine.asked) == 1


async def test_a_cut_call_is_aborted_at_its_engine_and_keeps_its_tokens():
    engine = Engine("hang")
    cut = anyio.Event()
    async with served(engine) as (sampler, _), anyio.create_task_group() as group:

        async def cut_soon() -> None:
            await anyio.sleep(0.2)
            cut.set()

        group.start_soon(cut_soon)
        sampled = await sample(sampler, cut)
    assert sampled.ids.tolist() == [8]
    assert sampled.versions == (VersionSpan(version=3, start=0, end=1),)
    assert sampled.finish_reason is FinishReason.CUT
    assert engine.abort_asked == [f"generate-tokens-{engine.asked[0]['request_id']}"]


async def test_a_call_that_waits_for_an_engine_is_cut_with_no_tokens():
    cut = anyio.Event()
    async with served(Engine(), version=None) as (sampler, _), anyio.create_task_group() as group:

        async def cut_soon() -> None:
            await anyio.sleep(0.1)
            cut.set()

        group.start_soon(cut_soon)
        with anyio.fail_after(3):
            sampled = await sample(sampler, cut)
    assert len(sampled.ids) == 0
    assert sampled.versions == ()
    assert sampled.finish_reason is FinishReason.CUT
