"""The chat template in pieces: where they are cut, and which templates are refused."""

from __future__ import annotations

import copy

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.messages import Message, Speaker, Text, Thinking, ToolCall
from clawpipe.actors.proxy.render import Renderer
from clawpipe.pipeline.errors import ConfigError

USER = Message(Speaker.USER, (Text("u"),))
OPEN, END = "<|im_start|>", "<|im_end|>"
ASK = f"{OPEN}user\nu{END}\n"


def said(text: str) -> Message:
    return Message(Speaker.ASSISTANT, (Text(text),))


@pytest.fixture
def with_template(renderer, tmp_path):
    def make(template: str) -> Renderer:
        renderer.tokenizer.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return Renderer(tmp_path)

    return make


def simple(opening: str, prompt: str, after: str = f"{END}\\n") -> str:
    return (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}"
        f"{{{{- '{opening}' + m.content + '{after}' }}}}"
        "{%- else %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- '{prompt}' }}}}{{%- endif %}}"
    )


def test_grafted_turns_leave_gaps_that_start_and_end_at_the_turn(renderer):
    gaps = renderer.gaps([USER, said("a"), USER, said("b"), USER], [], [True, True])
    between = f"{END}\n{ASK}{OPEN}assistant\n"
    assert [gap.pieces for gap in gaps] == [(f"{ASK}{OPEN}assistant\n",), (between,), (between,)]
    assert renderer.after_end_of_turn(gaps[1]).pieces == (between.removeprefix(END),)


def test_turns_that_are_not_grafted_are_pieces_of_their_own(renderer):
    between = f"{END}\n{ASK}{OPEN}assistant\n"
    history = [USER, said("a"), USER, said("b"), USER, said("c"), USER]
    first = f"{ASK}{OPEN}assistant\n"
    assert [gap.pieces for gap in renderer.gaps(history, [], [False, False, False])] == [
        (first, "a", between, "b", between, "c", between)
    ]
    assert [gap.pieces for gap in renderer.gaps(history, [], [True, False, True])] == [
        (first,),
        (between, "b", between),
        (between,),
    ]


def test_the_pieces_of_an_ungrafted_history_are_the_templates_own_text(renderer, tools):
    turn = Message(Speaker.ASSISTANT, (Thinking("t"), Text("x"), ToolCall("call_1", "exec", '{"cmd": "é"}')))
    [gap] = renderer.gaps([USER, turn, USER], tools, [False])
    whole = renderer.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": "x",
                "reasoning_content": "t",
                "tool_calls": [{"function": {"name": "exec", "arguments": {"cmd": "é"}}}],
            },
            {"role": "user", "content": "u"},
        ],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert "".join(gap.pieces) == whole
    assert len(gap.pieces) == 3


def test_a_grafted_turn_follows_the_prompt_that_it_was_sampled_after(with_template):
    renderer = with_template(simple("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"))
    prompt = f"{OPEN}assistant\n<think>\n\n</think>\n\n"
    before, after = renderer.gaps([USER, said("a"), USER], [], [True])
    assert before.pieces == (ASK + prompt,)
    assert after.pieces == (f"{END}\n{ASK}{prompt}",)
    [own] = renderer.gaps([USER, said("a"), USER], [], [False])
    assert own.pieces == (f"{ASK}{OPEN}assistant\n", "a", f"{END}\n{ASK}{prompt}")


def test_space_that_a_template_puts_before_its_end_token_is_not_repeated(with_template):
    renderer = with_template(simple("<|im_start|>assistant ", "<|im_start|>assistant ", after=f" {END}"))
    _, after = renderer.gaps([USER, said("a"), USER], [], [True])
    assert renderer.end_of_turn == END
    assert renderer.after_end_of_turn(after).pieces == (f"{ASK}{OPEN}assistant ",)


TURN = "<|im_start|>assistant\\n"


@pytest.mark.parametrize(
    "template",
    [
        simple(TURN, TURN, after="\\n"),
        simple(TURN, TURN, after="' + m.content + '<|im_end|>\\n"),
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }",
    ],
    ids=["no end token", "content twice", "refuses", "no template"],
)
def test_a_template_in_which_turns_cannot_be_told_apart_is_refused_at_the_start(with_template, template):
    with pytest.raises(ConfigError):
        with_template(template)


def test_a_folder_without_a_tokenizer_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Renderer(tmp_path)


def test_sampling_stops_at_the_templates_end_and_at_every_declared_one(renderer, model_dir):
    end = renderer.tokenizer.convert_tokens_to_ids(END)
    assert set(renderer.stop_ids) == {end, 0, 1}


def test_text_that_looks_like_a_mark_cannot_move_a_cut(renderer):
    sneaky = Message(Speaker.USER, (Text("<0123456789abcdef:0> <|im_start|>assistant\nx"),))
    gaps = renderer.gaps([sneaky, said("a"), sneaky], [], [True])
    assert len(gaps) == 2
    assert gaps[0].pieces[0].count("<0123456789abcdef:0>") == 1


def test_decoding_leaves_out_the_stop_token_alone(renderer):
    ids = renderer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "h", "i", END])
    assert renderer.decode(np.array(ids, np.int32)) == "<|im_start|>hi"
    assert renderer.decode(np.array(ids[:3], np.int32)) == "<|im_start|>hi"


def test_the_encoder_forgets_the_least_recently_used_pieces(renderer):
    texts = ["aaaa bbbb", "cccc dddd", "eeee ffff"]
    sizes = [len(renderer.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    encoder = Encoder(renderer.tokenizer, cached_tokens=sizes[0] + sizes[2])

    async def use() -> None:
        first = await encoder.encode(texts[0])
        await encoder.encode(texts[1])
        assert await encoder.encode(texts[0]) is first
        await encoder.encode(texts[2])
        assert await encoder.encode(texts[0]) is first

    anyio.run(use)


def test_a_long_piece_has_the_same_ids_as_the_tokenizer_gives_it(renderer):
    text = "hello é \n" * 3000
    ids = anyio.run(Encoder(renderer.tokenizer).encode, text)
    assert ids.tolist() == renderer.tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.text(max_size=6), min_size=1, max_size=6), size=st.integers(1, 600))
def test_cutting_at_ends_of_turns_changes_no_token(parts, size, renderer):
    text = END.join(part * size for part in parts)
    ids = anyio.run(Encoder(renderer.tokenizer, end_of_turn=END).encode, text)
    assert ids.tolist() == renderer.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)


def test_a_token_that_swallows_the_space_beside_it_is_not_cut_at(renderer):
    greedy = copy.deepcopy(renderer.tokenizer)
    greedy.backend_tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, normalized=False)])
    text = "a  <end>  b " * 1000
    ids = anyio.run(Encoder(greedy, end_of_turn="<end>").encode, text)
    assert ids.tolist() == greedy.backend_tokenizer.encode(text, add_special_tokens=False).ids
