"""Between Megatron's sharded parameters and Hugging Face's names: load, export, and folders that others open.

The target is one tensor per expert and projection, as transformers writes them and vLLM reads them. A rank
reads only its slices from disk; an export gathers one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from msgspec import Struct
from torch import Tensor

from clawpipe.learner.model import PolicyModel, unwrap
from clawpipe.learner.safetensor_files import (
    Reader,
    copy_sidecars,
    finish_folder,
    staging_of,
    write,
    write_shards,
)
from clawpipe.pipeline.errors import LearnerError

Layout = Literal["whole", "rows", "columns", "qkv", "gate_up"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Megatron's local experts, and TransformerEngine's grouped ones.
_EXPERT_WEIGHT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<grouped>\d*)"
)

# Parameters outside the layers, and of a layer: Megatron's name -> (Hugging Face's names, layout). TransformerEngine
# keeps the norm before a linear layer in that layer.
_OUTER: dict[str, tuple[tuple[str, ...], Layout]] = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), "rows"),
    "decoder.final_layernorm.weight": (("model.norm.weight",), "whole"),
    "output_layer.weight": (("lm_head.weight",), "rows"),
    "value_head.weight": (("score.weight",), "whole"),  # as transformers' ForTokenClassification has it
}
_INNER: dict[str, tuple[tuple[str, ...], Layout]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": (("mlp.gate.weight",), "whole"),
}
_EXPERT: dict[str, tuple[tuple[str, ...], Layout]] = {
    "linear_fc1": (("gate_proj.weight", "up_proj.weight"), "gate_up"),
    "linear_fc2": (("down_proj.weight",), "columns"),
}


class Placement(Struct, frozen=True, kw_only=True):
    """Where one parameter of this rank belongs in the Hugging Face model."""

    prefix: str  # for an expert, with {expert} in the place of its global number
    names: tuple[str, ...]
    layout: Layout
    local_expert: int | None = None

    def full_names(self, expert: int | None) -> tuple[str, ...]:
        """Hugging Face's names, of the given global expert."""
        prefix = self.prefix if expert is None else self.prefix.format(expert=expert)
        return tuple(prefix + name for name in self.names)


def place(name: str) -> Placement:
    """The placement of Megatron's parameter `name` (local or TransformerEngine names). Raises LearnerError."""
    if name in _OUTER:
        names, layout = _OUTER[name]
        return Placement(prefix="", names=names, layout=layout)
    match = _LAYER.fullmatch(name)
    if match:
        prefix, rest = f"model.layers.{match[1]}.", match[2]
        if rest in _INNER:
            names, layout = _INNER[rest]
            return Placement(prefix=prefix, names=names, layout=layout)
        expert = _EXPERT_WEIGHT.fullmatch(rest)
        number = expert and (expert["local"] or expert["grouped"])
        if expert and number:
            names, layout = _EXPERT[expert["linear"]]
            return Placement(
                prefix=prefix + "mlp.experts.{expert}.",
                names=names,
                layout=layout,
                local_expert=int(number),
            )
    raise LearnerError(f"parameter {name} has no Hugging Face name; the model has a part that hf.py does not know")


class _Groups:
    """Sizes, ranks and head counts that slicing and gathering need."""

    def __init__(self, model: PolicyModel) -> None:
        config = model.config
        self.head_dim: int = config.kv_channels
        self.queries_per_group: int = config.num_attention_heads // config.num_query_groups
        self.expert_size: int = parallel_state.get_expert_model_parallel_world_size()
        self.expert_rank: int = parallel_state.get_expert_model_parallel_rank()
        self.local_experts: int = (config.num_moe_experts or 0) // self.expert_size

    def of(self, placement: Placement) -> Any:
        """The process group over which a parameter is split."""
        if placement.layout == "whole":
            return None
        if placement.local_expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()

    def here(self, placement: Placement) -> int | None:
        """The global number of this rank's expert."""
        if placement.local_expert is None:
            return None
        return self.expert_rank * self.local_experts + placement.local_expert

    def everywhere(self, placement: Placement) -> list[int | None]:
        """The global numbers of the experts that share a local number, by expert rank."""
        if placement.local_expert is None:
            return [None]
        return [rank * self.local_experts + placement.local_expert for rank in range(self.expert_size)]


def load(model: torch.nn.Module, hf_dir: Path, *, keep: Collection[str] = ()) -> None:
    """Fills the model from the safetensors files of a Hugging Face folder; each rank reads only its part.

    Parameters in `keep`, by Megatron's names, stay as they are: the folder need not have them.
    Raises LearnerError when a tensor is missing or has another shape.
    """
    policy = unwrap(model)
    groups = _Groups(policy)
    with Reader(hf_dir) as reader, torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in keep:
                continue
            placement = place(name)
            value = _read(reader, placement, groups)
            if value.shape != parameter.shape:
                raise LearnerError(
                    f"{hf_dir}: {placement.full_names(groups.here(placement))} gives {tuple(value.shape)} for {name}, "
                    f"which has {tuple(parameter.shape)}; config.json and the weights do not belong together"
                )
            parameter.copy_(value)


def _read(reader: Reader, placement: Placement, groups: _Groups) -> Tensor:
    names = placement.full_names(groups.here(placement))
    group = groups.of(placement)
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    dim = 1 if placement.layout == "columns" else 0
    parts = [reader.part(name, dim, size, rank) for name in names]
    return _merge_qkv(parts, groups) if placement.layout == "qkv" else torch.cat(parts)


def _merge_qkv(parts: list[Tensor], groups: _Groups) -> Tensor:
    """Rows of q, k and v to Megatron's order: for each query group its q heads, its k, its v."""
    width = parts[0].shape[1]
    count = parts[1].shape[0] // groups.head_dim
    return torch.cat([part.reshape(count, -1, width) for part in parts], dim=1).reshape(-1, width)


def _split_qkv(merged: Tensor, groups: _Groups) -> list[Tensor]:
    width, head = merged.shape[1], groups.head_dim
    rows = [groups.queries_per_group * head, head, head]
    grouped = merged.view(-1, sum(rows), width)
    return [part.reshape(-1, width) for part in torch.split(grouped, rows, dim=1)]


def _own_data(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.detach()


def export(
    model: torch.nn.Module, value: Callable[[torch.nn.Parameter], Tensor] = _own_data
) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under Hugging Face's names, one parameter gathered at a time, in `shapes`' order.

    Collective: every rank must exhaust the iterator; only rank 0 is given items. A tensor may share the
    parameter's memory: use it before the next step, or copy it.

    Args:
        value: what to export of a parameter, of its shape (the weights; a test exports gradients).
    """
    policy = unwrap(model)
    groups = _Groups(policy)
    for name, parameter in policy.named_parameters():
        placement = place(name)
        parts = _gather_parts(value(parameter), placement, groups)
        gathered = [_gather_experts(part, placement) for part in parts]
        if dist.get_rank() == 0:
            for index, expert in enumerate(groups.everywhere(placement)):
                for full_name, per_expert in zip(placement.full_names(expert), gathered, strict=True):
                    yield full_name, per_expert[index]


def _gather_parts(local: Tensor, placement: Placement, groups: _Groups) -> list[Tensor]:
    """One parameter gathered over its tensor group and taken apart into Hugging Face's tensors."""
    shards = _gather(local, groups.of(placement))
    if placement.layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [_cat([half[which] for half in halves], 0) for which in range(2)]
    whole = _cat(shards, 1 if placement.layout == "columns" else 0)
    return _split_qkv(whole, groups) if placement.layout == "qkv" else [whole]


def _gather_experts(part: Tensor, placement: Placement) -> list[Tensor]:
    if placement.local_expert is None:
        return [part]
    return _gather(part, parallel_state.get_expert_model_parallel_group())


def _gather(local: Tensor, group: Any) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of everything that `export` yields, in its order, without communication."""
    policy = unwrap(model)
    groups = _Groups(policy)
    out: dict[str, tuple[int, ...]] = {}
    for name, parameter in policy.named_parameters():
        placement = place(name)
        for expert in groups.everywhere(placement):
            names = placement.full_names(expert)
            out |= dict(zip(names, _full_shapes(tuple(parameter.shape), placement, groups), strict=True))
    return out


def _full_shapes(local: tuple[int, ...], placement: Placement, groups: _Groups) -> list[tuple[int, ...]]:
    group = groups.of(placement)
    size = 1 if group is None else group.size()
    if placement.layout == "columns":
        return [(local[0], local[1] * size)]
    rows = local[0] * size
    if placement.layout == "gate_up":
        return [(rows // 2, *local[1:])] * 2
    if placement.layout == "qkv":
        per_group = rows // (groups.queries_per_group + 2)
        return [(per_group * count, *local[1:]) for count in (groups.queries_per_group, 1, 1)]
    return [(rows, *local[1:])]


def save_weights(model: torch.nn.Module, path: Path) -> None:
    """Writes all weights to one safetensors file, streamed and renamed into place when complete.

    Collective; rank 0 writes, and when the call returns anywhere the file is there.
    """
    dtype = next(unwrap(model).parameters()).dtype
    tensors = export(model)
    if dist.get_rank() == 0:
        write(path, shapes(model), dtype, tensors)
    else:
        for _ in tensors:
            raise AssertionError("only rank 0 is given tensors")
    dist.barrier()


def save_hf_folder(
    model: torch.nn.Module, source_dir: Path, target_dir: Path, max_shard_bytes: int | None = None
) -> None:
    """Writes a folder that transformers and vLLM load: `source_dir`'s configuration and tokenizer, these weights.

    Collective, like `save_weights`. The folder appears complete or not at all.
    Raises LearnerError when `target_dir` exists and is not empty.

    Args:
        max_shard_bytes: of tensors in one file; None: one file.
    """
    staging = staging_of(target_dir)
    dtype = next(unwrap(model).parameters()).dtype
    if dist.get_rank() == 0:
        check_target(target_dir)
        copy_sidecars(source_dir, staging, dtype)
    tensors = export(model)
    if dist.get_rank() == 0:
        write_shards(staging, shapes(model), dtype, tensors, max_shard_bytes)
        finish_folder(staging, target_dir)
    else:
        for _ in tensors:
            raise AssertionError("only rank 0 is given tensors")
    dist.barrier()


def check_target(folder: Path) -> None:
    """LearnerError for a folder that `save_hf_folder` would not write."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LearnerError(f"{folder}: exists already; remove it or name another folder")
