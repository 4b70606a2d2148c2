"""The cold start trains on the very tokens that the proxy will later send and sample."""

from __future__ import annotations

import json
from typing import Any

import anyio

from clawpipe.actors.harness.agentloop_program import TOOLS, opening, repeat
from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.render import Encoder, Renderer
from clawpipe.learner.tokenizer import encode_turns, train_tokenizer
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import Role

TURNS = [
    'Look first.\n<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "x: 1\\ny: \\"two\\""}}\n</tool_call>',
    '<tool_call>\n{"name": "no json',
    '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>',
]


class Nowhere:
    async def publish_call(self, record: Any, timeout_s: float) -> None:
        pass


def test_the_proxys_prompts_are_the_cold_starts_sequences(tmp_path, parser, sampler):
    said = [{"role": "assistant", "content": turn} for turn in TURNS]
    tokenizer = train_tokenizer([([*opening("You work on files.", "sort the files"), *said], TOOLS)] * 3, 512, 4096)
    tokenizer.save_pretrained(tmp_path)
    renderer = Renderer(tmp_path)
    sampler.renderer = renderer
    sampler.script = list(TURNS)
    demonstration = opening("You work on files.", "sort the files")
    messages = opening("You work on files.", "sort the files")

    async def talk() -> None:
        async with anyio.create_task_group() as group:
            calls = Calls(
                renderer=renderer,
                encoder=Encoder(renderer.tokenizer),
                parser=parser,
                sampler=sampler,
                recorder=Recorder(Nowhere(), 1.0),
                limits=Limits(context_tokens=4096, max_completion_tokens=512, retry_window_s=0.0),
                group=group,
                log=EventLog("proxy"),
            )
            session = Session("r", 1, "agentloop", lambda body: Role.MAIN)
            for turn in TURNS:
                body = {"model": "policy", "messages": messages, "tools": TOOLS}
                ask = Chat().read(body)
                call = await calls.start(session, ask, body)
                await call.done.wait()
                answer = json.loads(Chat().whole(ask, call.outcome))["choices"][0]["message"]
                messages.append(repeat(answer))
                demonstration.append({"role": "assistant", "content": turn})
                for made in answer.get("tool_calls", []):
                    messages.append({"role": "tool", "tool_call_id": made["id"], "content": "ok\n"})
                    demonstration.append({"role": "tool", "content": "ok\n"})
                if not answer.get("tool_calls"):
                    messages.append({"role": "user", "content": "again"})
                    demonstration.append({"role": "user", "content": "again"})

    anyio.run(talk)
    ids, is_sampled = encode_turns(tokenizer, demonstration, TOOLS)
    assert sampler.prompts[-1] + sampler.said[-1].ids.tolist() == ids
    assert [token for token, sampled in zip(ids, is_sampled, strict=True) if sampled] == [
        token for answer in sampler.said for token in answer.ids.tolist()
    ]
