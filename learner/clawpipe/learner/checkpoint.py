"""Checkpoints: weights, optimizer, version, stream cursor and random state as one atomic thing.

A checkpoint is a folder of Megatron's torch_dist format, readable in any layout; with PPO it has a folder of the
same format in it, which holds the value model and its optimizer. It is written under a temporary name, gets its
manifest last and then its final name: what a crash leaves is never picked.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from msgspec import Struct
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from clawpipe.learner.cpu import CudaAsCpu
from clawpipe.learner.model import unwrap
from clawpipe.learner.optimizer import AdamW
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.records import StreamCursor

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"
_CRITIC = "critic"  # the folder within

Learned = tuple[torch.nn.Module, AdamW]


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. Its presence, with all files at their sizes, makes the folder a checkpoint."""

    version: int  # under which these weights were published
    updates: int  # that these weights have seen
    cursor: StreamCursor
    files: dict[str, int]  # name -> bytes
    created_s: float = 0.0
    schema: int = 1


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: AdamW,
    *,
    version: int,
    updates: int,
    cursor: StreamCursor,
    keep_last: int,
    keep_every: int = 0,
    critic: Learned | None = None,
) -> Path:
    """Writes <folder>/u<updates>-v<version>, and removes all but the `keep_last` newest. A collective call.

    Those whose `updates` are a multiple of `keep_every` stay too (0: none).
    """
    target = folder / f"u{updates:07d}-v{version:07d}"
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    if _is_main():
        _clear(folder)
        (unfinished / _CRITIC if critic else unfinished).mkdir(parents=True)
    dist.barrier()
    with _quiet():
        state = _state(model, optimizer) | {"rng": torch.get_rng_state()}
        dist_checkpointing.save(state, str(unfinished), _InProcess("torch_dist", 1))
        if critic:
            dist_checkpointing.save(_state(*critic), str(unfinished / _CRITIC), _InProcess("torch_dist", 1))
    dist.barrier()
    if _is_main():
        _seal(unfinished, target, version=version, updates=updates, cursor=cursor)
        _prune(folder, keep_last, keep_every)
    dist.barrier()
    return target


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint. None when there is none."""
    return next(reversed(complete(folder)), None)


def complete(folder: Path) -> list[Checkpoint]:
    """All complete checkpoints, the newest last."""
    found = [_read(path) for path in folder.glob("u*-v*")]
    return sorted((c for c in found if c), key=_order)


def _order(checkpoint: Checkpoint) -> tuple[int, int]:
    """The newer, the higher: a resumed run has a higher version, and updates may leave the version as it is."""
    return checkpoint.manifest.version, checkpoint.manifest.updates


def load(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: AdamW, critic: Learned | None = None) -> None:
    """Restores model, optimizer and random state, in whatever layout this learner has. A collective call.

    A value model that nobody asks for is left where it is. Raises LearnerError when the checkpoint does not fit.
    """
    if critic and not (checkpoint.path / _CRITIC).is_dir():
        raise LearnerError(
            f'{checkpoint.path}: holds no value model, and [algorithm] kind = "ppo" needs one: another kind wrote it; '
            "resume with the one that the run was started with, or use another run folder"
        )
    state = _restored(checkpoint.path, _state(model, optimizer) | {"rng": torch.get_rng_state()})
    _take(state, model, optimizer)
    if critic:
        _take(_restored(checkpoint.path / _CRITIC, _state(*critic)), *critic)
    torch.set_rng_state(state["rng"])


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Restores the model alone, without a second copy of it. A collective call.

    Raises LearnerError when the checkpoint does not fit the model.
    """
    with _quiet():
        weights = _weights(model)
        # Taken apart, fused projections are views of the parameters like all others, and are read in place;
        # Megatron would put them together anew.
        apply_factories(weights)
    _restored(checkpoint.path, {"model": weights})


def _restored(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """`wanted` with what the folder holds."""
    try:
        with _quiet():
            state: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    except (RuntimeError, KeyError, CheckpointingException, CheckpointException) as err:
        reason = str(err).strip().rsplit("\n", 1)[-1]  # torch puts a whole traceback into its message
        raise LearnerError(
            f"{path}: does not fit the model ({reason}); "
            "resume with the model that the run was started with, or use another run folder"
        ) from err
    return state


def _take(state: dict[str, Any], model: torch.nn.Module, optimizer: AdamW) -> None:
    unwrap(model).load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])


class _InProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's torch_dist format written by this process.

    The stock strategy forks writers and keeps a manager process; a learner that talks to NATS on another
    thread must not be forked.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Writes this rank's shards; rank 0 the metadata. A collective call."""
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save_state(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _state(model: torch.nn.Module, optimizer: AdamW) -> dict[str, Any]:
    weights = _weights(model)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights),
    }


def _weights(model: torch.nn.Module) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights: dict[str, Any] = unwrap(model).sharded_state_dict(metadata=metadata)
    return weights


@contextmanager
def _quiet() -> Iterator[None]:
    """Megatron and torch warn about their own deprecated calls to each other; nobody here can act on it."""
    with CudaAsCpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _seal(unfinished: Path, target: Path, *, version: int, updates: int, cursor: StreamCursor) -> None:
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    manifest = Manifest(
        version=version,
        updates=updates,
        cursor=cursor,
        files={str(path.relative_to(unfinished)): path.stat().st_size for path in files},
        created_s=time.time(),
    )
    (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    # Once `Committed` is sent, the records behind this checkpoint are purged: it must survive a power cut.
    folders = [path for path in unfinished.rglob("*") if path.is_dir()]
    for path in [*files, *folders, unfinished / MANIFEST, unfinished]:
        _sync(path)
    unfinished.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> Checkpoint | None:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        complete = all((path / name).stat().st_size == size for name, size in manifest.files.items())
    except (OSError, msgspec.MsgspecError):
        return None
    return Checkpoint(path=path, manifest=manifest) if complete else None


def _clear(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)


def _prune(folder: Path, keep_last: int, keep_every: int) -> None:
    """Incomplete folders go too: the checkpoint that was just written is newer than all of them."""
    paths = list(folder.glob("u*-v*"))
    found = complete(folder)
    for_good = [c for c in found if keep_every and c.manifest.updates and c.manifest.updates % keep_every == 0]
    keep = {checkpoint.path for checkpoint in [*found[-keep_last:], *for_good]}
    for path in paths:
        if path not in keep:
            # The manifest goes first, so that a crash in between leaves nothing that looks complete.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)


def _is_main() -> bool:
    return dist.get_rank() == 0
