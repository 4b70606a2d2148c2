"""An engine that says what a script says, in tokens that no tokenizer would choose: encoding its text again never
gives its ids back, so that a call whose prompt spells them got them from the graft."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.upstream import Sampled, Wanted
from clawpipe.pipeline.records import FinishReason, IntArray, Role, VersionSpan

MARKS = re.compile(r"(</?(?:tool_call|think)>)")
SURPLUS = "Nothing more is to be done."


@dataclass(frozen=True)
class Say:
    """One answer. `delay_s`: how long the engine takes; `until`: from when so many calls of a role have been answered;
    `unfinished`: its token limit ends the turn; `endless`: it is never done and waits to be cut."""

    text: str
    delay_s: float = 0.0
    until: tuple[Role, int] | None = None
    unfinished: bool = False
    endless: bool = False


@dataclass(frozen=True)
class Moment:
    """When a turn is wanted: the prompt's text, and which call of its role it is, from 0."""

    prompt: str
    role: Role
    number: int
    max_tokens: int


Line = str | Say | Callable[[Moment], "str | Say"]
Script = Mapping[Role, Sequence[Line]]


@dataclass(frozen=True, eq=False)
class Said:
    """A call as the engine saw it."""

    call_id: str
    role: Role
    prompt: IntArray
    text: str
    sampled: Sampled


@dataclass
class ScriptedEngine:
    """A `Sampler`. Per role one line after the other; `surplus` counts, per role, the calls that had no line left."""

    renderer: Renderer
    script: Script
    said: list[Said] = field(default_factory=list)
    surplus: Counter[Role] = field(default_factory=Counter)
    asked: Counter[Role] = field(default_factory=Counter)

    async def ready(self) -> None:
        """Always."""

    async def sample(self, wanted: Wanted, cut: anyio.Event) -> Sampled:
        say = self._line(wanted)
        ids = self._ids(say.text)
        if not say.unfinished:
            ids = [*ids, self.renderer.end_of_turn_id]
        finish = FinishReason.LENGTH if say.unfinished else FinishReason.STOP
        if await self._is_cut(say, cut):
            ids, finish = ids[:3], FinishReason.CUT
        assert len(ids) <= wanted.max_tokens, f"{len(ids)} tokens scripted where {wanted.max_tokens} were allowed"
        sampled = self._sampled(ids, finish)
        self.said.append(Said(wanted.call_id, wanted.role, wanted.prompt.copy(), say.text, sampled))
        return sampled

    async def _is_cut(self, say: Say, cut: anyio.Event) -> bool:
        """Takes as long as the script wants; whether the call was cut before."""
        if not (say.endless or say.delay_s or say.until):
            return False
        async with anyio.create_task_group() as group:
            group.start_soon(self._pass_time, say, group.cancel_scope)
            await cut.wait()
            group.cancel_scope.cancel()
            return True
        return False

    async def _pass_time(self, say: Say, waiting: anyio.CancelScope) -> None:
        while say.endless or not self._is_time(say.until):  # noqa: ASYNC110  # an event per answer would be made for it
            await anyio.sleep(0.02)
        await anyio.sleep(say.delay_s)
        waiting.cancel()

    def _is_time(self, until: tuple[Role, int] | None) -> bool:
        return until is None or sum(said.role is until[0] for said in self.said) >= until[1]

    def _line(self, wanted: Wanted) -> Say:
        number = self.asked[wanted.role]
        self.asked[wanted.role] += 1
        lines = self.script.get(wanted.role, ())
        if number >= len(lines):
            self.surplus[wanted.role] += 1
            return Say(SURPLUS)
        line = lines[number]
        if callable(line):
            prompt = self.renderer.tokenizer.backend_tokenizer.decode(wanted.prompt.tolist(), skip_special_tokens=False)
            line = line(Moment(prompt, wanted.role, number, wanted.max_tokens))
        return line if isinstance(line, Say) else Say(line)

    def _ids(self, text: str) -> list[int]:
        """Marks are tokens of their own; all else is encoded two letters at a time."""
        encode = self.renderer.tokenizer.backend_tokenizer.encode
        pieces: list[str] = []
        for part in MARKS.split(text):
            pieces += [part] if MARKS.fullmatch(part) else [part[n : n + 2] for n in range(0, len(part), 2)]
        return [each for piece in pieces for each in encode(piece, add_special_tokens=False).ids]

    def _sampled(self, ids: list[int], finish: FinishReason) -> Sampled:
        """Logprobs that occur once in a rollout, and two weight versions, changed in mid-turn."""
        half, turn = len(ids) // 2, len(self.said)
        spans = (VersionSpan(version=turn, start=0, end=half), VersionSpan(version=turn + 1, start=half, end=len(ids)))
        return Sampled(
            ids=np.array(ids, np.int32),
            logprobs=-(turn + np.arange(1, len(ids) + 1, dtype=np.float32) / 8192),
            versions=tuple(span for span in spans if span.end > span.start),
            finish_reason=finish,
        )


def call(name: str, arguments: str | Mapping[str, Any]) -> str:
    """A tool call as the model writes it; `arguments` as text stays as it is."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
