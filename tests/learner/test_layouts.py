"""One batch, many layouts, one update: what a learner does must not depend on how it is spread."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from clawpipe.learner.export import write_policy
from clawpipe.learner.memory_plan import parameters
from clawpipe.learner.shape import read_shape
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.processes import free_port

PROGRAM = Path(__file__).with_name("rank_program.py")
SINGLE = {"processes": 1}
SPREAD = {
    "tensor": {"processes": 2, "tensor": 2, "expert_tensor": 2},
    "expert": {"processes": 2, "expert": 2},
    "data": {"processes": 2},
    "tensor_recomputed": {"processes": 2, "tensor": 2, "expert_tensor": 2},
    "expert_recomputed": {"processes": 2, "expert": 2},
    "tensor_ppo": {"processes": 2, "tensor": 2, "expert_tensor": 2},
    "expert_ppo": {"processes": 2, "expert": 2},
    "data_ppo": {"processes": 2},
}
PPO = [name for name in SPREAD if name.endswith("ppo")]

Result = tuple[list[dict[str, float]], Path]  # metrics and masked tokens of each update, the weights after the first


@pytest.fixture(scope="module")
def task(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, make_batch: Callable[..., Batch]) -> dict[str, Any]:
    """Model and batches. With three minibatches of two rollouts, the last has one rollout with entries."""
    folder = tmp_path_factory.mktemp("batches")
    paths = [folder / f"{seed}.msgpack" for seed in range(3)]
    for seed, path in enumerate(paths):
        path.write_bytes(msgspec.msgpack.encode(make_batch(version=9, seed=seed)))
    batches = [str(path) for path in paths]
    return {"model": str(model_dir), "batches": batches, "pretrain": batches[2], "minibatches": 3}


def plan(task: dict[str, Any], folder: Path, layout: dict[str, int], **more: Any) -> dict[str, Any]:
    folder.mkdir()
    return {
        **task,
        "layout": layout,
        "weights": str(folder / "weights.safetensors"),
        "report": str(folder / "report.json"),
        **more,
    }


def result(folder: Path) -> Result:
    return json.loads((folder / "report.json").read_text())["metrics"], folder / "weights.safetensors"


def run_here(what: dict[str, Any]) -> None:
    """The same program in this process: one rank needs no launcher."""
    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.execute(what)


@pytest.fixture(scope="module")
def single(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("single") / "run"
    run_here(plan(task, folder, SINGLE))
    return result(folder)


@pytest.fixture(scope="module")
def single_ppo(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("single") / "run"
    run_here(plan(task, folder, SINGLE, ppo=True))
    return result(folder)


@pytest.fixture(scope="module")
def spread(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per layout, all written by one pair of processes: starting them is what takes the time."""
    root = tmp_path_factory.mktemp("spread")
    paths = []
    for name, layout in SPREAD.items():
        paths.append(root / f"{name}.json")
        checkpoints = str(root / name / "checkpoints")
        recompute = "full" if name.endswith("recomputed") else "none"
        more = {"save": checkpoints, "port": free_port(), "recompute": recompute, "ppo": name in PPO}
        what = plan(task, root / name, layout, **more)
        paths[-1].write_text(json.dumps(what))
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [*torchrun, str(PROGRAM), *map(str, paths)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", [name for name in SPREAD if name not in PPO])
def test_an_update_spread_over_two_ranks_equals_one_process(single, spread, model_dir, layout):
    metrics, path = result(spread / layout)
    before = load_file(model_dir / "model.safetensors")
    assert load_file(path).keys() == before.keys()
    assert_equal_weights(path, single[1], before)
    assert sum(other["left_out/geometric_mask"] > 0 for other in single[0]) > 0
    assert_equal_metrics(metrics, single[0])


def assert_equal_weights(path: Path, expected: Path, before: dict[str, torch.Tensor]) -> None:
    ours, theirs = load_file(path), load_file(expected)
    assert ours.keys() == theirs.keys()
    assert max((theirs[name] - before[name]).abs().max().item() for name in theirs.keys() & before.keys()) > 5e-4
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) <= 1e-5


def assert_equal_metrics(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for mine, other in zip(metrics, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", PPO)
def test_an_update_of_policy_and_value_model_spread_over_two_ranks_equals_one_process(
    single_ppo, spread, model_dir, layout
):
    metrics, path = result(spread / layout)
    before = load_file(model_dir / "model.safetensors")
    for name in ("weights.safetensors", "values.safetensors"):
        assert_equal_weights(path.with_name(name), single_ppo[1].with_name(name), before)
    assert [("loss" in each, "explained_variance" in each) for each in metrics] == [(True, True)] * 2 + [(False, True)]
    assert_equal_metrics(metrics, single_ppo[0])


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", SPREAD)
def test_a_rank_holds_as_many_parameters_as_the_memory_plan_says(spread, model_dir, layout):
    held = json.loads((spread / layout / "report.json").read_text())["num_parameters"]
    assert held == parameters(read_shape(model_dir), ParallelConfig(**SPREAD[layout])).total


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", ["tensor", "expert", "tensor_ppo"])
def test_a_checkpoint_of_two_ranks_is_exported_by_one_process(task, spread, tmp_path, make_run, layout):
    run_dir = make_run(Path(task["model"]), spread / layout)
    write_policy(run_dir, tmp_path / "hf", update=None, max_shard_bytes=10**9)
    # The ranks wrote these weights when they saved that checkpoint.
    ours, theirs = load_file(tmp_path / "hf/model.safetensors"), load_file(result(spread / layout)[1])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.torchrun
@pytest.mark.parametrize("layout", ["tensor", "expert", "tensor_ppo", "expert_ppo"])
def test_a_checkpoint_of_two_ranks_resumes_in_one_process(task, spread, tmp_path, layout):
    metrics, _ = result(spread / layout)
    rest = {**task, "batches": task["batches"][1:]}
    more = {"resume": str(spread / layout / "checkpoints"), "ppo": layout in PPO}
    run_here(plan(rest, tmp_path / "resumed", SINGLE, **more))
    resumed, _ = result(tmp_path / "resumed")
    names = ("loss", "grad_norm", "value_loss", "value_grad_norm", "value_mean")
    for after, again in zip(metrics[1:], resumed, strict=True):
        assert len(set(names) & again.keys()) >= 2
        for name in set(names) & after.keys():
            assert again[name] == pytest.approx(after[name], abs=1e-5, rel=1e-3), name
        assert again["next_lr"] == after["next_lr"]
    # Three steps of the policy per update, of twelve: a line from 1e-3 to nothing. The third update is the critic's.
    rates = [5e-4, 5e-4] if layout in PPO else [5e-4, 2.5e-4]
    assert [each["next_lr"] for each in resumed] == pytest.approx(rates)
