r"""The tiny model's tokenizer: byte-level BPE with Qwen's marks and a chat template of Qwen's form.

Made once by `tiny`, then read from the model's folder by whoever needs it. `encode_turns` cuts a conversation
the way the proxy does: what stands before an assistant turn and the turn itself are encoded apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Not special, as in Qwen3: decoding keeps them, so a tool parser sees them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A tool's schema line stays in one piece: it is constant, and as a handful of tokens it neither slows a prompt
# down nor hides the task from a small model. Elsewhere a piece is a word with the space before it, or a run of
# other characters: a word inside quotes or a path has the same tokens wherever it stands, which makes copying
# it learnable, and JSON scaffolding (`": "`) is one token.
SCHEMA = r'\{"(?:type|function)": [^\n]*'
PIECES = rf"{SCHEMA}| ?\w+|(?:(?!{SCHEMA})\W)+?(?= \w)|(?:(?!{SCHEMA})\W)+"

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- '\\n\\n' if system }}
        {{- '# Tools\\n\\nThese functions can be called:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' }}{{- tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nA call is a JSON object with name and arguments:\\n' }}
        {{- '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Piece(Struct, frozen=True):
    """A part of a conversation that is encoded on its own."""

    text: str
    sampled: bool  # an assistant turn with its end mark: what the model must learn to say


def train_tokenizer(
    conversations: Iterable[tuple[Messages, Tools]],
    vocab_size: int,
    context_tokens: int,
    *,
    recorded: Iterable[str] = (),
    atoms: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer trained on conversations as the chat template renders them, and on recorded texts.

    It has at most `vocab_size` tokens beside the `atoms`, texts that are one token each. Its size is a multiple of 32
    (vLLM's kernels), and no id is unused. Same texts, same tokenizer.
    """
    blank = _wrap(Tokenizer(models.BPE()), context_tokens)
    texts = (render(blank, messages, tools, prompt=False) for messages, tools in conversations)
    pieces = [piece for text in chain(texts, recorded) for piece in between_marks(text)]
    num_marks = len(SPECIAL) + len(MARKS)
    bpe = _train_bpe(pieces, vocab_size - num_marks)
    num_whole = num_marks + len(atoms)
    size = (bpe.get_vocab_size() + num_whole) // 32 * 32
    if size != bpe.get_vocab_size() + num_whole:
        bpe = _train_bpe(pieces, size - num_whole)  # the same merges without the last few
    return _wrap(bpe, context_tokens, atoms)


def syllable_tokenizer(texts: Iterable[str], vocab_size: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer for any text, with the marks and the chat template; like every one here it is exact to the byte."""
    return _wrap(_train_bpe(texts, vocab_size), context_tokens)


def render(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Tools, *, prompt: bool) -> str:
    """The conversation as text; with `prompt`, up to and including the start of the next assistant turn."""
    text: str = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
    )
    return text


def pieces_of(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Tools) -> Iterator[Piece]:
    """The conversation up to its last assistant turn, as the pieces that are encoded apart.

    An assistant message's `content` is the raw text that the model should sample. ValueError when the template
    does not repeat an assistant turn as it was said.
    """
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], tools, prompt=True)
        if not before.startswith(done):
            raise ValueError(f"message {index}: the chat template changes an earlier assistant turn")
        turn = message["content"] + END_OF_TURN
        yield Piece(before[len(done) :], sampled=False)
        yield Piece(turn, sampled=True)
        done = before + turn


def encode_turns(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Tools) -> tuple[list[int], list[bool]]:
    """Token ids of the conversation up to its last assistant turn, and which of them are sampled ones."""
    return encode_pieces(tokenizer, pieces_of(tokenizer, messages, tools))


def encode_pieces(tokenizer: PreTrainedTokenizerFast, pieces: Iterable[Piece]) -> tuple[list[int], list[bool]]:
    """Token ids of the pieces, each encoded on its own, and which of them are sampled ones."""
    ids: list[int] = []
    sampled: list[bool] = []
    for piece in pieces:
        part = tokenizer.encode(piece.text, add_special_tokens=False)
        ids += part
        sampled += [piece.sampled] * len(part)
    return ids, sampled


def between_marks(text: str) -> list[str]:
    """What BPE learns from: marks are tokens of their own and take part in no merge."""
    return [part for part in re.split("|".join(map(re.escape, SPECIAL + MARKS)), text) if part]


def _train_bpe(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _wrap(bpe: Tokenizer, context_tokens: int, atoms: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL], True)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (*MARKS, *atoms)])
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, END_OF_TEXT
    return tokenizer
