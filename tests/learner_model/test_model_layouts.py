"""Tensor and expert parallelism against one Hugging Face process, and the layouts that are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import force_setattr

from clawpipe.learner.model import build_model
from clawpipe.learner.shape import check_layout
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.errors import LearnerError

SCRIPT = Path(__file__).with_name("layout_checks.py")


def run_layouts(processes: int, layouts: list[str], folder: Path) -> dict[str, dict[str, float]]:
    out = folder / "measured.json"
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--standalone", "--nproc-per-node", str(processes), str(SCRIPT), str(out), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, *layouts], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """One start of torchrun for all layouts of two ranks: "tensor,expert[,model]"."""
    return run_layouts(2, ["2,1", "1,2", "1,1", "2,1,qwen3"], tmp_path_factory.mktemp("two"))


def assert_equal_to_hugging_face(measured: dict[str, float]) -> None:
    assert measured["logprob"] <= 1e-5
    assert measured["value"] <= 1e-5
    gradients = [name for name in measured if name.startswith("gradient") and "size" not in name]
    for name in gradients:
        size = measured[name.replace("gradient", "gradient_size")]
        assert size > 0.05
        assert measured[name] <= 5e-6 * size
    assert measured["round_trip"] == 0.0


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", ["2,1", "1,2", "1,1", "2,1,qwen3"])
def test_a_layout_of_two_ranks_equals_hugging_face(layout: str, two_ranks: dict[str, dict[str, float]]) -> None:
    assert_equal_to_hugging_face(two_ranks[layout])


@pytest.mark.torchrun
def test_an_expert_rank_without_entries_takes_part(two_ranks: dict[str, dict[str, float]]) -> None:
    measured = two_ranks["1,2"]
    assert measured["gradient_with_an_empty_rank"] <= 5e-6 * measured["gradient_size_with_an_empty_rank"]


@pytest.mark.torchrun
@pytest.mark.slow
def test_tensor_and_expert_parallelism_together_equal_hugging_face(tmp_path: Path) -> None:
    assert_equal_to_hugging_face(run_layouts(4, ["2,2"], tmp_path)["2,2"])


def unchecked(**sizes: int) -> ParallelConfig:
    """A configuration that did not go through the file's own checks."""
    config = ParallelConfig()
    for name, value in sizes.items():
        force_setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ({"processes": 2, "tensor": 2, "expert_tensor": 2}, 1, "but 1 processes started"),
        ({"processes": 2, "pipeline": 2}, 2, "no pipeline schedule"),
        ({"processes": 3, "expert": 2}, 3, "expert x expert_tensor = 2"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(sizes: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        check_layout(ParallelConfig(**sizes), world_size)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 3}, "does not divide the model's 8 attention heads"),
        ({"tensor": 8, "expert_tensor": 8}, "does not divide the model's 4 key-value heads"),
        ({"expert": 3}, "does not divide the model's 8 experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    sizes: dict[str, int], message: str, moe_folder: Path
) -> None:
    with pytest.raises(LearnerError, match=message):
        build_model(moe_folder, unchecked(**sizes), torch.float32, seed=0)


def test_a_dense_model_has_no_experts_to_spread(oracle: ModuleType, tmp_path: Path) -> None:
    folder = oracle.save_hf(oracle.build_hf("qwen3"), tmp_path / "dense")
    with pytest.raises(LearnerError, match="does not divide the model's 0 experts"):
        build_model(folder, unchecked(expert=2), torch.float32, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "scaled rotary"),
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"mlp_only_layers": [0]}, "dense layers between experts"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_model_with_parts_that_are_not_computed_is_refused(
    changes: dict[str, Any], message: str, moe_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((moe_folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(LearnerError, match=message):
        build_model(tmp_path, ParallelConfig(), torch.float32, seed=0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"config\.json: cannot be read"):
        build_model(tmp_path, ParallelConfig(), torch.float32, seed=0)
