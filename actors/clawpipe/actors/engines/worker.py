"""Inside vLLM's worker: loads a version of the weights from a safetensors file in shared memory.

The last station of a push: `transfer.py` has the engine paused and calls start, update and finish over HTTP; vLLM
hands these calls to this class in each worker. Works on any device: the tensors are read as they lie in the file
and the model's own loaders shard, pack and move them.

vLLM 0.32 loads two things wrongly on CPU, and says nothing: every later answer is sampled from wrong weights.
- Experts are laid out for their kernel only when the layer has no kernel yet. A reload into a layer that has one
  leaves the file's layout in the kernel's buffers. `drop_expert_kernels` takes the kernels away first.
- An output head that shares the embedding's weights has no tensor of its own in the file, so a reload passes it by,
  and it goes on with the packed copy that it made at the start. `pack_heads` makes that copy again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Each switch leaves one of vLLM's faults in place, so that a test can show that it is there."""

    keep_expert_kernels: bool = False
    keep_packed_heads: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`path`: a safetensors file with the Hugging Face names of all parameters."""

    path: str


class SharedMemoryWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM's side of a push. The whole file is one update: start, update, finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    faults = InitInfo()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """There is nothing to meet: a file needs no rendezvous."""
        self.faults = init_info

    def start_weight_update(self) -> None:
        """Makes the model's layers ready to be loaded again."""
        if self.device.type == "cpu" and not self.faults.keep_expert_kernels:
            drop_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the file named by {"path": ...}. Raises when it is missing, or no safetensors."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Streams the file's tensors through the model's own loaders."""
        self.model.load_weights(read_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        """Puts the loaded layers in place; the kernels' buffers keep their addresses."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and not self.faults.keep_packed_heads:
            pack_heads(self.model)

    def shutdown(self) -> None:
        """Holds nothing between updates."""


def drop_expert_kernels(model: torch.nn.Module) -> None:
    """Lets every expert layer go through its first-load path again, which packs the weights."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_heads(model: torch.nn.Module) -> None:
    """Makes every output head's packed copy from the weights that it has now."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def read_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every entry of the file, mapped into memory, not copied."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no dict and cannot be iterated
            yield name, file.get_tensor(name)
