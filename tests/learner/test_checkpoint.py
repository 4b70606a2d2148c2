"""Checkpoints: what is picked, what is kept, what is restored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clawpipe.learner import checkpoint, hf, parallel
from clawpipe.learner.model import build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.pipeline.config import LearnerConfig, ParallelConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.records import StreamCursor

CURSOR = StreamCursor(sequence=40, done=("r7", "r9"))


class Small:
    """A model with its optimizer, and gradients that do not need data."""

    def __init__(self, model_dir: Path, dtype: str = "float32") -> None:
        model = build_model(model_dir, ParallelConfig(), getattr(torch, dtype), seed=0)
        hf.load(model, model_dir)
        self.model = wrap(model)
        self.optimizer = AdamW(self.model, LearnerConfig(lr=1e-2, dtype=dtype))

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            p.main_grad.copy_(torch.randn(p.shape, generator=generator))
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in hf.export(self.model)}

    def save(self, folder: Path, version: int, updates: int = 1, keep_last: int = 2) -> Path:
        return checkpoint.save(
            folder,
            self.model,
            self.optimizer,
            version=version,
            updates=updates,
            cursor=CURSOR,
            keep_last=keep_last,
        )


@pytest.fixture
def one_process() -> Iterator[None]:
    with parallel.session(ParallelConfig()):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("one_process")
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(model_dir, tmp_path, dtype):
    first = Small(model_dir, dtype)
    first.step(1)
    first.step(2)
    first.save(tmp_path, version=2)
    saved = first.weights()
    torch.manual_seed(5)
    first.step(3)

    second = Small(model_dir, dtype)
    found = checkpoint.latest(tmp_path)
    checkpoint.load(found, second.model, second.optimizer)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in second.weights().items())
    second.step(3)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in second.weights().items())
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in second.weights().items())


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_before_the_first_step_can_be_resumed(model_dir, tmp_path):
    first, second = Small(model_dir), Small(model_dir)
    first.save(tmp_path, version=0, updates=0)
    checkpoint.load(checkpoint.latest(tmp_path), second.model, second.optimizer)
    first.step(1)
    second.step(1)
    assert all(torch.equal(tensor, first.weights()[name]) for name, tensor in second.weights().items())


@pytest.mark.usefixtures("one_process")
def test_the_manifest_holds_version_updates_and_cursor(model_dir, tmp_path):
    path = Small(model_dir).save(tmp_path, version=12, updates=10)
    found = checkpoint.latest(tmp_path)
    assert found.path == path
    assert (found.manifest.version, found.manifest.updates, found.manifest.cursor) == (12, 10, CURSOR)


@pytest.mark.usefixtures("one_process")
def test_random_state_comes_back(model_dir, tmp_path):
    small = Small(model_dir)
    torch.manual_seed(11)
    small.save(tmp_path, version=1)
    expected = torch.rand(4)
    checkpoint.load(checkpoint.latest(tmp_path), small.model, small.optimizer)
    assert torch.equal(torch.rand(4), expected)


def remove_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()


def cut_manifest(path: Path) -> None:
    manifest = path / checkpoint.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:40])


def cut_shard(path: Path) -> None:
    shard = max(path.glob("*.distcp"), key=lambda p: p.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])


def remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def leave_unfinished(path: Path) -> None:
    path.rename(path.with_name(f".unfinished-{path.name}"))


@pytest.mark.parametrize("damage", [remove_manifest, cut_manifest, cut_shard, remove_metadata, leave_unfinished])
@pytest.mark.usefixtures("one_process")
def test_what_a_crash_leaves_is_never_picked(model_dir, tmp_path, damage):
    small = Small(model_dir)
    good = small.save(tmp_path, version=3, updates=3)
    damage(small.save(tmp_path, version=4, updates=4))
    assert checkpoint.latest(tmp_path).path == good


@pytest.mark.usefixtures("one_process")
def test_the_newest_are_kept_and_leftovers_go(model_dir, tmp_path):
    small = Small(model_dir)
    for version in (1, 2):
        small.save(tmp_path, version=version, updates=version)
    (tmp_path / ".unfinished-u0000009-v0000009").mkdir()
    # A resumed run has fewer updates under a higher version.
    small.save(tmp_path, version=5, updates=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["u0000001-v0000005", "u0000002-v0000002"]
    assert checkpoint.latest(tmp_path).manifest.version == 5


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_of_another_model_is_refused(model_dir, tmp_path):
    import json

    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    config["moe_intermediate_size"] = 64
    (other / "config.json").write_text(json.dumps(config))
    Small(model_dir).save(tmp_path / "checkpoints", version=1)
    wide = build_model(other, ParallelConfig(), torch.float32, seed=0)
    wrapped = wrap(wide)
    optimizer = AdamW(wrapped, LearnerConfig())
    with pytest.raises(LearnerError, match="does not fit the model"):
        checkpoint.load(checkpoint.latest(tmp_path / "checkpoints"), wrapped, optimizer)
