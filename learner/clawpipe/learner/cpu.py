"""Everything that Megatron-Core needs to run without CUDA, in one place; with CUDA none of it is used.

Megatron asks torch.cuda for the current device in a few spots, names "cuda" where it makes tensors, and its
stock router and token dispatcher assume streams and TransformerEngine. `install` answers the questions,
`CudaAsCpu` redirects the tensors, and the classes below replace the parts that cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def needed() -> bool:
    """Whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def device() -> torch.device:
    """Where the model lives: the current CUDA device, or the CPU."""
    return torch.device("cpu") if needed() else torch.device("cuda", torch.cuda.current_device())


def install() -> None:
    """Makes torch.cuda answer for the CPU, for this process. Does nothing when CUDA is there; idempotent.

    The random state tracker becomes the one that keeps no state: dropout is 0, so nothing draws from it.
    """
    if not needed():
        return
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    torch.cuda.synchronize = _nothing
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state = _no_rng_state
    tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=True)
    # Any value but None keeps the dispatcher from opening a CUDA stream.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = False


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _no_rng_state(*_args: object, **_kwargs: object) -> Tensor:
    return torch.zeros(0, dtype=torch.uint8)


class CudaAsCpu(TorchFunctionMode):
    """Within this context, tensors asked for on "cuda" are made on the CPU. Without effect when CUDA is there.

    Megatron's optimizer and its gradient reduction name the device; wrap their construction and their steps.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not needed():
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron sorts its gradients by these names.
            return _CUDA_TYPE_NAMES.get(args[0].dtype, func(*args))
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's constructor; its weight says when its gradient is partial per tensor rank."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Router(TopKRouter):  # type: ignore[misc]
    """The top-k router without the move to the GPU and without TransformerEngine's GEMM."""

    def gating(self, input: Tensor) -> Tensor:
        """Router logits [T, 1, E] of hidden states [T, 1, H], in the router's dtype."""
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype))


class AlltoAllDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """The all-to-all token dispatcher without the copy stream: the split sizes are on the host already."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                setattr(self, name, splits if splits is None else splits.numpy())
        return tokens_per_expert


def fit_dispatchers(layers: Sequence[Any]) -> None:
    """Gives every MoE layer the dispatcher of this module; dense layers stay as they are."""
    for layer in layers:
        if hasattr(layer.mlp, "token_dispatcher"):
            layer.mlp.token_dispatcher = AlltoAllDispatcher(
                layer.mlp.num_local_experts,
                layer.mlp.local_expert_indices,
                config=layer.mlp.config,
                pg_collection=get_default_pg_collection(),
            )
