"""One call's way through the proxy: canonical request -> tokens -> sampled turn -> record -> answer.

What is refused is refused here, before anything is sampled; `prompts` writes the tokens, `turns` makes the turn.
"""

from __future__ import annotations

import time

import anyio
import anyio.abc
from msgspec import Struct

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.proxy.capture import Prompt, Recorder
from clawpipe.actors.proxy.cutting import Cutter
from clawpipe.actors.proxy.encoder import Encoder
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.prompts import Prompts
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.turns import Job, Turns
from clawpipe.actors.proxy.upstream import Sampler
from clawpipe.pipeline.errors import BrokerError, EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import Role


class Limits(Struct, frozen=True, kw_only=True):
    """What bounds a call."""

    context_tokens: int
    max_completion_tokens: int
    retry_window_s: float
    max_parallel_calls: int = 32  # of one rollout
    max_resamples: int = 0  # of a turn that tried to call a tool and failed


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
        keep_thinking: bool = True,
    ) -> None:
        self._prompts = Prompts(renderer, encoder, Cutter(renderer, parser), keep_thinking=keep_thinking)
        self._turns = Turns(renderer, parser, sampler, recorder, limits.max_resamples)
        self._parser = parser
        self._limits = limits
        self._group = group
        self._log = log
        self._puzzled: set[str] = set()  # harnesses whose classifier failed; each is told of once

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
        self._require_room(session)
        call = session.begin(digest)
        try:
            tools = self._parser.accept(ask.tools)
            prompt = await self._prepare(session, ask, wire)
            session.prepared(call, len(prompt.ids), prompt.started_s)
        except CallError as err:
            call.finish(err)
            raise
        finally:
            if call.head is None:
                session.forget(call)
                if not call.prepared.is_set():
                    call.finish(CallError(Fault.UNAVAILABLE, "The call was given up."))
        tools = tools if ask.tools_allowed else self._parser.accept(())
        self._group.start_soon(self._run, Job(session, call, ask, tools, prompt))
        return call

    async def count(self, session: Session, ask: Ask) -> int:
        """Tokens of this request's prompt. Nothing is sampled or recorded."""
        session.require_open()
        self._require_room(session)
        with session.counting():
            self._parser.accept(ask.tools)
            self._require_few(ask)
            return len((await self._prompts.write(session, ask)).ids)

    def _require_room(self, session: Session) -> None:
        most = self._limits.max_parallel_calls
        if session.num_in_flight >= most:
            raise CallError(Fault.BUSY, f"More than {most} requests at a time; please try again when one is done.")

    def _require_few(self, ask: Ask) -> None:
        """No message is without a token: more messages than that need no rendering to be too many."""
        context = self._limits.context_tokens
        if len(ask.messages) > context:
            raise CallError(
                Fault.OVERFLOW,
                f"This model's maximum context length is {context} tokens. However, you sent {len(ask.messages)} "
                "messages. Please reduce the length of the messages.",
                "messages",
            )

    async def _prepare(self, session: Session, ask: Ask, wire: ModelCall) -> Prompt:
        """Renders, grafts, encodes and measures."""
        started_s = time.time()
        self._require_few(ask)
        written = await self._prompts.write(session, ask)
        session.goes_on_from(written.grafted)
        max_tokens = self._room(len(written.ids), ask.max_tokens)
        for turn, reason in written.broken:
            session.count_broken(turn, reason)
        return Prompt(
            ids=written.ids,
            max_tokens=max_tokens,
            role=self._role(session, wire),
            broken=written.broken[0][1] if written.broken else None,
            requested=ask.requested,
            started_s=started_s,
        )

    def _role(self, session: Session, wire: ModelCall) -> Role:
        """What the call is for. A request may be anything: what a classifier falls over is of no known role."""
        try:
            return session.classify(wire)
        except Exception as err:
            if session.harness not in self._puzzled:
                self._puzzled.add(session.harness)
                self._log.warning("a call could not be classified", harness=session.harness, error=repr(err))
            return Role.UNKNOWN

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
                tokens=total,
                limit=context,
            )
        if prompt_tokens >= context:
            raise CallError(
                Fault.OVERFLOW,
                f"This model's maximum context length is {context} tokens. However, your messages resulted in "
                f"{prompt_tokens} tokens. Please reduce the length of the messages.",
                "messages",
                tokens=prompt_tokens + 1,
                limit=context,
            )
        return min(context - prompt_tokens, most if asked is None else min(asked, most))

    async def _run(self, job: Job) -> None:
        """Makes the turn; the outcome is an answer, or an error of ours that is counted."""
        outcome: Answer | CallError = CallError(Fault.SETTLED, "The call was ended.")
        try:
            with job.call.scope:
                outcome = await self._turns.make(job)
        except (EngineError, BrokerError) as err:
            job.session.aborted(job.call)
            self._log.error("call aborted", call=job.session.call_id(job.call.index), error=str(err))
            outcome = CallError(Fault.UNAVAILABLE, "The model is unavailable for the moment. Please try again.")
        finally:
            job.call.finish(outcome)
