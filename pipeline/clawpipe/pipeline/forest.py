"""The packed form of training data: radix-compressed forests and what the loss needs of them.

Made by `packing`, served by `batches`, turned into tensors by the learner. One forest is one microbatch:
its tokens lie in depth-first order, every unique token once. Token i may attend to token j exactly when
j <= i < end[j]; `end` is the whole attention mask.
"""

from __future__ import annotations

from msgspec import Struct


class Forest(Struct, frozen=True, kw_only=True):
    """One microbatch. T packed tokens, E loss entries.

    A loss entry is one sampled token of one rollout: two rollouts that sampled the same token at the same
    place share its compute and keep an entry each. An entry's logprob is read from the logits row of
    `parent[entry_token]`, which is never -1. An entry belongs to the first kept branch of its row that trains the
    token.
    """

    tokens: bytes  # int32 LE [T]
    position: bytes  # int32 LE [T], depth of the token in its tree
    parent: bytes  # int32 LE [T], index of the token before it on its path, -1 at a root
    end: bytes  # int64 LE [T], end of the token's subtree, exclusive
    entry_token: bytes  # int32 LE [E], index into T
    entry_logprob: bytes  # float32 LE [E], log mu as recorded at sampling
    entry_version: bytes  # int32 LE [E]
    entry_rollout: bytes  # int32 LE [E], index into Batch.rollouts
    entry_branch: bytes = b""  # int32 LE [E], index of the kept branch within its row; empty: all 0


class RolloutRow(Struct, frozen=True, kw_only=True):
    """One rollout of a batch, as the loss sees it.

    A rollout whose auxiliary calls are trained too has a row more for each of their roles.
    """

    rollout_id: str
    group_id: str
    harness: str
    reward: float
    advantage: float  # GRPO: within its group; PPO: the return R, from which the learner takes V(s_t)
    num_trainable: int  # N_i: its loss entries in this batch
    role: str = "main"


class Batch(Struct, frozen=True, kw_only=True):
    """The work of one update. Rollouts without loss entries (zero advantage) are rows too: |B| counts them."""

    batch_id: str
    version: int  # learner version at the lease
    rollouts: tuple[RolloutRow, ...]
    forests: tuple[Forest, ...]
