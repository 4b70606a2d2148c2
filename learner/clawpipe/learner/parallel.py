"""Starts torch.distributed and Megatron's process groups, and refuses layouts that would train wrongly.

Every learner process calls `start` (or uses `session`) before it builds a model. Under torchrun the processes
meet through its environment; a single process needs no launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from msgspec import Struct
from torch.distributed import HashStore  # type: ignore[attr-defined]

from clawpipe.learner import cpu
from clawpipe.learner.shape import check_layout
from clawpipe.pipeline.config import ParallelConfig

_TIMEOUT = timedelta(minutes=30)


class Ranks(Struct, frozen=True, kw_only=True):
    """This process's place. Ranks that differ only in `data_rank` hold the same weights outside the experts."""

    rank: int
    world_size: int
    data_rank: int  # which share of the batch
    data_size: int
    tensor_rank: int
    tensor_size: int
    expert_rank: int
    expert_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the learner: talks to NATS, writes files, logs."""
        return self.rank == 0


def start(parallel: ParallelConfig, seed: int = 0) -> Ranks:
    """Joins the process group, unless this process is in one, and makes Megatron's groups; `stop` undoes both.

    Under torchrun a process can join once: its store still holds the keys of the group that `stop` left.
    Raises LearnerError for a layout that `check_layout` refuses, before anything is opened.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(parallel, world_size)
    cpu.install()
    if not dist.is_initialized():
        _join(world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )
    if not cpu.needed():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ranks()


def _join(world_size: int) -> None:
    backend = "gloo" if cpu.needed() else "nccl"
    if not cpu.needed():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=_TIMEOUT)


def ranks() -> Ranks:
    """This process's place in the groups that `start` made."""
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def stop() -> None:
    """Leaves the groups. Safe to call when `start` failed half-way."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def session(parallel: ParallelConfig, seed: int = 0) -> Iterator[Ranks]:
    """`start` and, whatever happens, `stop`."""
    try:
        yield start(parallel, seed)
    finally:
        stop()
