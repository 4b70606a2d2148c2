"""Batch bytes -> checked tensors, cut into minibatches and dealt out to the data-parallel ranks.

The pipeline service serves a batch as bytes; every rank decodes all of it (it is small beside the model) and
takes its own share of the forests. A batch that breaks a rule is refused whole: a loss over part of a batch
would have the wrong denominators.

Shapes: R rows of the batch (rollouts, each role of theirs on its own), T packed tokens of a forest, E loss
entries of a forest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.forest import Batch, Forest, RolloutRow

# log mu is at most 0; a float32 log-softmax may round a certain token to a little above.
MAX_LOGPROB = 1e-3

_decoder = msgspec.msgpack.Decoder(Batch)
_DTYPES = {
    "tokens": ("tokens_T", torch.int32),
    "position": ("position_T", torch.int32),
    "parent": ("parent_T", torch.int32),
    "end": ("end_T", torch.int64),
    "entry_token": ("entry_token_E", torch.int32),
    "entry_logprob": ("entry_logprob_E", torch.float32),
    "entry_version": ("entry_version_E", torch.int32),
    "entry_rollout": ("entry_rollout_E", torch.int32),
    "entry_branch": ("entry_branch_E", torch.int32),
}


@dataclass(frozen=True, slots=True, eq=False)
class ForestTensors:
    """A `Forest` as tensors on the CPU; indices are int64, `entry_logprob_E` is float32."""

    tokens_T: Tensor
    position_T: Tensor
    parent_T: Tensor
    end_T: Tensor
    entry_token_E: Tensor
    entry_logprob_E: Tensor
    entry_version_E: Tensor
    entry_rollout_E: Tensor
    entry_branch_E: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens_T)

    @property
    def num_entries(self) -> int:
        """E."""
        return len(self.entry_token_E)

    def segments(self) -> Tensor:
        """int64 [E]: equal numbers below E for the entries of one kept branch of one row, which are all in here.

        A branch is never split: packing gives a rollout to one forest, and `restrict` keeps or leaves whole rows.
        """
        key_E = (self.entry_rollout_E << 31) + self.entry_branch_E  # both are below 2^31
        segment_E: Tensor = torch.unique(key_E, return_inverse=True)[1]
        return segment_E


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The work of one optimizer step: some of the batch's rows and the forests that hold their entries."""

    num_rows: int  # |B|, rows without entries included
    num_entries: int  # over all ranks
    forests: tuple[ForestTensors, ...]


def decode(body: bytes) -> Batch:
    """The batch of a body. LearnerError when it is none."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as err:
        raise LearnerError(f"batch body cannot be read ({err}); run pipeline and learner of one version") from err


def load(batch: Batch, *, vocab_size: int, version: int) -> tuple[ForestTensors, ...]:
    """The batch's forests as tensors, each rule checked.

    `version` is the learner's: nothing in a batch may come from a later one. Raises LearnerError that names
    the rollouts concerned.
    """
    forests = []
    for number, forest in enumerate(batch.forests):
        tensors = _tensors(batch, number, forest)
        _check_tree(batch, number, tensors, vocab_size)
        _check_entries(batch, number, tensors, version)
        forests.append(tensors)
    _check_rows(batch, forests)
    return tuple(forests)


def empty_forest() -> ForestTensors:
    """Two tokens without a loss entry: what a rank computes when it has no forest of its own left.

    Expert parallelism exchanges tokens between ranks, so all ranks must run equally many forward passes.
    """
    none = torch.empty(0, dtype=torch.int64)
    return ForestTensors(
        tokens_T=torch.tensor([0, 0]),
        position_T=torch.tensor([0, 1]),
        parent_T=torch.tensor([-1, 0]),
        end_T=torch.tensor([2, 2]),
        entry_token_E=none,
        entry_logprob_E=none.float(),
        entry_version_E=none,
        entry_rollout_E=none,
        entry_branch_E=none,
    )


def restrict(forest: ForestTensors, keep_R: Tensor) -> ForestTensors:
    """The part of a forest that the entries of some rows need: those entries, their tokens and ancestors.

    `keep_R` is bool [R]. Token j is needed when a kept entry lies in its subtree [j, end[j]).
    """
    entry_E = keep_R[forest.entry_rollout_E]
    if bool(entry_E.all()):
        return forest
    hit_T = torch.zeros(forest.num_tokens + 1, dtype=torch.int64)
    hit_T[forest.entry_token_E[entry_E] + 1] = 1
    hits = hit_T.cumsum(0)  # hits[j] = kept entry tokens before j
    keep_T = hits[forest.end_T] > hits[:-1]
    index = torch.cat([keep_T.new_zeros(1, dtype=torch.int64), keep_T.cumsum(0)])  # new index of old token j
    parent_T = forest.parent_T[keep_T]
    return ForestTensors(
        tokens_T=forest.tokens_T[keep_T],
        position_T=forest.position_T[keep_T],
        parent_T=torch.where(parent_T < 0, parent_T, index[parent_T]),
        end_T=index[forest.end_T[keep_T]],
        entry_token_E=index[forest.entry_token_E[entry_E]],
        entry_logprob_E=forest.entry_logprob_E[entry_E],
        entry_version_E=forest.entry_version_E[entry_E],
        entry_rollout_E=forest.entry_rollout_E[entry_E],
        entry_branch_E=forest.entry_branch_E[entry_E],
    )


def minibatches(rollouts: Sequence[RolloutRow], forests: Sequence[ForestTensors], count: int) -> Iterator[Minibatch]:
    """Cuts a batch into `count` parts by whole rows, neighbours staying together: they share prefixes.

    What a rollout has in one role is never split. Its roles may fall into two parts: they have statistics of
    their own.
    """
    total = len(rollouts)
    for part in range(count):
        rows = slice(part * total // count, (part + 1) * total // count)
        keep_R = torch.zeros(total, dtype=torch.bool)
        keep_R[rows] = True
        kept = [restrict(forest, keep_R) for forest in forests] if count > 1 else forests
        kept = tuple(forest for forest in kept if forest.num_entries)
        num_entries = sum(forest.num_entries for forest in kept)
        yield Minibatch(num_rows=rows.stop - rows.start, num_entries=num_entries, forests=kept)


def share(
    forests: Sequence[ForestTensors], *, rank: int, size: int, cost: Callable[[ForestTensors], float]
) -> list[ForestTensors]:
    """This rank's forests out of `size` data-parallel ranks: equally many for each, the n-th ones alike in cost.

    Every rank computes the same distribution. Too few forests are split by rows first; what is then
    missing are empty forests.
    """
    ranked = sorted(_at_least(forests, size, cost), key=cost, reverse=True)
    loads, mine = [0.0] * size, []
    for start in range(0, len(ranked), size):
        order = sorted(range(size), key=loads.__getitem__)
        for forest, owner in zip(ranked[start : start + size], order, strict=False):
            loads[owner] += cost(forest)
            if owner == rank:
                mine.append(forest)
        if len(mine) <= start // size:
            mine.append(empty_forest())
    return mine


def flops(*, params_per_token: int, attention_width: int) -> Callable[[ForestTensors], float]:
    """Estimated forward cost of a forest: 2 per parameter and token, 4 per attention channel and visible pair.

    `attention_width` is layers x heads x head size.
    """

    def cost(forest: ForestTensors) -> float:
        tokens = forest.num_tokens
        pairs = float((forest.end_T - torch.arange(tokens)).sum())
        return 2.0 * params_per_token * tokens + 4.0 * attention_width * pairs

    return cost


def _at_least(
    forests: Sequence[ForestTensors], size: int, cost: Callable[[ForestTensors], float]
) -> list[ForestTensors]:
    """The forests, the dearest halved by rows until there are `size` or nothing can be halved."""
    parts = list(forests)
    while parts and len(parts) < size:
        dearest = max(parts, key=lambda forest: (len(_rows(forest.entry_rollout_E)) > 1, cost(forest)))
        rows = _rows(dearest.entry_rollout_E)
        if len(rows) < 2:
            break
        first_R = torch.zeros(rows[-1] + 1, dtype=torch.bool)
        first_R[rows[: len(rows) // 2]] = True
        parts = [forest for forest in parts if forest is not dearest]
        parts += [restrict(dearest, first_R), restrict(dearest, ~first_R)]
    return parts


def _rows(rollout_E: Tensor) -> list[int]:
    return sorted(set(rollout_E.tolist()))


def _tensors(batch: Batch, number: int, forest: Forest) -> ForestTensors:
    columns = {}
    for name, (column, dtype) in _DTYPES.items():
        data = getattr(forest, name)
        if name == "entry_branch" and not data:
            data = bytes(len(forest.entry_token))
        if len(data) % dtype.itemsize:
            raise LearnerError(_refusal(batch, number, f"`{name}` has {len(data)} bytes, not whole numbers"))
        values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        columns[column] = values if dtype is torch.float32 else values.long()
    for kind in ("T", "E"):
        sizes = {name: len(values) for name, values in columns.items() if name.endswith(f"_{kind}")}
        if len(set(sizes.values())) > 1:
            raise LearnerError(_refusal(batch, number, f"lengths disagree: {sizes}"))
    return ForestTensors(**columns)


def _check_tree(batch: Batch, number: int, forest: ForestTensors, vocab_size: int) -> None:
    """Ids within the vocabulary; parents, depths and subtree ends describe one depth-first forest."""
    size = forest.num_tokens
    index_T, parent_T, end_T = torch.arange(size), forest.parent_T, forest.end_T
    root_T = parent_T < 0
    above_T = parent_T.clamp(0, max(size - 1, 0))
    depth_T = torch.where(root_T, 0, forest.position_T[above_T] + 1)
    limit_T = torch.where(root_T, size, end_T[above_T])
    closed_T = torch.bincount(end_T.clamp(0, size), minlength=size + 1).cumsum(0)[:size]
    rules = {
        f"token ids outside 0..{vocab_size - 1}": (forest.tokens_T >= 0) & (forest.tokens_T < vocab_size),
        "parents that are not earlier tokens": (parent_T >= -1) & (parent_T < index_T),
        "positions that are not depths": forest.position_T == depth_T,
        "subtree ends out of order": (end_T > index_T) & (end_T <= limit_T) & (index_T < limit_T),
        "subtrees that overlap": index_T + 1 - closed_T == depth_T + 1,
    }
    for what, holds_T in rules.items():
        if not bool(holds_T.all()):
            raise LearnerError(_refusal(batch, number, what))


def _check_entries(batch: Batch, number: int, forest: ForestTensors, version: int) -> None:
    token_E, size = forest.entry_token_E, forest.num_tokens
    rollout_E, logprob_E, version_E = forest.entry_rollout_E, forest.entry_logprob_E, forest.entry_version_E
    known_E = (rollout_E >= 0) & (rollout_E < len(batch.rollouts))
    if not bool(known_E.all()):
        raise LearnerError(_refusal(batch, number, "loss entries of rollouts that the batch does not have"))
    inside_E = (token_E >= 0) & (token_E < size)
    parent_E = forest.parent_T[token_E.clamp(0, max(size - 1, 0))] if size else torch.full_like(token_E, -1)
    key_E, order_E = (rollout_E * size + token_E).sort()
    once_E = torch.ones_like(key_E, dtype=torch.bool)
    once_E[order_E[1:][key_E[1:] == key_E[:-1]]] = False
    rules = {
        "tokens with two loss entries of one rollout": once_E,
        "loss entries outside the forest or at a root": inside_E & (parent_E >= 0),
        "logprobs that are not finite or above 0": torch.isfinite(logprob_E) & (logprob_E <= MAX_LOGPROB),
        f"versions outside 0..{version}, the learner's": (version_E >= 0) & (version_E <= version),
        "branches that are negative": forest.entry_branch_E >= 0,
    }
    for what, holds_E in rules.items():
        if not bool(holds_E.all()):
            raise LearnerError(_refusal(batch, number, what, _rows(rollout_E[~holds_E])))


def _check_rows(batch: Batch, forests: Iterable[ForestTensors]) -> None:
    counts = torch.zeros(len(batch.rollouts), dtype=torch.int64)
    for forest in forests:
        counts += torch.bincount(forest.entry_rollout_E, minlength=len(batch.rollouts))
    numbers_R = torch.tensor([(row.reward, row.advantage) for row in batch.rollouts]).reshape(-1, 2)
    finite_R = torch.isfinite(numbers_R).all(1)
    agree_R = counts == torch.tensor([row.num_trainable for row in batch.rollouts], dtype=torch.int64)
    for what, holds_R in {
        "reward or advantage not finite": finite_R,
        "num_trainable is not the number of loss entries": agree_R,
    }.items():
        if not bool(holds_R.all()):
            raise LearnerError(_refusal(batch, None, what, torch.nonzero(~holds_R)[:, 0].tolist()))


def _refusal(batch: Batch, number: int | None, what: str, rows: Sequence[int] | None = None) -> str:
    concerned = range(len(batch.rollouts)) if rows is None else rows
    ids = list(dict.fromkeys(batch.rollouts[row].rollout_id for row in concerned))
    where = f"batch {batch.batch_id}" + ("" if number is None else f", forest {number}")
    shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    return f"{where}: {what} (rollouts {shown}); the batch is refused whole"
