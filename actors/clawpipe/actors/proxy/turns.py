"""Makes the turn of a call: sampled, read, recorded, and only then known.

A turn that tried to call a tool and failed can be sampled again (`max_resamples`). The failed one is recorded as a
call of its own that was never delivered, so its tokens are counted and never trained.
"""

from __future__ import annotations

from functools import partial

import anyio.to_thread
import msgspec
from msgspec import Struct

from clawpipe.actors.proxy.capture import Prompt, Recorder
from clawpipe.actors.proxy.graft import Graft
from clawpipe.actors.proxy.identity import Call, Session
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault, Turn
from clawpipe.actors.proxy.parse import ToolSet, TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.upstream import Sampled, Sampler, Wanted
from clawpipe.pipeline.records import FinishReason

MAX_STOP_CHARS = 1000  # a text that is longer ends no turn, but would be searched for after every token
INLINE_CHARS = 4000  # what is longer, or may have many marks, takes the parsers long: it is read in a thread
INLINE_ANGLES = 32


class Job(Struct, frozen=True, eq=False):
    """A turn that is to be made."""

    session: Session
    call: Call
    ask: Ask
    tools: ToolSet  # empty when none may be called
    prompt: Prompt


class Turns:
    """Makes turns, one per `Job`."""

    def __init__(
        self, renderer: Renderer, parser: TurnParser, sampler: Sampler, recorder: Recorder, max_resamples: int
    ) -> None:
        self._renderer = renderer
        self._parser = parser
        self._sampler = sampler
        self._recorder = recorder
        self._max_resamples = max_resamples

    async def make(self, job: Job) -> Answer | CallError:
        """The answer, its record stored. EngineError or BrokerError when there will be none."""
        resamples_left = self._max_resamples
        while True:
            sampled = await self._sample(job)
            turn = await self._read(job, sampled)
            if not resamples_left or not _failed(sampled, turn):
                return await self._finish(job, sampled, turn)
            resamples_left -= 1
            await self._put_aside(job, sampled)

    async def _sample(self, job: Job) -> Sampled:
        wanted = Wanted(
            prompt=job.prompt.ids,
            max_tokens=job.prompt.max_tokens,
            call_id=job.session.call_id(job.call.index),
            role=job.prompt.role,
            stop=tuple(text for text in job.ask.stop if 0 < len(text) <= MAX_STOP_CHARS),
        )
        return await self._sampler.sample(wanted, job.call.cut)

    async def _read(self, job: Job, sampled: Sampled) -> Turn:
        """What was said, without the text that ended it."""
        assert job.call.head is not None
        text, truncated = self._renderer.decode(sampled.ids), sampled.finish_reason is not FinishReason.STOP
        if sampled.stop_text is not None:
            text, _, _ = text.partition(sampled.stop_text)
        read = partial(self._parser.read, text, job.tools, job.call.head.id, truncated=truncated)
        is_short = len(text) <= INLINE_CHARS and text.count("<") <= INLINE_ANGLES
        turn = read() if is_short else await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
        return msgspec.structs.replace(turn, stop_text=sampled.stop_text)

    async def _put_aside(self, job: Job, sampled: Sampled) -> None:
        """Records a turn that nobody gets; the call goes on under a number of its own."""
        aside = job.session.put_aside(job.call)
        await self._recorder.store(job.session, aside, job.prompt, sampled, malformed=True)
        job.session.sampled(aside, job.prompt.ids, sampled.ids)

    async def _finish(self, job: Job, sampled: Sampled, turn: Turn) -> Answer | CallError:
        session, call = job.session, job.call
        assert call.head is not None
        await self._recorder.store(session, call, job.prompt, sampled, malformed=turn.malformed)
        session.sampled(call, job.prompt.ids, sampled.ids)
        complete = len(sampled.ids) > 0 and int(sampled.ids[-1]) == self._renderer.end_of_turn_id
        call.said = session.turns.add(turn, Graft(sampled.ids, complete), job.tools)
        if sampled.finish_reason is FinishReason.CUT:
            return CallError(Fault.SETTLED, "The call was cut.")
        return Answer(head=call.head, turn=turn, completion_tokens=len(sampled.ids))


def _failed(sampled: Sampled, turn: Turn) -> bool:
    """A call that another try may mend: the model ended it, neither a limit nor a stop text did."""
    return turn.malformed and sampled.finish_reason is FinishReason.STOP and sampled.stop_text is None
