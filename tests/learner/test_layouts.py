"""One batch, three layouts, one update: what a learner does must not depend on how it is spread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from clawpipe.pipeline.forest import Batch

PROGRAM = Path(__file__).with_name("rank_program.py")
SINGLE = {"processes": 1}
TENSOR = {"processes": 2, "tensor": 2, "expert_tensor": 2}
EXPERT = {"processes": 2, "expert": 2}
DATA = {"processes": 2}


def run(folder: Path, layout: dict[str, int], **plan: Any) -> dict[str, Any]:
    """Trains in a layout, in processes of its own; the report."""
    folder.mkdir()
    path = folder / "plan.json"
    path.write_text(json.dumps({"layout": layout, "report": str(folder / "report.json"), **plan}))
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    start = [*torchrun, f"--nproc-per-node={layout['processes']}"] if layout["processes"] > 1 else [sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(PROGRAM), str(path)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def plan(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, make_batch: Callable[..., Batch]) -> dict[str, Any]:
    """Model and batches. With three minibatches of two rollouts, the last has one rollout with entries."""
    folder = tmp_path_factory.mktemp("batches")
    paths = []
    for seed in range(3):
        paths.append(folder / f"{seed}.msgpack")
        paths[-1].write_bytes(msgspec.msgpack.encode(make_batch(version=9, seed=seed)))
    return {"model": str(model_dir), "batches": [str(path) for path in paths], "minibatches": 3}


@pytest.fixture(scope="module")
def single(plan: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("single")
    weights = folder / "weights.safetensors"
    return run(folder / "run", SINGLE, **plan, weights=str(weights)), weights


def assert_same(mine: tuple[dict[str, Any], Path], single: tuple[dict[str, Any], Path], start: Path) -> None:
    ours, theirs, before = load_file(mine[1]), load_file(single[1]), load_file(start)
    assert ours.keys() == theirs.keys()
    assert max((theirs[name] - before[name]).abs().max().item() for name in before) > 5e-4
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) <= 1e-5
    for one, other in zip(mine[0]["metrics"], single[0]["metrics"], strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.torchrun
def test_tensor_parallel_update_equals_one_process_and_its_checkpoint_resumes_there(plan, single, tmp_path, model_dir):
    weights, saved = tmp_path / "weights.safetensors", tmp_path / "checkpoints"
    report = run(tmp_path / "tensor", TENSOR, **plan, weights=str(weights), save=str(saved))
    assert_same((report, weights), single, model_dir / "model.safetensors")
    # Two more updates from the checkpoint, in one process, give the same losses as those that follow it.
    rest = {**plan, "batches": plan["batches"][1:]}
    resumed = run(tmp_path / "resumed", SINGLE, **rest, resume=str(saved))
    for after, resumed_one in zip(report["metrics"][1:], resumed["metrics"], strict=True):
        assert resumed_one["loss"] == pytest.approx(after["loss"], abs=1e-5)
        assert resumed_one["grad_norm"] == pytest.approx(after["grad_norm"], rel=1e-3)


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", [EXPERT, DATA], ids=["expert", "data"])
def test_an_update_spread_over_ranks_equals_one_process(plan, single, tmp_path, model_dir, layout):
    weights = tmp_path / "weights.safetensors"
    report = run(tmp_path / "run", layout, **plan, weights=str(weights))
    assert_same((report, weights), single, model_dir / "model.safetensors")
