"""Staged weight versions: complete files, few of them, numbers that only go up."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from clawpipe.learner import hf, parallel, push
from clawpipe.learner.model import build_model
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.records import WeightVersion


def test_a_staged_file_holds_the_weights_under_hugging_face_names(model_dir, tmp_path):
    with parallel.session(ParallelConfig()):
        model = build_model(model_dir, ParallelConfig(), torch.float32, seed=0)
        hf.load(model, model_dir)
        staged = push.stage(model, tmp_path, 7)
    original, written = load_file(model_dir / "model.safetensors"), load_file(staged.path)
    assert staged.version == 7
    assert staged.path == str(tmp_path / "v7.safetensors")
    assert staged.num_bytes == (tmp_path / "v7.safetensors").stat().st_size
    assert original.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in original.items())
    assert [path.name for path in tmp_path.iterdir()] == ["v7.safetensors"]


def test_old_versions_go_by_number(tmp_path):
    for version in (2, 8, 9, 10, 11):
        (tmp_path / f"v{version}.safetensors").touch()
    (tmp_path / "v1.safetensors.tmp").touch()
    push.remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "v10.safetensors",
        "v11.safetensors",
        "v9.safetensors",
    ]


def test_the_next_version_is_free():
    assert push.next_version(None) == 0
    last = WeightVersion(version=41, path="p", num_bytes=1, created_s=0.0)
    assert push.next_version(last) == 42
