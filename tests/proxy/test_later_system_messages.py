"""System messages in mid-conversation, for models whose chat template takes one at the start alone."""

from __future__ import annotations

import pytest
from conversation import USER, conversation

from clawpipe.actors.proxy.messages import Message, Speaker, Text
from clawpipe.actors.proxy.render import Renderer

OPEN, END = "<|im_start|>", "<|im_end|>"
LATER = "(message.role == 'system' and not loop.first)"
REFUSING = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}"
)
HOISTING = "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}"


@pytest.fixture
def with_template(renderer, tmp_path):
    def make(start: str, later: str) -> Renderer:
        """The room's template with this at its start, and with this condition for later system messages."""
        template = str(renderer.tokenizer.chat_template)
        assert LATER in template
        renderer.tokenizer.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(start + template.replace(LATER, later))
        return Renderer(tmp_path)

    return make


def said(speaker: Speaker, text: str) -> Message:
    return Message(speaker, (Text(text),))


@pytest.mark.parametrize(
    ("start", "later"),
    [(REFUSING, LATER), ("", "false"), (HOISTING, "false")],
    ids=["refuses", "leaves out", "moves to the start"],
)
def test_a_user_says_the_later_system_messages_that_the_template_does_not_take(with_template, start, later):
    renderer = with_template(start, later)
    talk = [said(Speaker.USER, "a"), said(Speaker.SYSTEM, "note"), said(Speaker.SYSTEM, "more")]
    [gap] = renderer.gaps(talk, [], [])
    parts = [f"{OPEN}user\n{text}{END}\n" for text in ("a", "note", "more")]
    assert gap.pieces == ("".join(parts) + f"{OPEN}assistant\n",)


def test_the_first_system_message_stays_one_and_so_do_later_ones_where_the_template_takes_them(with_template, renderer):
    talk = [said(Speaker.SYSTEM, "S"), said(Speaker.USER, "a"), said(Speaker.SYSTEM, "note")]
    for model, speaker in ((renderer, "system"), (with_template(REFUSING, LATER), "user")):
        [gap] = model.gaps(talk, [], [])
        opening = f"{OPEN}system\nS{END}\n{OPEN}user\na{END}\n"
        assert gap.pieces == (f"{opening}{OPEN}{speaker}\nnote{END}\n{OPEN}assistant\n",)


def test_where_thinking_is_shown_can_be_told_of_such_a_conversation(with_template):
    model = with_template(REFUSING, LATER)
    talk = [said(Speaker.USER, "a"), said(Speaker.ASSISTANT, "b"), said(Speaker.SYSTEM, "note")]
    assert model.shown_thinking(talk, []) == [True]


@pytest.mark.anyio
async def test_a_history_with_such_messages_continues_the_sampled_tokens(with_template, parser, sampler):
    sampler.script = ["one", "two"]
    note = {"role": "system", "content": "note"}
    async with conversation(with_template(REFUSING, LATER), parser, sampler) as talk:
        first = await talk.ask(USER, note)
        await talk.ask(USER, note, first, note)
    new = f"\n{OPEN}user\nnote{END}\n{OPEN}assistant\n"
    assert talk.prompt(1) == talk.prompt(0) + talk.completion(0) + sampler.ids(new)
    assert talk.broken() == [None, None]
