"""A naive reference for the data path: it gets the whole prompt with every call and searches what it knows for it.

This is how rollouts are merged where nobody counts the cost: every call carries all tokens so far, and is compared
with every sequence that is known of its rollout. Tokens are lists of numbers, as they come out of an engine's answer,
or bytes, which is as fast as whole prompts can be. It knows one main conversation without compactions, and no flaws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from data_path_load import Conversation
from msgspec import Struct

from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import IntArray, Role, RolloutManifest, VersionSpan, encode, floats, ints

Tokens = TypeVar("Tokens", list[int], bytes)
Kind = type[list[int]] | type[bytes]


class WholeCall(Struct, Generic[Tokens], frozen=True, kw_only=True):
    """A call with all its tokens. Bytes are int32 LE."""

    call_id: str
    role: Role
    prompt: Tokens
    completion: Tokens
    logprobs: bytes  # float32 LE
    versions: tuple[VersionSpan, ...]


class Naive:
    """Takes a rollout's calls; `close` gives its kept branch. Lists and bytes are sliced and compared alike."""

    def __init__(self, kind: Kind) -> None:
        self._decode = msgspec.msgpack.Decoder(WholeCall[kind]).decode  # type: ignore[valid-type]
        self._calls: list[tuple[WholeCall[Any], Any]] = []  # (call, its prompt and completion)
        self._leaves: dict[str, Any] = {}  # by the call that ends there

    def add(self, body: bytes) -> None:
        """One call."""
        call: WholeCall[Any] = self._decode(body)
        if call.role is not Role.MAIN:
            return
        extended = [name for name, known in self._leaves.items() if call.prompt[: len(known)] == known]
        for name in extended:
            del self._leaves[name]
        whole = call.prompt + call.completion
        self._leaves[call.call_id] = whole
        self._calls.append((call, whole))

    def close(self, manifest: RolloutManifest) -> Branch:
        """The longest leaf that was delivered, with what was sampled on it."""
        delivered = {entry.call_id for entry in manifest.calls if entry.delivered}
        kept = max((known for name, known in self._leaves.items() if name in delivered), key=len)
        on_it = [call for call, whole in self._calls if kept[: len(whole)] == whole]
        return Branch(
            tokens=_array(kept),
            entries=np.concatenate([_places(call) for call in on_it]),
            logprobs=np.concatenate([floats(call.logprobs) for call in on_it]),
            versions=np.concatenate([_versions(call) for call in on_it]),
        )


def merged(calls: Iterable[bytes], manifest: RolloutManifest, kind: Kind) -> Branch:
    """The kept branch of a whole rollout."""
    naive = Naive(kind)
    for body in calls:
        naive.add(body)
    return naive.close(manifest)


def bodies(talk: Conversation, kind: Kind) -> Iterator[bytes]:
    """The calls of a conversation as this reference gets them."""
    known: dict[str, IntArray] = {}
    for call in talk.calls:
        before = known[call.parent][: call.parent_tokens] if call.parent else np.empty(0, np.int32)
        prompt = np.concatenate([before, ints(call.prompt_delta)])
        completion = ints(call.completion_ids)
        known[call.call_id] = np.concatenate([prompt, completion])
        whole: WholeCall[Any] = WholeCall(
            call_id=call.call_id,
            role=call.role,
            prompt=prompt.tobytes() if kind is bytes else prompt.tolist(),
            completion=completion.tobytes() if kind is bytes else completion.tolist(),
            logprobs=call.logprobs,
            versions=call.versions,
        )
        yield encode(whole)


def same(ours: tuple[Branch, ...], theirs: Branch) -> bool:
    """Whether we kept what the reference keeps."""
    return len(ours) == 1 and all(
        np.array_equal(getattr(ours[0], name), getattr(theirs, name))
        for name in ("tokens", "entries", "logprobs", "versions")
    )


def _array(tokens: list[int] | bytes) -> IntArray:
    return ints(tokens) if isinstance(tokens, bytes) else np.array(tokens, np.int32)


def _places(call: WholeCall[Any]) -> IntArray:
    start, size = len(_array(call.prompt)), len(_array(call.completion))
    return np.arange(start, start + size, dtype=np.int32)


def _versions(call: WholeCall[Any]) -> IntArray:
    spans = [np.full(span.end - span.start, span.version, np.int32) for span in call.versions]
    return np.concatenate(spans)
