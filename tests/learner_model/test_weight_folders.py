"""Weights between Hugging Face folders and the model."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from clawpipe.learner import hf
from clawpipe.learner.model import PolicyModel, build_model
from clawpipe.learner.safetensor_files import write, write_shards
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.errors import LearnerError


def test_a_saved_folder_holds_the_loaded_weights_exactly(moe: PolicyModel, moe_folder: Path, tmp_path: Path) -> None:
    hf.save_hf_folder(moe, moe_folder, tmp_path / "saved")
    written, original = load_file(tmp_path / "saved/model.safetensors"), load_file(moe_folder / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert (tmp_path / "saved/tokenizer_config.json").read_bytes() == (
        moe_folder / "tokenizer_config.json"
    ).read_bytes()
    assert not (tmp_path / "saved.incomplete").exists()


def test_transformers_loads_a_saved_folder(
    moe: PolicyModel, moe_folder: Path, oracle: ModuleType, tmp_path: Path
) -> None:
    hf.save_hf_folder(moe, moe_folder, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    original = dict(oracle.build_hf("qwen3_moe").named_parameters())
    assert theirs.dtype == torch.float32
    assert all(torch.equal(p, original[name]) for name, p in theirs.named_parameters())


def test_a_tied_model_has_no_output_head_on_disk(
    one_process: ParallelConfig, oracle: ModuleType, tmp_path: Path
) -> None:
    folder = oracle.save_hf(oracle.build_hf("qwen3"), tmp_path / "tied")
    model = build_model(folder, one_process, torch.float32, seed=0)
    hf.load(model, folder)
    assert "lm_head.weight" not in hf.shapes(model)
    assert hf.shapes(model).keys() == load_file(folder / "model.safetensors").keys()


def test_shapes_foretell_the_export_in_order(moe: PolicyModel) -> None:
    foretold = list(hf.shapes(moe).items())
    assert foretold == [(name, tuple(tensor.shape)) for name, tensor in hf.export(moe)]


def test_bfloat16_weights_are_the_rounded_ones_and_the_configuration_says_so(
    moe_folder: Path, one_process: ParallelConfig, tmp_path: Path
) -> None:
    model = build_model(moe_folder, one_process, torch.bfloat16, seed=0)
    hf.load(model, moe_folder)
    hf.save_hf_folder(model, moe_folder, tmp_path / "saved")
    written, original = load_file(tmp_path / "saved/model.safetensors"), load_file(moe_folder / "model.safetensors")
    assert all(torch.equal(written[name], original[name].bfloat16()) for name in original)
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_of_several_files_is_read(moe: PolicyModel, moe_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(moe_folder / "model.safetensors")
    names = sorted(tensors)
    for part in range(2):
        save_file({name: tensors[name] for name in names[part::2]}, tmp_path / f"model-{part}.safetensors")
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    hf.load(moe, tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in hf.export(moe))


def test_an_absent_tensor_is_named(moe: PolicyModel, moe_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(moe_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LearnerError, match=r"no tensor model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        hf.load(moe, tmp_path)


def test_a_tensor_of_another_shape_is_named(moe: PolicyModel, moe_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(moe_folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LearnerError, match=r"model\.norm\.weight.*\(65,\)"):
        hf.load(moe, tmp_path)


@pytest.mark.parametrize("content", [None, b"not a safetensors file"])
def test_a_folder_without_usable_weights_is_refused(moe: PolicyModel, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LearnerError, match="safetensors"):
        hf.load(moe, tmp_path)


def test_an_existing_folder_is_not_overwritten(moe: PolicyModel, moe_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(LearnerError, match="exists already"):
        hf.save_hf_folder(moe, moe_folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_folder_is_cut_into_files_of_a_bounded_size_and_the_index_names_every_tensor(
    moe: PolicyModel, moe_folder: Path, tmp_path: Path
) -> None:
    original = load_file(moe_folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in original.values())
    hf.save_hf_folder(moe, moe_folder, tmp_path / "saved", max_shard_bytes=total // 3)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 5)]
    held = {path.name: load_file(path) for path in files}
    assert all(sum(tensor.nbytes for tensor in part.values()) <= total // 3 for part in held.values())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"] == {name: file for file, part in held.items() for name in part}
    assert all(torch.equal(held[index["weight_map"][name]][name], tensor) for name, tensor in original.items())


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(tmp_path: Path) -> None:
    shapes = {"small": (1,), "large": (9,), "last": (2,), "fits": (1,)}
    tensors = {name: torch.full(shape, 1.0 + len(name)) for name, shape in shapes.items()}
    write_shards(tmp_path, shapes, torch.float32, tensors.items(), max_bytes=12)
    held = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [set(part) for part in held] == [{"small"}, {"large"}, {"last", "fits"}]
    assert all(torch.equal(tensor, tensors[name]) for part in held for name, tensor in part.items())


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes = {"one": (2, 3), "two": (4,)}
    write(path, shapes, torch.float32, iter({name: torch.ones(shape) for name, shape in shapes.items()}.items()))
    before = path.read_bytes()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "one", torch.zeros(2, 3)
        raise ConnectionError("a rank died")

    with pytest.raises(ConnectionError):
        write(path, shapes, torch.float32, broken())
    assert path.read_bytes() == before
    assert torch.equal(load_file(path)["one"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight5",
            ["model.layers.3.mlp.experts.21.gate_proj.weight", "model.layers.3.mlp.experts.21.up_proj.weight"],
        ),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight5", ["model.layers.3.mlp.experts.21.down_proj.weight"]),
        ("decoder.layers.12.self_attention.linear_qkv.layer_norm_weight", ["model.layers.12.input_layernorm.weight"]),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", ["model.layers.0.post_attention_layernorm.weight"]),
    ],
)
def test_transformer_engine_names_have_their_places(name: str, expected: list[str]) -> None:
    placement = hf.place(name)
    assert list(placement.full_names(None if placement.local_expert is None else 21)) == expected


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(LearnerError, match=r"decoder\.layers\.0\.mlp\.shared_experts\.gate_weight"):
        hf.place("decoder.layers.0.mlp.shared_experts.gate_weight")
