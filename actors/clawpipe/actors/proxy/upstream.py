"""Samples from the vLLM engines: token ids in; ids, logprobs and weight versions out.

The harness never sees that an engine restarts: a call that loses its engine waits for a healthy one and is
sampled again from its start. Sampling parameters come from the configuration alone. No seed is ever sent
(vLLM on CPU dies of it), and the prefix cache is salted with the weight version.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import anyio
import httpx
import msgspec
import numpy as np
from msgspec import Struct

from clawpipe.actors.proxy.engine_http import EngineClient, EngineReply, Numbers
from clawpipe.pipeline.config import ProxyConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import FinishReason, FloatArray, IntArray, Role, VersionSpan

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
CUT_GRACE_S = 5.0  # how long an engine may take to hand over the tokens of a call that is cut
CUT_AGAIN_S = 0.25
MISSING_LOGPROB = -9999.0  # what vLLM writes where it has no number


class Engine(Protocol):
    """A healthy engine with its weight version."""

    @property
    def url(self) -> str: ...

    @property
    def version(self) -> int: ...


class EnginePool(Protocol):
    """The engines of the control bucket."""

    def acquire(self) -> AbstractAsyncContextManager[Engine]:
        """Waits for a healthy engine and lends the least loaded one for the length of the block.

        EngineError when there has been none for too long.
        """
        ...

    async def ready(self) -> None:
        """Waits until there is an engine to lend."""
        ...


class Sampled(Struct, frozen=True, kw_only=True):
    """What an engine sampled. C completion tokens; an end-of-turn token is one of them."""

    ids: IntArray  # int32 [C]
    logprobs: FloatArray  # float32 [C]
    versions: tuple[VersionSpan, ...]  # cover [0, C) without gaps
    finish_reason: FinishReason
    stop_text: str | None = None  # which of the wanted ones ended it; the last ids spell it, and maybe more


NOTHING = Sampled(
    ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), versions=(), finish_reason=FinishReason.CUT
)


class Wanted(Struct, frozen=True, kw_only=True):
    """A turn that is to be sampled."""

    prompt: IntArray  # int32 [P]
    max_tokens: int
    call_id: str
    role: Role = Role.MAIN
    stop: tuple[str, ...] = ()  # texts that end it


class Sampler(Protocol):
    """Where turns come from."""

    async def sample(self, wanted: Wanted, cut: anyio.Event) -> Sampled:
        """Samples one turn. When `cut` is set before it is complete: what there is by then, as CUT.

        EngineError when there is no turn and will be none.
        """
        ...

    async def ready(self) -> None:
        """Waits until a turn can be sampled."""
        ...


class _TokenLogprob(Struct):
    token_id: int
    logprob: float


class _Logprobs(Struct):
    content: list[_TokenLogprob] | None = None


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    finish_reason: str | None
    stop_reason: int | str | None = None  # a stop token, or the text of `stop`
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Generated(Struct):
    choices: list[_Choice]


class _Unusable(Exception):
    """This engine's answer cannot be used; another try may help."""


class _Job:
    """One call on its way: what is sent, and to whom it was sent last."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.call_id = wanted.call_id
        self.request_id = wanted.call_id
        self.url: str | None = None  # of the engine that samples it now
        self.tries = 0
        self.outcome: Sampled | EngineError = NOTHING


class EngineSampler:
    """The `Sampler` over vLLM's /inference/v1/generate. `stop_ids`: the tokens that end a turn."""

    def __init__(
        self,
        pool: EnginePool,
        client: EngineClient,
        config: ProxyConfig,
        stop_ids: Sequence[int],
        log: EventLog,
    ) -> None:
        self._pool = pool
        self._client = client
        self._config = config
        self._log = log
        self._numbers = Numbers()
        # ignore_eos leaves `stop_token_ids` as the only end: nothing of the model's generation_config counts.
        self._sampling = {
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
            "stop_token_ids": list(stop_ids),
        }

    async def ready(self) -> None:
        """Waits until an engine serves a weight version."""
        await self._pool.ready()

    async def sample(self, wanted: Wanted, cut: anyio.Event) -> Sampled:
        """One turn; waits for an engine as long as `engine_wait_s` allows."""
        job = _Job(wanted)
        async with anyio.create_task_group() as group:
            group.start_soon(self._cut, job, cut, group.cancel_scope)
            try:
                job.outcome = await self._until_sampled(job, cut)
            except EngineError as err:
                job.outcome = err
            group.cancel_scope.cancel()
        if isinstance(job.outcome, EngineError):
            raise job.outcome
        return job.outcome

    async def _cut(self, job: _Job, cut: anyio.Event, scope: anyio.CancelScope) -> None:
        """Asks the engine to end the call now; it then answers with the tokens that it has.

        Asks again and again: an engine that has not taken the call in yet ignores the first time.
        """
        await cut.wait()
        with anyio.move_on_after(CUT_GRACE_S):
            while job.url is not None:
                await self._abort(job, job.url)
                await anyio.sleep(CUT_AGAIN_S)
        scope.cancel()

    async def _abort(self, job: _Job, url: str) -> None:
        body = msgspec.json.encode({"request_ids": [f"generate-tokens-{job.request_id}"]})
        try:
            await self._client.post(f"{url}/inference/v1/abort_requests", body)
        except httpx.TransportError as err:
            self._log.warning("call could not be cut at its engine", call=job.call_id, error=repr(err))

    async def _until_sampled(self, job: _Job, cut: anyio.Event) -> Sampled:
        failing_since: float | None = None
        while True:
            try:
                return await self._try(job, cut)
            except (httpx.TransportError, _Unusable) as err:
                now = anyio.current_time()
                failing_since = now if failing_since is None else failing_since
                self._log.warning("call lost its engine", call=job.call_id, tries=job.tries, error=repr(err))
                if now - failing_since > self._config.engine_wait_s:
                    raise EngineError(f"call {job.call_id}: {job.tries} tries failed, the last with {err!r}") from err
            await anyio.sleep(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(job.tries, 10)))

    async def _try(self, job: _Job, cut: anyio.Event) -> Sampled:
        async with self._pool.acquire() as engine:
            job.url, job.tries = engine.url, job.tries + 1
            job.request_id = f"{job.call_id}.t{job.tries}"
            try:
                reply = await self._client.post(f"{engine.url}/inference/v1/generate", self._body(job, engine.version))
            finally:
                job.url = None
        return _sampled(_choice(reply), cut.is_set())

    def _body(self, job: _Job, version: int) -> bytes:
        sampling = {**self._sampling, "max_tokens": job.wanted.max_tokens}
        if job.wanted.stop:  # the engine finds them in the text, which must be the one that we decode
            sampling |= {"stop": job.wanted.stop, "detokenize": True, "skip_special_tokens": False}
        body: dict[str, Any] = {
            "request_id": job.request_id,
            "token_ids": msgspec.Raw(self._numbers.listed(job.wanted.prompt)),
            "sampling_params": sampling,
            "cache_salt": str(version),
            "stream": False,
        }
        return msgspec.json.encode(body)


def _choice(reply: EngineReply) -> _Choice:
    if reply.status >= 500:
        raise _Unusable(f"status {reply.status}: {reply.body[:200]!r}")
    if reply.status != 200:
        raise EngineError(f"{reply.url}: refused a call with {reply.status}: {reply.body[:500]!r}")
    try:
        return msgspec.json.decode(reply.body, type=_Generated).choices[0]
    except (msgspec.MsgspecError, IndexError) as err:
        raise _Unusable(f"an answer that is none of /inference/v1/generate: {err!r}") from err


def _sampled(choice: _Choice, cut: bool) -> Sampled:
    """The engine's answer, checked: as many logprobs as ids, every token with a weight version."""
    ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [token.token_id for token in content] != ids:
        raise EngineError(f"an engine sent {len(ids)} token ids and logprobs of {len(content)} other ones")
    if any(token.logprob <= MISSING_LOGPROB for token in content):
        raise EngineError("an engine sampled a token without a probability: its weights give NaN; look at the learner")
    return Sampled(
        ids=np.array(ids, np.int32),
        logprobs=np.array([token.logprob for token in content], np.float32),
        versions=_spans(choice.weight_versions or [], len(ids)),
        finish_reason=_finish_reason(choice.finish_reason, cut),
        stop_text=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
    )


def _finish_reason(reason: str | None, cut: bool) -> FinishReason:
    if reason in ("stop", "length"):
        return FinishReason(reason)
    if reason == "abort" and cut:
        return FinishReason.CUT
    raise _Unusable(f"sampling ended with {reason!r}")


def _spans(spans: list[_Span], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans with numbers for versions. An engine that was never given a version has nothing to say here."""
    covered = 0
    found = []
    for span in spans:
        if not span.version.isdecimal() or span.start != covered:
            raise _Unusable(f"weight versions {spans} of {num_tokens} tokens")
        found.append(VersionSpan(version=int(span.version), start=span.start, end=span.end))
        covered = span.end
    if covered != num_tokens:
        raise _Unusable(f"weight versions {spans} of {num_tokens} tokens")
    return tuple(found)
