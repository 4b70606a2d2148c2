"""A model's shape, and which layouts can train it: all of it known before anything is built, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.errors import LearnerError


class ModelShape(Struct, frozen=True, kw_only=True):
    """What a Hugging Face config.json says about a model that the learner can train."""

    model_type: str  # qwen3_moe, qwen3 or llama
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int  # of one expert in a mixture
    num_experts: int  # 0: dense
    experts_per_token: int
    normalize_expert_weights: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tied_embeddings: bool
    initializer_range: float


def read_shape(hf_dir: Path) -> ModelShape:
    """Reads <hf_dir>/config.json. Raises LearnerError for a model that is not supported, with the key that says so."""
    path = hf_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _shape(path, config)
    except (OSError, json.JSONDecodeError) as err:
        raise LearnerError(f"{path}: cannot be read as a model configuration ({err}); check the folder") from err
    except KeyError as err:
        raise LearnerError(f"{path}: key {err} is missing; is this a Hugging Face model folder?") from err


def _shape(path: Path, config: dict[str, Any]) -> ModelShape:
    model_type = config["model_type"]
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    for refused, text in (
        (
            model_type not in ("qwen3_moe", "qwen3", "llama"),
            f"model_type {model_type!r} (known: qwen3_moe, qwen3, llama)",
        ),
        (rope.get("rope_type", rope.get("type", "default")) != "default", "scaled rotary embeddings"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act {config.get('hidden_act')!r}"),
        (config.get("attention_bias", False) or config.get("mlp_bias", False), "biases"),
        (config.get("use_sliding_window", False), "sliding window attention"),
        (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1, "dense layers between experts"),
    ):
        if refused:
            raise LearnerError(f"{path}: {text} is not supported by the learner; choose another model")
    moe = model_type == "qwen3_moe"
    return ModelShape(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        ffn_size=config["moe_intermediate_size"] if moe else config["intermediate_size"],
        # transformers 5 renamed the key.
        num_experts=(config.get("num_experts") or config["num_local_experts"]) if moe else 0,
        experts_per_token=config["num_experts_per_tok"] if moe else 0,
        normalize_expert_weights=config.get("norm_topk_prob", False),
        qk_norm=model_type != "llama",
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        max_position=config["max_position_embeddings"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        initializer_range=config.get("initializer_range", 0.02),
    )


def check_split(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Refuses a layout that does not divide the model. Raises LearnerError."""
    for size, name, of, count in (
        (parallel.tensor, "tensor", "attention heads", shape.num_heads),
        (parallel.tensor, "tensor", "key-value heads", shape.num_kv_heads),
        (parallel.tensor, "tensor", "vocabulary entries", shape.vocab_size),
        (
            parallel.expert_tensor if shape.num_experts else parallel.tensor,
            "tensor",
            "feed-forward rows",
            shape.ffn_size,
        ),
        (parallel.expert, "expert", "experts", shape.num_experts),
    ):
        if count % size or (of == "experts" and size > max(count, 1)):
            raise LearnerError(
                f"[learner.parallel] {name} = {size} does not divide the model's {count} {of}; choose a divisor"
            )


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Refuses what `ParallelConfig` lets through and this learner cannot run. Raises LearnerError with the reason."""
    experts_over = parallel.expert * parallel.expert_tensor
    if world_size != parallel.processes:
        raise LearnerError(
            f"[learner.parallel] processes = {parallel.processes}, but {world_size} processes started; "
            f"start torchrun with --nproc-per-node {parallel.processes} or change the configuration"
        )
    if parallel.pipeline != 1:
        raise LearnerError(
            f"[learner.parallel] pipeline = {parallel.pipeline}: the learner has no pipeline schedule; "
            "set pipeline = 1 and use tensor or expert"
        )
    if world_size % experts_over:
        raise LearnerError(
            f"[learner.parallel] {world_size} processes are not a multiple of expert x expert_tensor = "
            f"{experts_over}; change processes"
        )
