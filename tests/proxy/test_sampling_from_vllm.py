"""Sampling from a real vLLM: what is recorded is what the engine saw and said."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from clawpipe.actors.engines.pool import EnginePool
from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.engine_http import EngineClient
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.upstream import EngineSampler, Sampled, Wanted
from clawpipe.pipeline.config import ProxyConfig
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import EngineState, FinishReason, Role, VersionSpan, floats, ints
from clawpipe.pipeline.tree import resolve
from engine_fixture import Oracle, prompt, worst

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

TEMPERATURE = 0.8


@asynccontextmanager
async def sampling_from(engine, stop_ids):
    class States:
        async def engines(self):
            yield {"e": EngineState(name="e", url=engine.url, version=engine.version, healthy=True)}
            await anyio.sleep_forever()

    config = ProxyConfig(temperature=TEMPERATURE)
    async with EnginePool(States(), 60) as pool, EngineClient() as client:
        yield EngineSampler(pool, client, config, stop_ids, EventLog("proxy"))


async def test_a_turn_ends_with_its_stop_token_and_all_its_tokens_have_logprob_and_version(engine):
    renderer = Renderer(engine.model_dir)
    asked = np.array(prompt(1), np.int32)
    found: list[Sampled] = []

    async def one(sampler: EngineSampler, n: int) -> None:
        found.append(await sampler.sample(Wanted(prompt=asked, max_tokens=600, call_id=f"s{n}"), anyio.Event()))

    async with sampling_from(engine, renderer.stop_ids) as sampler, anyio.create_task_group() as group:
        for n in range(16):
            group.start_soon(one, sampler, n)
    ends = [sampled for sampled in found if sampled.finish_reason is FinishReason.STOP]
    assert ends
    for sampled in found:
        *inside, last = sampled.ids.tolist()
        assert not set(inside) & set(renderer.stop_ids)
        assert (last in renderer.stop_ids) == (sampled.finish_reason is FinishReason.STOP)
        assert sampled.versions == (VersionSpan(version=engine.version, start=0, end=len(sampled.ids)),)
    oracle = Oracle(engine.model_dir)
    for sampled in (min(ends, key=lambda end: len(end.ids)), max(found, key=lambda each: len(each.ids))):
        own = oracle.logprobs(asked.tolist(), sampled.ids.tolist(), TEMPERATURE)
        assert worst(sampled.logprobs, own) < 1e-5


async def test_a_stop_text_ends_the_turn_and_all_that_was_sampled_is_there(engine):
    renderer, stops = Renderer(engine.model_dir), ("ba", "do", "ki", "<|im_start|>", "never said")
    asked = np.array(prompt(4), np.int32)
    found: list[Sampled] = []

    async def one(sampler: EngineSampler, n: int) -> None:
        wanted = Wanted(prompt=asked, max_tokens=200, call_id=f"stop{n}", stop=stops)
        found.append(await sampler.sample(wanted, anyio.Event()))

    async with sampling_from(engine, ()) as sampler, anyio.create_task_group() as group:
        for n in range(24):
            group.start_soon(one, sampler, n)
    oracle = Oracle(engine.model_dir)
    assert len({sampled.stop_text for sampled in found} - {None}) >= 2
    for sampled in found:
        text = renderer.decode(sampled.ids)
        before = renderer.decode(sampled.ids[:-1])
        assert (sampled.finish_reason is FinishReason.STOP) == (sampled.stop_text is not None)
        assert any(stop in text for stop in stops) == (sampled.stop_text is not None)
        assert (sampled.stop_text or "") in text
        assert not any(stop in before for stop in stops)  # the last token is the one that made it complete
        assert sampled.versions == (VersionSpan(version=engine.version, start=0, end=len(sampled.ids)),)
        own = oracle.logprobs(asked.tolist(), sampled.ids.tolist(), TEMPERATURE)
        assert worst(sampled.logprobs, own) < 1e-5


@pytest.mark.parametrize("after_s", [0.0, 0.5])
async def test_a_cut_call_hands_over_the_tokens_that_it_has(engine, after_s):
    cut = anyio.Event()
    asked = np.array(prompt(2), np.int32)
    async with sampling_from(engine, ()) as sampler, anyio.create_task_group() as group:

        async def cut_later() -> None:
            await anyio.sleep(after_s)
            cut.set()

        await sampler.sample(Wanted(prompt=asked, max_tokens=8, call_id="warm-up"), anyio.Event())
        group.start_soon(cut_later)
        with anyio.fail_after(4):
            sampled = await sampler.sample(Wanted(prompt=asked, max_tokens=1700, call_id="cut"), cut)
    assert sampled.finish_reason is FinishReason.CUT
    assert len(sampled.ids) < 1700
    assert len(sampled.ids) == len(sampled.logprobs)
    assert sum(span.end - span.start for span in sampled.versions) == len(sampled.ids)
    if after_s:
        assert len(sampled.ids) > 0


async def test_the_recorded_context_is_what_the_engine_saw(engine, make_parser):
    """Logprobs that a reader recomputes from records alone equal the engine's, over turns that were grafted."""

    class Stream:
        def __init__(self) -> None:
            self.records: list[Any] = []

        async def publish_call(self, record: Any, timeout_s: float) -> None:
            self.records.append(record)

    renderer, stream = Renderer(engine.model_dir), Stream()
    session = Session("r", 1, "agentloop", lambda body: Role.MAIN)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    async with sampling_from(engine, renderer.stop_ids) as sampler, anyio.create_task_group() as group:
        calls = Calls(
            renderer=renderer,
            encoder=Encoder(renderer.tokenizer),
            parser=make_parser(),
            sampler=sampler,
            recorder=Recorder(stream, 1.0),
            limits=Limits(context_tokens=2048, max_completion_tokens=40, retry_window_s=0.0),
            group=group,
            log=EventLog("proxy"),
        )
        for _ in range(3):
            body = {"model": "m", "messages": messages}
            ask = Chat().read(body)
            call = await calls.start(session, ask, body)
            await call.done.wait()
            message = json.loads(Chat().whole(ask, call.outcome))["choices"][0]["message"]
            messages = [*messages, message, {"role": "user", "content": "go on"}]
    oracle, spelled = Oracle(engine.model_dir), {}
    for made, record in zip(resolve(stream.records), stream.records, strict=True):
        shared = spelled[made.parent.call_id][: made.parent_tokens] if made.parent else []
        context = shared + made.delta.tolist()
        completion = ints(record.completion_ids).tolist()
        spelled[made.call_id] = context + completion
        assert worst(floats(record.logprobs), oracle.logprobs(context, completion, TEMPERATURE)) < 1e-5
    first, second, third = stream.records
    assert second.parent_tokens == first.prompt_tokens + len(ints(first.completion_ids))
    assert third.parent_tokens == second.prompt_tokens + len(ints(second.completion_ids))
