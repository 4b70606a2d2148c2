"""The cold start trains on the very tokens that the proxy will later send and sample."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest

from clawpipe.actors.harness.agentloop_program import TOOLS, opening, repeat
from clawpipe.actors.proxy.calls import Calls, Limits
from clawpipe.actors.proxy.capture import Recorder
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.recording.rolls import pieces_of
from clawpipe.learner.tokenizer import Piece, encode_pieces, encode_turns, train_tokenizer
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.packing import Branch
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


@dataclass
class Talk:
    """A conversation through the proxy."""

    tokenizer: Any
    renderer: Renderer
    demonstration: list[dict[str, Any]]
    tokens: np.ndarray  # of the last prompt and what followed it
    sampled: np.ndarray  # indices into `tokens`


@pytest.fixture
def talked(tmp_path, parser, sampler):
    """(tokenizer, the conversation as a demonstration, the proxy's tokens, which of them were sampled)."""
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
                encoder=Encoder(renderer.tokenizer, end_of_turn=renderer.end_of_turn),
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
    ids = sampler.prompts[-1] + sampler.said[-1].ids.tolist()
    return Talk(tokenizer, renderer, demonstration, np.array(ids, np.int32), _sampled(sampler))


def _sampled(sampler: Any) -> np.ndarray:
    """Where in the last prompt and its answer the turns stand."""
    starts = [len(prompt) for prompt in sampler.prompts]
    turns = [np.arange(at, at + len(turn.ids)) for at, turn in zip(starts, sampler.said, strict=True)]
    return np.concatenate(turns).astype(np.int32)


def test_the_proxys_prompts_are_the_cold_starts_sequences(talked: Talk) -> None:
    ids, is_sampled = encode_turns(talked.tokenizer, talked.demonstration, TOOLS)
    assert talked.tokens.tolist() == ids
    assert talked.sampled.tolist() == np.flatnonzero(is_sampled).tolist()


def test_what_is_read_off_a_recording_is_cut_where_the_proxy_cut_it(talked: Talk) -> None:
    """A recording is taken down in other tokens than those that are trained: its pieces must come to the same."""
    nothing = np.zeros(len(talked.sampled))
    branch = Branch(
        tokens=talked.tokens,
        entries=talked.sampled,
        logprobs=nothing.astype(np.float32),
        versions=nothing.astype(np.int32),
    )
    pieces = [Piece(text, sampled) for text, sampled in pieces_of(branch, talked.renderer)]
    ids, is_sampled = encode_pieces(talked.tokenizer, pieces)
    assert ids == talked.tokens.tolist()
    assert np.flatnonzero(is_sampled).tolist() == talked.sampled.tolist()
    assert [piece.text for piece in pieces if piece.sampled] == [f"{turn}<|im_end|>" for turn in TURNS]
