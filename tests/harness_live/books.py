"""What the records of a rollout must say, number by number, of what the engine saw and sampled."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from clawpipe.pipeline import tree
from harness_live.finished import Rollout, extends, table, versions
from harness_live.scripted import Said


def check_books(rollout: Rollout) -> None:
    """What holds for every rollout, whatever happened in it."""
    said = {each.call_id: each for each in rollout.engine.said}
    assert len(said) == len(rollout.engine.said), "a call was sampled twice"
    listed = sorted(entry.call_id for entry in rollout.manifest.calls)
    assert listed == sorted(record.call_id for record in rollout.records) == sorted(said)
    assert all(record.role is said[record.call_id].role for record in rollout.records)
    if rollout.tree is not None:
        for placed in rollout.tree.calls:
            _check_call(rollout, placed, said[placed.call.call_id])
    for fate in rollout.closed.fates:
        assert fate.sampled == len(said[fate.call_id].sampled.ids)
        assert fate.sampled == fate.kept + sum(fate.dropped.values())
    _check_trained(rollout)


def _check_call(rollout: Rollout, placed: tree.Placed, said: Said) -> None:
    """The record spells the engine's own prompt and sample, number by number."""
    assert rollout.tree is not None
    np.testing.assert_array_equal(rollout.tree.spell(placed.prompt_node), said.prompt)
    np.testing.assert_array_equal(placed.call.completion, said.sampled.ids)
    np.testing.assert_array_equal(placed.call.logprobs, said.sampled.logprobs)
    np.testing.assert_array_equal(placed.call.versions, versions(said))


def _check_trained(rollout: Rollout) -> None:
    """Every trained token is one that the engine sampled at that very place, with its logprob and version; as many
    of each call as its fate says."""
    origin = {
        _key(logprob): (said, n) for said in rollout.engine.said for n, logprob in enumerate(said.sampled.logprobs)
    }
    kept: Counter[str] = Counter()
    for branch in rollout.branches:
        for entry, logprob, version in zip(branch.entries, branch.logprobs, branch.versions, strict=True):
            said, n = origin[_key(logprob)]
            whole = np.concatenate((said.prompt, said.sampled.ids[: n + 1]))
            assert entry == len(said.prompt) + n
            assert np.array_equal(branch.tokens[: entry + 1], whole)
            assert version == versions(said)[n]
            kept[said.call_id] += 1
    assert kept == Counter({fate.call_id: fate.kept for fate in rollout.closed.fates if fate.kept})


def _key(logprob: np.float32) -> bytes:
    return np.float32(logprob).tobytes()


def is_chain(rollout: Rollout) -> bool:
    """Whether every main prompt begins with all of the main call before it: nothing was encoded anew."""
    return all(extends(one, other) for one, other in pairwise(rollout.main)) and not rollout.broken


def check_one_branch(rollout: Rollout) -> None:
    """The main conversation is one branch, every sampled token of it is trained, and nothing else is."""
    assert is_chain(rollout), table(rollout)
    assert len(rollout.branches) == 1
    assert rollout.closed.num_kept == sum(len(said.sampled.ids) for said in rollout.main)
    assert all(reason.startswith("auxiliary_") for reason in rollout.dropped), rollout.dropped
