"""One call's way through the proxy: canonical request -> tokens -> sampled turn -> record -> answer."""

from __future__ import annotations

import time

import anyio
import anyio.abc
import numpy as np
from msgspec import Struct

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.capture import Prompt, Recorder
from clawpipe.actors.proxy.graft import Broken, Graft
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault, Message, Speaker
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Encoder, Gap, Renderer, TemplateRefusal
from clawpipe.actors.proxy.upstream import Sampled, Sampler, Wanted
from clawpipe.pipeline.errors import BrokerError, EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import FinishReason, IntArray


class Limits(Struct, frozen=True, kw_only=True):
    """What bounds a call."""

    context_tokens: int
    max_completion_tokens: int
    retry_window_s: float


class Calls:
    """Makes the calls of all rollouts. Sampling runs in `group`, so it outlives a client that hangs up."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        encoder: Encoder,
        parser: TurnParser,
        sampler: Sampler,
        recorder: Recorder,
        limits: Limits,
        group: anyio.abc.TaskGroup,
        log: EventLog,
    ) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._parser = parser
        self._sampler = sampler
        self._recorder = recorder
        self._limits = limits
        self._group = group
        self._log = log

    async def start(self, session: Session, ask: Ask, wire: ModelCall) -> Call:
        """The call that answers this request, on its way; a repeated request gets the call that it repeats.

        CallError when it is refused before anything is sampled.
        """
        session.require_open()
        digest = ask.digest()
        if (same := session.repeated(digest, self._limits.retry_window_s)) is not None:
            await same.prepared.wait()
            if isinstance(same.outcome, CallError):
                raise same.outcome
            return same
        call = session.begin(digest)
        try:
            prompt = await self._prepare(session, ask, wire)
            session.prepared(call, len(prompt.ids), prompt.started_s)
        except CallError as err:
            call.finish(err)
            raise
        finally:
            if not call.prepared.is_set():
                call.finish(CallError(Fault.UNAVAILABLE, "The call was given up."))
        self._group.start_soon(self._run, session, call, ask, prompt)
        return call

    async def _prepare(self, session: Session, ask: Ask, wire: ModelCall) -> Prompt:
        """Renders, grafts, encodes and measures."""
        started_s = time.time()
        self._parser.accept(ask.tools)
        try:
            ids, broken = await self._tokens(session, ask)
        except (TemplateRefusal, RecursionError) as err:
            raise CallError(Fault.INVALID, f"The conversation cannot be rendered: {err}", "messages") from err
        return Prompt(
            ids=ids,
            max_tokens=self._room(len(ids), ask.max_tokens),
            role=session.classify(wire),
            broken=broken,
            requested=ask.requested,
            started_s=started_s,
        )

    async def _tokens(self, session: Session, ask: Ask) -> tuple[IntArray, Broken | None]:
        """(prompt ids, why the first broken turn is broken)."""
        found = [_find(session, message) for message in ask.messages if message.speaker is Speaker.ASSISTANT]
        grafts = [graft for graft in found if not isinstance(graft, Broken)]
        gaps = self._renderer.gaps(ask.messages, ask.tools, [not isinstance(graft, Broken) for graft in found])
        parts = await self._encoded(gaps[0])
        for choices, gap in zip(grafts, gaps[1:], strict=True):
            graft = _continuing(session, parts, choices)
            gap = self._renderer.after_end_of_turn(gap) if graft.complete else gap
            parts += [graft.ids, *await self._encoded(gap)]
        return np.concatenate(parts), next((reason for reason in found if isinstance(reason, Broken)), None)

    async def _encoded(self, gap: Gap) -> list[IntArray]:
        return [await self._encoder.encode(piece) for piece in gap.pieces]

    def _room(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens that may be sampled. A limit that was asked for must fit into the context whole."""
        context = self._limits.context_tokens
        most = self._limits.max_completion_tokens
        if asked is not None and prompt_tokens + min(asked, most) > context:
            total = prompt_tokens + min(asked, most)
            raise CallError(
                Fault.OVERFLOW,
                f"This model's maximum context length is {context} tokens. However, you requested {total} tokens "
                f"({prompt_tokens} in the messages, {min(asked, most)} in the completion). Please reduce the length "
                "of the messages or completion.",
                "messages",
            )
        if prompt_tokens >= context:
            raise CallError(
                Fault.OVERFLOW,
                f"This model's maximum context length is {context} tokens. However, your messages resulted in "
                f"{prompt_tokens} tokens. Please reduce the length of the messages.",
                "messages",
            )
        return min(context - prompt_tokens, most if asked is None else min(asked, most))

    async def _run(self, session: Session, call: Call, ask: Ask, prompt: Prompt) -> None:
        """Samples and records; the outcome is an answer, or an error of ours that is counted."""
        outcome: Answer | CallError = CallError(Fault.SETTLED, "The call was ended.")
        try:
            with call.scope:
                wanted = Wanted(
                    prompt=prompt.ids,
                    max_tokens=prompt.max_tokens,
                    call_id=session.call_id(call.index),
                    role=prompt.role,
                    stop=ask.stop,
                )
                sampled = await self._sampler.sample(wanted, call.cut)
                outcome = await self._finish(session, call, ask, prompt, sampled)
        except (EngineError, BrokerError) as err:
            session.num_aborted += 1
            self._log.error("call aborted", call=session.call_id(call.index), error=str(err))
            outcome = CallError(Fault.UNAVAILABLE, "The model is unavailable for the moment. Please try again.")
        finally:
            call.finish(outcome)

    async def _finish(
        self, session: Session, call: Call, ask: Ask, prompt: Prompt, sampled: Sampled
    ) -> Answer | CallError:
        """Parses, records, and only then makes the turn known."""
        assert call.head is not None
        turn = self._parser.parse(
            self._renderer.decode(sampled.ids),
            ask.tools if ask.tools_allowed else (),
            call.head.id,
            truncated=sampled.finish_reason is not FinishReason.STOP,
        )
        await self._recorder.store(session, call, prompt, sampled, malformed=turn.malformed)
        complete = len(sampled.ids) > 0 and int(sampled.ids[-1]) == self._renderer.end_of_turn_id
        session.sampled(call, prompt.ids, sampled.ids, turn, Graft(sampled.ids, complete))
        if sampled.finish_reason is FinishReason.CUT:
            return CallError(Fault.SETTLED, "The call was cut.")
        return Answer(head=call.head, turn=turn, completion_tokens=len(sampled.ids))


def _find(session: Session, message: Message) -> list[Graft] | Broken:
    found = session.turns.find(message)
    if isinstance(found, Broken):
        session.count_broken(message, found)
    return found


def _continuing(session: Session, parts: list[IntArray], choices: list[Graft]) -> Graft:
    """Of the turns that say the same, the one that was sampled after these very tokens, if one was."""
    if len({graft.ids.tobytes() for graft in choices}) == 1:
        return choices[-1]
    return max(choices, key=lambda graft: session.prefixes.longest(np.concatenate([*parts, graft.ids]))[1])
