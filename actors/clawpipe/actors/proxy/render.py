"""The model's own chat template, rendered in pieces between which sampled token ids can be put.

Every assistant turn is rendered as a mark that occurs nowhere else, and the text is cut at the marks: what is
left are the contexts before, between and after the turns. `encoder` turns pieces into ids, each on its own, so
that a piece has the same tokens wherever and whenever it is rendered.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from msgspec import Struct

from clawpipe.actors.proxy.messages import Message, Speaker, parse_object
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.records import IntArray


class Gap(Struct, frozen=True):
    """What is encoded between two grafted turns: pieces, each on its own.

    The first piece follows the end-of-turn token of the turn before, or opens the prompt; the last one ends
    with the start of the next turn.
    """

    pieces: tuple[str, ...]


class TemplateRefusal(Exception):
    """The chat template does not accept this conversation."""


class Renderer:
    """A model folder's tokenizer and chat template. ConfigError when turns cannot be told apart in its output.

    `end_of_turn` (id: `end_of_turn_id`) is the token that ends a turn; sampling stops at any of `stop_ids`.
    """

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = _load_tokenizer(model_dir)
        self._model_dir = model_dir
        self._nonce = secrets.token_hex(8)
        self._opening, self.generation_prompt, self.end_of_turn = self._probe()
        self._later_system = self._probe_later_system()
        self.end_of_turn_id = int(self.tokenizer.convert_tokens_to_ids(self.end_of_turn))
        self.stop_ids = self._stop_ids()

    def gaps(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], grafted: Sequence[bool]) -> list[Gap]:
        """What stands around the grafted turns: one more than there are of them.

        `grafted` has one entry per assistant turn. Turns that are not grafted are pieces of their own.
        TemplateRefusal when the template raises.
        """
        contexts = self._contexts(messages, tools, [True] * len(grafted))
        runs = contexts if all(grafted) else self._contexts(messages, tools, grafted)
        ends = [turn + 1 for turn, graft in enumerate(grafted) if graft] + [len(contexts)]
        found, start = [], 0
        for run, end in zip(runs, ends, strict=True):
            found.append(_carve(run, contexts[start:end]))
            start = end
        return [self._open_next(pieces, last=n == len(found) - 1) for n, pieces in enumerate(found)]

    def decode(self, ids: IntArray) -> str:
        """Text of sampled ids without the stop token at their end; bytes that are no UTF-8 become U+FFFD."""
        listed = ids.tolist()
        if listed and listed[-1] in self.stop_ids:
            listed.pop()
        text: str = self.tokenizer.backend_tokenizer.decode(listed, skip_special_tokens=False)
        return text

    def after_end_of_turn(self, gap: Gap) -> Gap:
        """The gap after a turn whose sampled ids contain the end-of-turn token already."""
        first, *rest = gap.pieces
        after = first.lstrip()
        return Gap((after.removeprefix(self.end_of_turn), *rest)) if after.startswith(self.end_of_turn) else gap

    def before_past_turn(self, gap: Gap) -> Gap:
        """The gap before a turn that stands as a past one and not as it was sampled."""
        *rest, before = gap.pieces
        if not before.endswith(self.generation_prompt):
            return gap
        return Gap((*rest, before.removesuffix(self.generation_prompt) + self._opening))

    def shown_thinking(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[bool]:
        """Per assistant turn: whether the chat template shows the thinking of a turn that stands there."""
        marks: list[str] = []
        rendered = []
        for at, message in enumerate(messages):
            rendered.append(self._placed(message, at))
            if message.speaker is Speaker.ASSISTANT:
                marks.append(f"<{self._nonce}:{len(marks)}>")
                rendered[-1]["reasoning_content"] = marks[-1]
        text = self._render(rendered, tools)
        return [mark in text for mark in marks]

    def _open_next(self, pieces: list[str], *, last: bool) -> Gap:
        """A grafted turn was sampled after the generation prompt, which may say more than a past turn's opening."""
        if not last and pieces[-1].endswith(self._opening):
            pieces[-1] = pieces[-1].removesuffix(self._opening) + self.generation_prompt
        return Gap(tuple(pieces))

    def _contexts(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], marked: Sequence[bool]
    ) -> list[str]:
        """The rendered text, cut at the turns that `marked` selects."""
        turns = iter(marked)
        marks: list[str] = []
        rendered = []
        for at, message in enumerate(messages):
            if message.speaker is Speaker.ASSISTANT and next(turns):
                marks.append(f"<{self._nonce}:{len(marks)}>")
                rendered.append({"role": "assistant", "content": marks[-1]})
            else:
                rendered.append(self._placed(message, at))
        return _cut(self._render(rendered, tools), marks)

    def _placed(self, message: Message, at: int) -> dict[str, Any]:
        """The message at this place of a conversation, with a role that the template takes there."""
        body = _template_message(message)
        return {**body, "role": self._later_system.value} if at and message.speaker is Speaker.SYSTEM else body

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], *, prompt: bool = True) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as err:
            raise TemplateRefusal(f"the model's chat template refuses the conversation: {err}") from err
        return text

    def _probe(self) -> tuple[str, str, str]:
        """(opening of a past turn, generation prompt, end of turn), read off two small conversations."""
        mark = f"<{self._nonce}>"
        ask, turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": mark}
        try:
            before = self._render([ask], [], prompt=False)
            prompt = self._render([ask], []).removeprefix(before)
            past = self._render([ask, turn, ask], []).removeprefix(before)
            _, _, after = self._render([ask, turn], [], prompt=False).partition(mark)
        except TemplateRefusal as err:
            raise ConfigError(f"{self._model_dir}: {err}") from err
        opening, found, rest = past.partition(mark)
        ends = [token for token in self._special_tokens() if after.lstrip().startswith(token)]
        if not found or mark in rest or not prompt or not ends:
            raise ConfigError(
                f"{self._model_dir}: the chat template does not end an assistant turn with a special token, or does "
                "not repeat it as it was said; give a model folder whose template does"
            )
        return opening, prompt, max(ends, key=len)

    def _probe_later_system(self) -> Speaker:
        """Who says the system messages that are not a conversation's first, which harnesses put anywhere in it.

        Some templates refuse them, leave them out, or move them to the start, where they would change the tokens of
        all that was said before: for such a model a user says them, in their place.
        """
        mark = f"<{self._nonce}>"
        ask, note = {"role": "user", "content": "a"}, {"role": "system", "content": mark}
        before = self._render([ask], [], prompt=False)
        try:
            text = self._render([ask, note, ask], [], prompt=False)
        except TemplateRefusal:
            return Speaker.USER
        return Speaker.SYSTEM if text.startswith(before) and mark in text else Speaker.USER

    def _special_tokens(self) -> list[str]:
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values()]

    def _stop_ids(self) -> tuple[int, ...]:
        """The template's end of turn, and what the model folder declares as its end tokens."""
        found = {self.end_of_turn_id}
        if self.tokenizer.eos_token_id is not None:
            found.add(int(self.tokenizer.eos_token_id))
        for name in ("config.json", "generation_config.json"):
            found |= _declared_ends(self._model_dir / name)
        return tuple(sorted(found))


def _load_tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer  # brings torch along: seconds, for the caller's thread and not for imports

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError(f"{model_dir}: no tokenizer can be loaded ({err}); give a Hugging Face model folder") from err
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        raise ConfigError(f"{model_dir}: needs a tokenizer.json and a chat template; add them to the folder")
    return tokenizer


def _declared_ends(path: Path) -> set[int]:
    try:
        declared = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        return set()
    return set(declared) if isinstance(declared, list) else {declared} - {None}


def _template_message(message: Message) -> dict[str, Any]:
    """The message as templates expect it: arguments as objects, so that the template writes them its way."""
    body: dict[str, Any] = {"role": message.speaker.value, "content": message.text}
    if message.speaker is Speaker.ASSISTANT:
        if message.thinking:
            body["reasoning_content"] = message.thinking
        calls = [(call, parse_object(call.arguments)) for call in message.calls]
        if calls:
            body["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments if given is None else given},
                }
                for call, given in calls
            ]
    return body


def _cut(text: str, marks: list[str]) -> list[str]:
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        if not found or mark in text:
            raise TemplateRefusal("the model's chat template does not repeat every assistant turn exactly once")
        pieces.append(piece)
    return [*pieces, text]


def _carve(run: str, contexts: list[str]) -> list[str]:
    """Cuts a run of text into the contexts that it holds and the turns between them.

    Where the template renders a context differently beside a real turn, the run stays whole.
    """
    if len(contexts) == 1:
        return [run]
    first, *inner, last = contexts
    if not run.startswith(first) or not run.endswith(last):
        return [run]
    pieces, at = [first], len(first)
    for context in inner:
        found = run.find(context, at)
        if found < 0:
            return [run]
        pieces += [run[at:found], context]
        at = found + len(context)
    end = len(run) - len(last)
    return [*pieces, run[at:end], last] if at <= end else [run]
