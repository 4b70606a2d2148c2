"""A `Sampler` that says what a script says, where otherwise an engine samples: for demonstrations.

Stateless: which turn is due is read off the prompt, so a harness that repeats a request gets the same turn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import numpy as np

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.upstream import Sampled, Wanted
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.records import FinishReason, Role, VersionSpan

ASIDE = "Ok."  # what a call beside the main conversation is told, a title for one


class ScriptedSampler:
    """`scripts`: rollout id -> the raw text of its main conversation's turns, in order."""

    def __init__(self, renderer: Renderer, scripts: Mapping[str, Sequence[str]]) -> None:
        self._renderer = renderer
        self._scripts = scripts

    async def ready(self) -> None:
        """A script is always ready."""

    async def sample(self, wanted: Wanted, cut: anyio.Event) -> Sampled:
        """The script's next turn, which ends by itself. EngineError when the script has no more."""
        return self._sampled(ASIDE if wanted.role is not Role.MAIN else self._due(wanted))

    def _due(self, wanted: Wanted) -> str:
        rollout_id = wanted.call_id.rpartition(".c")[0].rpartition(".a")[0]
        script = self._scripts[rollout_id]
        said = self._turns_said(wanted)
        if said >= len(script):
            raise EngineError(f"call {wanted.call_id}: the script has {len(script)} turns, and this is one more")
        return script[said]

    def _turns_said(self, wanted: Wanted) -> int:
        """How many assistant turns the prompt holds, the one that it opens not counted."""
        tokenizer = self._renderer.tokenizer.backend_tokenizer
        text: str = tokenizer.decode(wanted.prompt.tolist(), skip_special_tokens=False)
        return text.count(self._renderer.generation_prompt) - 1

    def _sampled(self, text: str) -> Sampled:
        tokenizer = self._renderer.tokenizer.backend_tokenizer
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, self._renderer.end_of_turn_id]
        return Sampled(
            ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),  # a script is certain
            versions=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
        )
