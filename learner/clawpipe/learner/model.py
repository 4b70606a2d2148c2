"""The policy model: a Megatron-Core GPT model built from a Hugging Face configuration.

On the CPU it uses Megatron's local layers with the parts of `cpu`; with CUDA, TransformerEngine's layers and
grouped GEMM. In both, positions come from the forest, the core attention is the tree attention, and the model
returns hidden states: `numerics` computes the logits of the rows that are needed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from clawpipe.learner import cpu
from clawpipe.learner.shape import ModelShape, check_split, read_shape
from clawpipe.learner.tree_attention import Planner, TreeCoreAttention
from clawpipe.pipeline.config import ParallelConfig, Recompute
from clawpipe.pipeline.errors import LearnerError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by their names in [learner] dtype

# T packed tokens, H hidden size, R rows, V vocabulary, P tensor-parallel size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by their names in [learner] dtype


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel over one packed forest: tokens [1, T], positions [1, T], `end` [T] as mask -> hidden states [T, H].

    Two departures from upstream: rotary angles follow the given positions, which in a tree are depths; and the
    forward pass stops before the output layer, with hidden states gathered over the tensor ranks.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # `logits` is given complete rows, so the output layer must not gather the sequence again.
        self.output_layer.sequence_parallel = False

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, _, *rest = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        frequencies = self.rotary_pos_emb.inv_freq.to(position_ids.device)
        half = position_ids[0].to(torch.float32)[:, None] * frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, None, :]
        return (decoder_input, angles, *rest)

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        if self.config.sequence_parallel:
            # The output layer sums the gradient over the tensor ranks, so each takes its rows and no more.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states[:, 0]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V / P] of this tensor rank's part of the vocabulary, in the model's dtype."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out, _ = self.output_layer(hidden_RH[:, None], weight=weight)
        rows: Tensor = out[:, 0]
        return rows


Built = TypeVar("Built", bound=PolicyModel)


def build_model(
    hf_config_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    seed: int,
    recompute: Recompute = "none",
) -> PolicyModel:
    """Builds this rank's part of the model that <hf_config_dir>/config.json describes, with random weights.

    With `recompute` "full" the backward pass computes each layer anew from its input, which is all that is kept.
    `parallel.start` must have run. Weights come from `hf.load`; the random ones are for models that are born
    here, and equal in every layout outside the experts. The model is on `cpu.device()`.
    Raises LearnerError when the model is not supported or the layout does not divide it.
    """
    return construct(PolicyModel, hf_config_dir, parallel, dtype, seed, recompute)


def construct(
    kind: type[Built],
    hf_config_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    seed: int,
    recompute: Recompute,
) -> Built:
    """`build_model` for any kind of model over packed forests."""
    shape = read_shape(hf_config_dir)
    check_split(shape, parallel)
    if not cpu.needed() and dtype == torch.float32:
        raise LearnerError("[learner] dtype = float32: the attention kernel on CUDA needs bfloat16; set it so")
    torch.manual_seed(seed)
    config = transformer_config(shape, parallel, dtype, recompute)
    model = kind(
        config=config,
        transformer_layer_spec=_layer_spec(config, shape),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    if cpu.needed():
        cpu.fit_dispatchers(model.decoder.layers)
    model.to(cpu.device())
    return model


def transformer_config(
    shape: ModelShape, parallel: ParallelConfig, dtype: torch.dtype, recompute: Recompute = "none"
) -> TransformerConfig:
    """Megatron's configuration: fused kernels with CUDA, plain ones on the CPU, no dropout, no router loss."""
    cuda = not cpu.needed()
    moe = _moe_options(shape, fused=cuda) if shape.num_experts else {}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=shape.initializer_range,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not cuda,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda,
        persist_layer_norm=cuda,
        tensor_model_parallel_size=parallel.tensor,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        # Without it Megatron's expert gradients are wrong under tensor parallelism.
        sequence_parallel=parallel.tensor > 1,
        **_recompute_options(recompute),
        **moe,
    )


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _moe_options(shape: ModelShape, fused: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_router_pre_softmax": not shape.normalize_expert_weights,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
    }


def _layer_spec(config: TransformerConfig, shape: ModelShape) -> ModuleSpec | TransformerBlockSubmodules:
    core_attention = partial(TreeCoreAttention, planner=Planner())
    if not cpu.needed():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.num_experts or None, moe_grouped_gemm=True, qk_layernorm=shape.qk_norm
        )
        spec.submodules.self_attention.submodules.core_attention = core_attention
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = core_attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = cpu.RMSNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = cpu.RMSNorm
    if shape.num_experts:
        spec.submodules.mlp.submodules.router = cpu.Router
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=cpu.RMSNorm)


def unwrap(model: torch.nn.Module) -> PolicyModel:
    """The policy model inside Megatron's wrappers (gradient reduction, mixed precision)."""
    inner: Any = model
    while not isinstance(inner, PolicyModel):
        inner = inner.module
    return inner
