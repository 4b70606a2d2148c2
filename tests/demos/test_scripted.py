"""The sampler that follows a script."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.scripted import ScriptedSampler
from clawpipe.actors.proxy.upstream import Sampled, Wanted
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import FinishReason, Role, VersionSpan

START = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def ask(renderer: Renderer, prompt: str, role: Role = Role.MAIN) -> Sampled:
    sampler = ScriptedSampler(renderer, {"take-1": ["First.", "Second."], "take-2": ["Other."]})
    ids = renderer.tokenizer.encode(prompt, add_special_tokens=False)
    wanted = Wanted(prompt=np.array(ids, np.int32), max_tokens=9, call_id="take-1.a1.c7", role=role)

    async def sample() -> Sampled:
        return await sampler.sample(wanted, anyio.Event())

    return anyio.run(sample)


def said(renderer: Renderer, prompt: str, role: Role = Role.MAIN) -> str:
    return renderer.decode(ask(renderer, prompt, role).ids)


def test_the_turn_that_is_due_is_read_off_the_prompt(renderer: Renderer) -> None:
    assert said(renderer, START) == "First."
    assert said(renderer, START + "First." + NEXT) == "Second."
    assert said(renderer, START) == "First."  # a repeated request is told the same


def test_a_turn_ends_by_itself_and_was_certain(renderer: Renderer) -> None:
    sampled = ask(renderer, START)
    assert sampled.ids[-1] == renderer.end_of_turn_id
    assert sampled.finish_reason is FinishReason.STOP
    assert sampled.logprobs.tolist() == [0.0] * len(sampled.ids)
    assert sampled.versions == (VersionSpan(version=0, start=0, end=len(sampled.ids)),)


def test_a_call_beside_the_main_conversation_takes_no_turn_of_the_script(renderer: Renderer) -> None:
    assert said(renderer, START, Role.TITLE) == "Ok."


def test_a_harness_that_goes_on_after_the_script_is_an_error(renderer: Renderer) -> None:
    with pytest.raises(EngineError, match=r"call take-1\.a1\.c7: the script has 2 turns"):
        ask(renderer, START + "First." + NEXT + "Second." + NEXT)
