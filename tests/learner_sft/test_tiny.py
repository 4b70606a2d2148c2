"""The role `model`: a folder that others load, and the same one every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clawpipe.learner import tiny
from clawpipe.pipeline.errors import LearnerError


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_same_seed_gives_the_same_folder_and_another_seed_other_weights(built: Any, tmp_path: Path) -> None:
    first = files(built.runtime.init_model_dir)
    again = msgspec.structs.replace(built.runtime, init_model_dir=str(tmp_path / "again"))
    tiny.main(built.config, again)
    other = msgspec.structs.replace(built.runtime, init_model_dir=str(tmp_path / "other"))
    tiny.main(built.with_model(seed=6), other)
    assert files(again.init_model_dir) == first
    changed = {name for name, data in files(other.init_model_dir).items() if data != first[name]}
    assert changed == {"model.safetensors"}


def test_weights_are_named_per_expert_and_fit_the_configuration(built: Any) -> None:
    folder = Path(built.runtime.init_model_dir)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 32)
    experts = {name for name in weights if ".experts." in name}
    assert experts == {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
        for expert in (0, 1)
        for part in ("gate", "up", "down")
    }
    assert "lm_head.weight" not in weights
    assert all(value.dtype == torch.float32 for value in weights.values())
    assert 0.03 < weights["model.layers.0.self_attn.q_proj.weight"].std() < 0.07
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_generation_settings_are_the_ends_and_nothing_else(built: Any) -> None:
    folder = Path(built.runtime.init_model_dir)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings.pop("transformers_version")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    assert settings == {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]}


def test_transformers_loads_the_folder(built: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(built.runtime.init_model_dir, dtype=torch.float32)
    weights = load_file(Path(built.runtime.init_model_dir, "model.safetensors"))
    assert torch.equal(model.get_output_embeddings().weight, weights["model.embed_tokens.weight"])
    fused = model.model.layers[0].mlp.experts.gate_up_proj[1]
    halves = [weights[f"model.layers.0.mlp.experts.1.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(fused, torch.cat(halves))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size must be a multiple of 32"),
        ({"expert_size": 40}, "expert_size must be a multiple of 32"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"experts_per_token": 3}, "experts_per_token must not be above num_experts"),
    ],
)
def test_a_shape_that_the_engine_refuses_is_refused_first(world: Any, change: dict[str, int], message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        tiny.main(world.with_model(**change), world.runtime)
    assert not Path(world.runtime.init_model_dir).exists()


def test_a_broken_demonstration_is_named_by_its_line(world: Any) -> None:
    with Path(world.runtime.demos_path).open("a") as file:
        file.write('{"kind": "conversation", "tools": []}\n')
    with pytest.raises(LearnerError, match=r"demos\.jsonl, line 21: not a demonstration"):
        tiny.main(world.config, world.runtime)
