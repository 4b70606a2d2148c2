"""A conversation as token ids: what the rollout sampled stands as it was sampled, the rest is encoded, piece by piece.

Where a turn cannot be grafted, or loses its thinking because the chat template says so, the chain of the rollout's
tokens forks; the reason is handed over with the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from msgspec import Struct

from clawpipe.actors.proxy.cutting import Cutter
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.graft import Broken, Graft, Said
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.messages import Ask, CallError, Fault, Message, Speaker
from clawpipe.actors.proxy.render import Gap, Renderer, TemplateRefusal
from clawpipe.pipeline.records import IntArray

INLINE_MESSAGES = 200  # longer conversations take milliseconds, and are rendered in a thread
INLINE_CHARS = 100_000
INLINE_ARGUMENT_CHARS = 16_000  # JSON that is read, compared and written costs ten times as much as text
LARGE_MESSAGES = 1000  # those that take much longer still go one at a time
LARGE_CHARS = 1_000_000


class Written(Struct, frozen=True):
    """A prompt, and the turns of it that are not what was sampled, with the reason."""

    ids: IntArray  # int32 [P]
    broken: tuple[tuple[Message, Broken], ...]
    grafted: tuple[Said, ...]  # the sampled turns that it holds, in whole or in part


class _Piece(Struct, frozen=True, eq=False):
    """Ids that may stand for a turn of the history."""

    said: Said
    graft: Graft


class _Plan(Struct, frozen=True, eq=False):
    """What stands where in a prompt."""

    turns: list[Message]  # of the assistant
    found: list[list[_Piece] | Broken]  # per turn
    gaps: list[Gap]  # round the turns that are found
    shown: list[bool]  # per turn: whether its thinking stays


class _Draft:
    """A prompt while it is written."""

    def __init__(self) -> None:
        self.parts: list[IntArray] = []
        self.turn_is_complete = False  # the last part ends with the end-of-turn token
        self.broken: list[tuple[Message, Broken]] = []
        self.grafted: list[Said] = []


class Prompts:
    """Writes prompts. `keep_thinking`: earlier turns keep their thinking, whatever the chat template does."""

    def __init__(self, renderer: Renderer, encoder: Encoder, cutter: Cutter, *, keep_thinking: bool) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._cutter = cutter
        self._keep_thinking = keep_thinking
        self._large = anyio.CapacityLimiter(1)

    async def write(self, session: Session, ask: Ask) -> Written:
        """The prompt of this request. CallError (INVALID) when the chat template refuses the conversation."""
        try:
            return await self._write(session, ask)
        except (TemplateRefusal, RecursionError) as err:
            raise CallError(Fault.INVALID, f"The conversation cannot be rendered: {err}", "messages") from err

    async def _write(self, session: Session, ask: Ask) -> Written:
        plan = await self._planned(session, ask)
        *gaps, last = plan.gaps
        draft, gaps_left = _Draft(), iter(gaps)
        for turn, choices, keep in zip(plan.turns, plan.found, plan.shown, strict=True):
            if isinstance(choices, Broken):
                draft.broken.append((turn, choices))
            else:
                gap = self._following(draft, next(gaps_left))
                piece = await self._continuing(session, draft, gap, choices)
                await self._graft(draft, gap, turn, piece, keep=keep)
        draft.parts += await self._encoded(self._following(draft, last))
        return Written(np.concatenate(draft.parts), tuple(draft.broken), tuple(draft.grafted))

    async def _planned(self, session: Session, ask: Ask) -> _Plan:
        if _is_small(ask):
            return self._plan(session, ask)
        is_large = len(ask.messages) > LARGE_MESSAGES or ask.num_chars > LARGE_CHARS
        return await anyio.to_thread.run_sync(self._plan, session, ask, limiter=self._large if is_large else None)

    def _plan(self, session: Session, ask: Ask) -> _Plan:
        messages = [message for message in ask.messages if _is_there(session, message)]
        turns = [message for message in messages if message.speaker is Speaker.ASSISTANT]
        found = [self._find(session, turn) for turn in turns]
        gaps = self._renderer.gaps(messages, ask.tools, [not isinstance(each, Broken) for each in found])
        return _Plan(turns, found, gaps, self._shown(messages, ask.tools, found))

    def _find(self, session: Session, turn: Message) -> list[_Piece] | Broken:
        """The sampled ids that may stand for this turn, in whole or, failing that, in part."""
        means = session.turns.meaning(turn)
        if whole := session.turns.whole(turn, means):
            return [_Piece(said, said.graft) for said in whole]
        parts = [_Piece(said, graft) for said, graft in session.turns.parts(turn, self._cutter.part, means)]
        return parts or (Broken.PARTIAL if session.turns.longer(turn, means) else session.turns.reason(turn, means))

    def _shown(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], found: Sequence[list[_Piece] | Broken]
    ) -> list[bool]:
        """Per assistant turn: whether the thinking that it was sampled with stays in it."""
        thought = [not isinstance(each, Broken) and bool(each[0].said.turn.thinking) for each in found]
        if self._keep_thinking or not any(thought):
            return [True] * len(found)
        shown = self._renderer.shown_thinking(messages, tools)
        return [keep or not thinking for keep, thinking in zip(shown, thought, strict=True)]

    def _following(self, draft: _Draft, gap: Gap) -> Gap:
        return self._renderer.after_end_of_turn(gap) if draft.turn_is_complete else gap

    async def _continuing(self, session: Session, draft: _Draft, gap: Gap, choices: list[_Piece]) -> _Piece:
        """Of the turns that say the same, the one that was sampled after these very tokens, if one was."""
        if len({choice.graft.ids.tobytes() for choice in choices}) == 1:
            return choices[-1]
        before = np.concatenate([*draft.parts, *await self._encoded(gap)])
        return max(choices, key=lambda c: session.prefixes.longest(np.concatenate((before, c.graft.ids)))[1])

    async def _graft(self, draft: _Draft, gap: Gap, turn: Message, piece: _Piece, *, keep: bool) -> None:
        graft = piece.graft
        if not keep:
            cut = self._cutter.without_thinking(piece.said, graft)
            draft.broken.append((turn, Broken.PARTIAL if cut is None else Broken.STRIPPED))
            gap = gap if cut is None else self._renderer.before_past_turn(gap)
            graft = graft if cut is None else cut
        draft.parts += [*await self._encoded(gap), graft.ids]
        draft.turn_is_complete = graft.complete
        draft.grafted.append(piece.said)

    async def _encoded(self, gap: Gap) -> list[IntArray]:
        return await self._encoder.encode_all(gap.pieces)


def _is_small(ask: Ask) -> bool:
    """Whether rendering it, and finding its turns, is a matter of a few milliseconds whatever it says."""
    if len(ask.messages) > INLINE_MESSAGES or ask.num_chars > INLINE_CHARS:
        return False
    return sum(len(c.arguments) for message in ask.messages for c in message.calls) <= INLINE_ARGUMENT_CHARS


def _is_there(session: Session, message: Message) -> bool:
    """An assistant's message with nothing in it is none, unless the rollout sampled one.

    OpenCode leaves one in its history for a stream that broke off. Providers leave it out, too.
    """
    if message.speaker is not Speaker.ASSISTANT or message.calls:
        return True
    if message.text.strip() or message.thinking.strip():
        return True
    return bool(session.turns.whole(message))
