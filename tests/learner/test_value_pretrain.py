"""`clawpipe value-pretrain`: from batches on disk to a value model that a run begins with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from typer import Typer
from typer.testing import CliRunner

from clawpipe.learner import hf, parallel, preflight
from clawpipe.learner.critic import load_value_model
from clawpipe.learner.value_pretrain import pretrain
from clawpipe.learner.value_pretrain_command import value_pretrain
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline.cli import add_command
from clawpipe.pipeline.config import Config, ParallelConfig
from clawpipe.pipeline.errors import LearnerError


def settings(model_dir: Path, **algorithm) -> Config:
    raw = {
        "model": {"path": str(model_dir), "context_tokens": 64},
        "harness": [{"kind": "agentloop"}],
        "tasks": [{"kind": "filing"}],
        "learner": {"clip_grad": 10.0},
        "algorithm": {"kind": "ppo", "value_lr": 2e-3} | algorithm,
    }
    return msgspec.convert(raw, Config)


@pytest.fixture
def stored(tmp_path, make_batch) -> Path:
    """Batches of a run with GRPO: advantages of groups, and the rewards beside them."""
    folder = tmp_path / "batches"
    folder.mkdir()
    for seed in range(2):
        (folder / f"b{seed}.msgpack").write_bytes(msgspec.msgpack.encode(make_batch(seed=seed)))
    return folder


def run(config: Config, batches: Path, out: Path, epochs: int = 1) -> list[str]:
    with parallel.session(ParallelConfig()) as ranks:
        return list(pretrain(config, ranks, batches, out, epochs))


def number(line: str, name: str) -> float:
    return float(line.partition(f"{name} ")[2].partition(",")[0])


def test_stored_batches_teach_the_rewards_and_a_run_begins_with_what_was_learned(model_dir, stored, tmp_path):
    lines = run(settings(model_dir), stored, tmp_path / "value", epochs=15)
    assert lines[0].startswith("epoch 1, b0: value_loss 0.0")
    assert number(lines[-3], "value_loss") < 0.3 * number(lines[0], "value_loss")
    assert number(lines[-3], "explained_variance") > 0.5
    assert str(tmp_path / "value") in lines[-1]
    written = load_file(tmp_path / "value" / "model.safetensors")
    start = load_file(model_dir / "model.safetensors")
    assert written.keys() - start.keys() == {"score.weight"}
    config = settings(model_dir, value_path=str(tmp_path / "value"))
    assert not [text for text in preflight.check(config, offline=False).problems if "value_path" in text]
    with parallel.session(ParallelConfig()):
        model = load_value_model(config, model_dir)
        found = {name: tensor.clone() for name, tensor in hf.export(model)}
    assert found.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())


def test_what_cannot_be_used_is_said_before_anything_is_learned(model_dir, stored, tmp_path):
    (tmp_path / "empty").mkdir()
    grpo = msgspec.structs.replace(settings(model_dir), algorithm=configuration.GrpoConfig())
    for config, batches, out, message in (
        (grpo, stored, tmp_path / "value", 'set kind = "ppo"'),
        (settings(tmp_path / "none"), stored, tmp_path / "value", "start model is not there"),
        (settings(model_dir), tmp_path / "empty", tmp_path / "value", "clawpipe replay RUN --batches DIR"),
        (settings(model_dir), stored, stored, "exists already"),
    ):
        with pytest.raises(LearnerError, match=message):
            run(config, batches, out)
    assert not (tmp_path / "value").exists()


def test_a_damaged_batch_is_named(model_dir, stored, tmp_path):
    (stored / "b1.msgpack").write_bytes(b"half")
    with pytest.raises(LearnerError, match=r"b1\.msgpack: batch body cannot be read"):
        run(settings(model_dir), stored, tmp_path / "value")


def test_a_value_path_without_a_value_model_is_refused(model_dir, tmp_path):
    config = settings(model_dir, value_path=str(tmp_path / "none"))
    [found] = [text for text in preflight.check(config, offline=False).problems if "value_path" in text]
    assert "no *.safetensors" in found
    with parallel.session(ParallelConfig()), pytest.raises(LearnerError, match=r"score\.weight"):
        load_value_model(settings(model_dir, value_path=str(model_dir)), model_dir)


def test_the_command_writes_the_folder(model_dir, stored, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npath = "{model_dir}"\ncontext_tokens = 64\n[[harness]]\nkind = "agentloop"\n'
        '[[tasks]]\nkind = "filing"\n[algorithm]\nkind = "ppo"\n'
    )
    app, out = Typer(), tmp_path / "value"
    add_command(app, "value-pretrain", value_pretrain)
    done = CliRunner().invoke(app, [str(file), "--batches", str(stored), "--out", str(out), "--epochs", "2"])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) >= 5
    assert (out / "config.json").exists()
    assert (out / "model.safetensors").exists()
