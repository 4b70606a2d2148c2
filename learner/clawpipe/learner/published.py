"""Shapes of well-known models, for plans on a machine that does not have the model's folder.

From their public config.json (huggingface.co/Qwen/Qwen3-30B-A3B and Qwen/Qwen3-8B). What is there to be read is
read: `shape.read_shape` comes first.
"""

from __future__ import annotations

from msgspec.structs import replace

from clawpipe.learner.shape import ModelShape

_QWEN3_8B = ModelShape(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    num_experts=0,
    experts_per_token=0,
    normalize_expert_weights=False,
    qk_norm=True,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position=40960,
    tied_embeddings=False,
    initializer_range=0.02,
)

SHAPES = {
    "Qwen3-8B": _QWEN3_8B,
    "Qwen3-30B-A3B": replace(
        _QWEN3_8B,
        model_type="qwen3_moe",
        hidden_size=2048,
        num_layers=48,
        num_kv_heads=4,
        ffn_size=768,
        num_experts=128,
        experts_per_token=8,
        normalize_expert_weights=True,
    ),
}


def published_shape(name: str) -> ModelShape | None:
    """The shape of the model whose folder is called `name`; None for one that is not in the table."""
    return SHAPES.get(name)
