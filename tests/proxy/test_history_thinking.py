"""history_thinking: earlier thinking stays as it was sampled, or goes where the chat template leaves it out."""

from __future__ import annotations

import numpy as np
import pytest
from conversation import USER, conversation, result

from clawpipe.actors.proxy.render import Renderer

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "exec", "arguments": {"cmd": "ls"}}\n</tool_call>'
THINK = "<think>\nhm, é\n</think>\n\n"
AGAIN = {"role": "user", "content": "again"}


@pytest.fixture
def forgetful(renderer, tmp_path) -> Renderer:
    """A model whose template shows thinking only behind the last message of the user."""
    template = str(renderer.tokenizer.chat_template)
    shown = "{%- if message.reasoning_content %}"
    assert shown in template
    newest = (
        "{%- set last = namespace(at=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set last.at = loop.index0 %}{%- endif %}{%- endfor %}"
    )
    forgetting = newest + template.replace(shown, shown.replace(" %}", " and loop.index0 > last.at %}"))
    renderer.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(forgetting)
    return Renderer(tmp_path)


async def loop_and_next_message(talk, sampler) -> None:
    """A turn with a tool call, one without, and a new message of the user."""
    sampler.script = [THINK + CALL, THINK + "Done.", "Yes."]
    first = await talk.ask(USER)
    history = [USER, first, result(first["tool_calls"][0])]
    second = await talk.ask(*history)
    await talk.ask(*history, second, AGAIN)


async def test_as_the_template_says_thinking_goes_with_the_next_message_of_the_user(forgetful, make_parser, sampler):
    async with conversation(forgetful, make_parser("hermes", "qwen3"), sampler, keep_thinking=False) as talk:
        await loop_and_next_message(talk, sampler)
    assert talk.prompt(1)[: len(talk.prompt(0)) + len(talk.completion(0))] == talk.prompt(0) + talk.completion(0)
    pieces = ["\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n"]
    pieces.append("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    between, after = map(sampler.ids, pieces)
    left = [[*sampler.ids(said), forgetful.end_of_turn_id] for said in (CALL, "Done.")]
    assert talk.prompt(2) == talk.prompt(0) + left[0] + between + left[1] + after
    assert talk.broken() == [None, None, "thinking_stripped"]
    assert talk.session.broken == {"thinking_stripped": 2}


async def test_kept_thinking_never_breaks_the_chain_whatever_the_template_does(forgetful, make_parser, sampler):
    async with conversation(forgetful, make_parser("hermes", "qwen3"), sampler) as talk:
        await loop_and_next_message(talk, sampler)
    for number in (1, 2):
        before = talk.prompt(number - 1) + talk.completion(number - 1)
        assert talk.prompt(number)[: len(before)] == before
    assert talk.broken() == [None, None, None]


async def test_a_template_that_shows_all_thinking_strips_none(renderer, make_parser, sampler):
    async with conversation(renderer, make_parser("hermes", "qwen3"), sampler, keep_thinking=False) as talk:
        await loop_and_next_message(talk, sampler)
    before = talk.prompt(1) + talk.completion(1)
    assert talk.prompt(2)[: len(before)] == before
    assert talk.broken() == [None, None, None]


async def test_a_harness_that_leaves_thinking_out_changes_nothing_about_it(forgetful, make_parser, sampler):
    sampler.script = [THINK + CALL, "Done."]
    async with conversation(forgetful, make_parser("hermes", "qwen3"), sampler, keep_thinking=False) as talk:
        first = await talk.ask(USER)
        del first["reasoning_content"]
        await talk.ask(USER, first, result(first["tool_calls"][0]))
    before = talk.prompt(0) + talk.completion(0)
    assert talk.prompt(1)[: len(before)] == before


async def test_white_space_that_shares_its_token_with_the_answer_stays(forgetful, make_parser, sampler, make_sampled):
    glued = sampler.ids("<think>\nhm\n</think>") + sampler.ids(" world")
    sampler.script = [make_sampled([*glued, forgetful.end_of_turn_id]), "Yes."]
    async with conversation(forgetful, make_parser("hermes", "qwen3"), sampler, keep_thinking=False) as talk:
        first = await talk.ask(USER)
        await talk.ask(USER, first, AGAIN)
    left = [*sampler.ids(" world"), forgetful.end_of_turn_id]
    assert talk.prompt(1)[: len(talk.prompt(0)) + len(left)] == talk.prompt(0) + left
    assert talk.broken() == [None, "thinking_stripped"]


async def test_the_generation_prompts_own_opening_is_not_shown_before_a_stripped_turn(
    forgetful, tmp_path, make_parser, sampler
):
    template = str(forgetful.tokenizer.chat_template).replace(
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}",
    )
    forgetful.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    opening = Renderer(tmp_path)
    assert opening.generation_prompt.endswith("<think>\n")
    sampler.script = ["hm\n</think>\n\nDone.", "ok\n</think>\n\nYes."]
    async with conversation(opening, make_parser("hermes", "qwen3"), sampler, keep_thinking=False) as talk:
        first = await talk.ask(USER)
        await talk.ask(USER, first, AGAIN)
    text = opening.decode(np.array(talk.prompt(1)))
    assert "<|im_start|>assistant\nDone.<|im_end|>\n<|im_start|>user\nagain" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
