"""`clawpipe export`: the policy of a checkpoint as a folder that others load."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from clawpipe.learner import batch as batches
from clawpipe.learner import checkpoint, hf, parallel, push
from clawpipe.learner.export import write_policy
from clawpipe.learner.model import build_model
from clawpipe.learner.numerics import token_logprobs
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.pipeline.cli import add_command
from clawpipe.pipeline.config import LearnerConfig, ParallelConfig
from clawpipe.pipeline.errors import ConfigError, LearnerError
from clawpipe.pipeline.records import StreamCursor

UPDATES = (2, 4)
SIDECARS = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "generation_config.json": '{"eos_token_id": 7}',
}


@dataclass(frozen=True)
class Run:
    """A run with a checkpoint after 2 and after 4 updates, and what was pushed and computed by each of them."""

    folder: Path
    pushed: dict[int, Path]
    logprobs: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def source(model_dir, tmp_path_factory) -> Path:
    """A model folder with all that a real one has beside its weights."""
    folder = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(model_dir, folder)
    for name, text in SIDECARS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def run(source, tmp_path_factory, make_run, make_batch) -> Run:
    folder = make_run(source, tmp_path_factory.mktemp("runs") / "run")
    pushed, logprobs = {}, {}
    forest = batches.load(make_batch(), vocab_size=64, version=0)[0]
    with parallel.session(ParallelConfig()):
        model = build_model(source, ParallelConfig(), torch.float32, seed=0)
        hf.load(model, source)
        wrapped = wrap(model)
        optimizer = AdamW(wrapped, LearnerConfig(lr=1e-2))
        for updates in range(1, 5):
            optimizer.zero_grad()
            for p in wrapped.parameters():
                p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(updates)))
            optimizer.step()
            if updates not in UPDATES:
                continue
            pushed[updates] = Path(push.stage(wrapped, folder, version=updates + 3).path)
            logprobs[updates] = token_logprobs(wrapped, forest, 1.0).detach()
            numbers = {"version": updates + 3, "updates": updates, "cursor": StreamCursor()}
            checkpoint.save(folder / "checkpoints", wrapped, optimizer, **numbers, keep_last=2)
    return Run(folder, pushed, logprobs)


@pytest.fixture
def exported(run, tmp_path) -> Path:
    write_policy(run.folder, tmp_path / "hf", update=None, max_shard_bytes=10**9)
    return tmp_path / "hf"


def test_the_folder_holds_the_weights_that_were_pushed_and_everything_beside_them(run, exported):
    ours, theirs = load_file(exported / "model.safetensors"), load_file(run.pushed[4])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert sorted(path.name for path in exported.iterdir()) == sorted(["config.json", "model.safetensors", *SIDECARS])
    assert {name: (exported / name).read_text() for name in SIDECARS} == SIDECARS
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in exported.parent.iterdir()] == ["hf"]


@torch.no_grad()
def test_transformers_computes_with_it_what_the_learner_computed(run, exported, make_batch):
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    batch = make_batch()
    [forest, _] = batches.load(batch, vocab_size=64, version=0)
    found = []
    for entry in forest.entry_token_E.tolist():
        path = [entry]
        while (parent := int(forest.parent_T[path[0]])) >= 0:
            path.insert(0, parent)
        tokens = forest.tokens_T[path]
        found.append(theirs(tokens[None, :-1]).logits[0, -1].log_softmax(-1)[tokens[-1]])
    torch.testing.assert_close(torch.stack(found), run.logprobs[4], atol=1e-5, rtol=0)
    assert (run.logprobs[4] - run.logprobs[2]).abs().max() > 1e-2


def test_an_older_checkpoint_is_exported_by_its_update(run, tmp_path):
    found = write_policy(run.folder, tmp_path / "hf", update=2, max_shard_bytes=10**9)
    assert (found.manifest.updates, found.manifest.version) == (2, 5)
    ours, theirs = load_file(tmp_path / "hf/model.safetensors"), load_file(run.pushed[2])
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_large_weights_come_in_several_files_that_transformers_reads(run, tmp_path):
    write_policy(run.folder, tmp_path / "hf", update=None, max_shard_bytes=20_000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    theirs, whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), load_file(run.pushed[4])
    assert torch.equal(theirs.model.embed_tokens.weight, whole["model.embed_tokens.weight"])
    assert torch.equal(theirs.model.norm.weight, whole["model.norm.weight"])
    fused = theirs.model.layers[1].mlp.experts.down_proj
    parts = [whole[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] for expert in range(4)]
    assert torch.equal(fused, torch.stack(parts))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_exists_is_not_written_over(run, tmp_path, kind):
    target = tmp_path / "hf"
    if kind == "folder":
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    else:
        target.write_text("mine")
    with pytest.raises(LearnerError, match="hf: exists already; remove it or name another folder"):
        write_policy(run.folder, target, update=None, max_shard_bytes=10**9)
    assert [path.read_text() for path in (target.iterdir() if kind == "folder" else [target])] == ["mine"]


def test_an_empty_folder_is_filled(run, tmp_path):
    (tmp_path / "hf").mkdir()
    write_policy(run.folder, tmp_path / "hf", update=None, max_shard_bytes=10**9)
    assert (tmp_path / "hf/model.safetensors").exists()


def test_a_run_without_a_complete_checkpoint_is_refused(source, make_run, tmp_path):
    folder = make_run(source, tmp_path / "run")
    (folder / "checkpoints" / "u0000003-v0000003").mkdir(parents=True)
    with pytest.raises(LearnerError, match="checkpoints: no complete checkpoint; a run writes one every"):
        write_policy(folder, tmp_path / "hf", update=None, max_shard_bytes=10**9)


def test_an_update_without_a_checkpoint_is_refused_with_those_that_have_one(run, tmp_path):
    with pytest.raises(LearnerError, match="no checkpoint after 3 updates; there are those after 2, 4"):
        write_policy(run.folder, tmp_path / "hf", update=3, max_shard_bytes=10**9)


def test_a_folder_that_cannot_be_written_leaves_nothing(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnerError, match="cannot be written"):
        write_policy(run.folder, tmp_path / "file" / "hf", update=None, max_shard_bytes=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing(run, source, make_run, tmp_path):
    other = shutil.copytree(source, tmp_path / "other")
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**shape, "moe_intermediate_size": 64}))
    folder = make_run(other, tmp_path / "run")
    shutil.copytree(run.folder / "checkpoints", folder / "checkpoints")
    with pytest.raises(LearnerError, match="does not fit the model"):
        write_policy(folder, tmp_path / "hf", update=None, max_shard_bytes=10**9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def command() -> typer.Typer:
    """The command line with `export` as pyproject.toml declares it, beside another command."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = declared["project"]["entry-points"]["clawpipe.commands"]["export"].partition(":")
    app = typer.Typer()
    app.command("other")(lambda: None)
    add_command(app, "export", getattr(importlib.import_module(module), name))
    return app


def test_the_command_says_what_it_wrote(run, tmp_path):
    arguments = ["export", str(run.folder), "--hf", str(tmp_path / "hf"), "--update", "2", "--max-shard-bytes", "50000"]
    done = CliRunner().invoke(command(), arguments)
    assert done.exit_code == 0, done.output
    assert (
        done.output == f"{tmp_path}/hf: the policy after 2 updates, from {run.folder}/checkpoints/u0000002-v0000005\n"
    )
    assert (tmp_path / "hf/model.safetensors.index.json").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    done = CliRunner().invoke(command(), ["export", str(tmp_path), "--hf", str(tmp_path / "hf")])
    assert isinstance(done.exception, ConfigError)
    assert "holds no run" in str(done.exception)


def test_the_command_line_knows_the_command_without_torch():
    program = "import sys, clawpipe.learner.export_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
