"""The plan counts what the code holds: parameters and states exactly, activations closely."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from clawpipe.learner import memory_plan as plans
from clawpipe.learner import parallel, preflight
from clawpipe.learner.memory_plan import Load
from clawpipe.learner.model import PolicyModel, build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.published import SHAPES
from clawpipe.learner.shape import ModelShape, read_shape
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline.cli import app
from clawpipe.pipeline.config import LearnerConfig, ParallelConfig

RECIPES = Path(__file__).parents[2] / "configs" / "qwen3_30b_a3b"
LARGE = SHAPES["Qwen3-30B-A3B"]
SMALL = msgspec.structs.replace(
    LARGE,
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=16,
    num_experts=4,
    experts_per_token=2,
)
SPLIT = ParallelConfig(processes=4, tensor=2, expert=2)
LOAD = Load(tokens=10, readers=3, dtype="bfloat16")

KINDS = {
    "mixture": {"tie_word_embeddings": False, "num_experts_per_tok": 3, "num_experts": 8},
    "dense": {"model_type": "qwen3"},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
}


@pytest.fixture(params=KINDS)
def folder(request, model_dir, tmp_path) -> Path:
    """A model folder with a configuration only, of each kind; sizes differ, so that none stands in for another."""
    values = json.loads((model_dir / "config.json").read_text())
    sizes = {"hidden_size": 64, "head_dim": 24, "moe_intermediate_size": 40, "intermediate_size": 56}
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes, **KINDS[request.param]}))
    return tmp_path


def test_parameters_of_a_rank_are_those_of_the_built_model(folder):
    with parallel.session(ParallelConfig()):
        model = build_model(folder, ParallelConfig(), torch.float32, seed=0)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert plans.parameters(read_shape(folder), ParallelConfig()).total == built


@pytest.mark.parametrize(("name", "total", "active"), [("Qwen3-30B-A3B", 30.5, 3.35), ("Qwen3-8B", 8.19, 8.19)])
def test_published_models_have_their_published_numbers(name, total, active):
    assert plans.parameters(SHAPES[name], ParallelConfig()).total / 1e9 == pytest.approx(total, abs=0.05)
    assert plans.active_parameters(SHAPES[name]) / 1e9 == pytest.approx(active, abs=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_optimizer_are_those_that_training_holds(model_dir, dtype):
    with parallel.session(ParallelConfig()):
        model = build_model(model_dir, ParallelConfig(), getattr(torch, dtype), seed=0)
        wrapped = wrap(model)
        optimizer = AdamW(wrapped, LearnerConfig(dtype=dtype))
    weights = {p.data_ptr(): p for p in model.parameters()}
    states: dict[int, torch.Tensor] = {}
    for part in optimizer._inner.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            held = [parameter, state["exp_avg"], state["exp_avg_sq"]]
            states |= {tensor.data_ptr(): tensor for tensor in held if tensor.data_ptr() not in weights}
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    measured = (weights.values(), [buffer.grad_data for buffer in buffers], states.values())
    num_parameters = plans.parameters(read_shape(model_dir), ParallelConfig()).total
    assert plans.state_bytes(num_parameters, dtype) == tuple(sum(t.nbytes for t in part) for part in measured)


def saved_bytes(model: PolicyModel, shape: ModelShape) -> tuple[int, int]:
    """Tokens of a forest of a trunk and two branches, and the bytes that its forward pass saves for backward."""
    lengths = (120, 80, 56)
    size = sum(lengths)
    end = torch.cat([torch.full((length,), stop) for length, stop in zip(lengths, (size, 200, size), strict=True)])
    position = torch.cat([torch.arange(120), 120 + torch.arange(80), 120 + torch.arange(56)])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in weights:
            kept[at] = tensor  # holding it keeps its memory from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randint(shape.vocab_size, (1, size)), position[None], end)
    return size, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_planned_activations_are_those_that_a_forward_pass_keeps(folder, recompute):
    shape = read_shape(folder)
    with parallel.session(ParallelConfig()):
        model = build_model(folder, ParallelConfig(), torch.float32, 0, recompute)
        tokens, measured = saved_bytes(model, shape)
    load = Load(tokens=tokens, readers=1, dtype="float32", recompute=recompute, fused=False)
    planned = plans.kept_bytes(shape, ParallelConfig(), load)
    if recompute == "full":  # the layer that is at work is recomputed in the backward pass only
        planned -= plans.attention_bytes(shape, ParallelConfig(), load)
        planned -= plans.feed_forward_bytes(shape, ParallelConfig(), load)
    forest = tokens * (2 * plans.INT + shape.head_dim * plans.FLOAT)  # ids, mask vector, angles: tree packing's
    assert planned + forest == pytest.approx(measured, rel=0.05)


def test_a_hand_computed_layout():
    held = plans.parameters(SMALL, SPLIT)
    assert held == plans.Parameters(embedding=400, output=400, attention=384, experts=1536, router=64, norms=56)
    assert plans.state_bytes(held.total, "bfloat16") == (2 * 2840, 4 * 2840, 12 * 2840)
    # 2 x 5 x 8 of inputs, 5 x 80 of queries and outputs, 2 x 40 + 2 x 3 x 40 of keys and values; log-sum-exp.
    assert plans.attention_bytes(SMALL, SPLIT, LOAD) == 2 * (80 + 320 + 320) + 80
    # 15 token copies with 8 hidden values and 3 x 16 of SwiGLU; probabilities of 4 experts twice, indices.
    assert plans.feed_forward_bytes(SMALL, SPLIT, LOAD) == 2 * 80 + 2 * 15 * 56 + 2 * 5 * 4 * 4 + 15 * 12
    assert plans.kept_bytes(SMALL, SPLIT, LOAD) == 2 * (1520 + 2180) + 80
    again = msgspec.structs.replace(LOAD, recompute="full")
    assert plans.kept_bytes(SMALL, SPLIT, again) == 2 * 80 + (1520 + 2180) + 80
    # Two of K = 30 keys with 4 + 2 heads of 4, halved by the ranks, and 80 queries, also in float32.
    assert plans.backward_bytes(SMALL, SPLIT, LOAD) == max(2 * (720 + 80) + 320, 2 * 15 * (24 + 48))
    assert plans.logits_bytes(SMALL, SPLIT, LOAD) == 4 * 10 * 8 * 2 + 10 * 50 * (2 + 12)


def test_a_value_model_is_a_second_trunk_with_a_head():
    one = plans.memory_plan(SMALL, SPLIT, LOAD)
    two = plans.memory_plan(SMALL, SPLIT, msgspec.structs.replace(LOAD, value_model=True))
    more = {a.name: b.num_bytes - a.num_bytes for a, b in zip(one, two, strict=True)}
    num_more = 2840 - 400 + 8
    assert more == {
        "weights": 2 * num_more,
        "gradients": 4 * num_more,
        "optimizer": 12 * num_more,
        "activations": 0,
        "backward": 0,
        "logits": 0,
        "tree packing": 0,
    }


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("experts", [1, 8])
def test_more_tensor_parallelism_never_needs_more(shape, recompute, experts):
    load = Load(tokens=65_533, readers=9, dtype="bfloat16", recompute=recompute)
    spread = experts if shape.num_experts else 1
    layouts = [
        ParallelConfig(processes=32, tensor=size, expert=spread, expert_tensor=size if spread == 1 else 1)
        for size in (1, 2, 4)
    ]
    for fewer, more in pairwise(plans.memory_plan(shape, layout, load) for layout in layouts):
        assert all(a.num_bytes >= b.num_bytes for a, b in zip(fewer, more, strict=True))
        assert plans.needed_gb(more) < plans.needed_gb(fewer)


def recipe(name: str, **overrides) -> configuration.Config:
    return configuration.load(RECIPES / f"{name}.toml", overrides)


@pytest.mark.parametrize(("name", "experts"), [("mix_harness", 8), ("openclaw_ppo", 16)])
def test_a_recipe_fits_the_devices_that_it_names_and_no_smaller_ones(name, experts):
    assert recipe(name).learner.parallel.expert == experts
    fits = preflight.check(recipe(name), offline=True)
    assert fits.problems == ()
    [problem] = preflight.check(recipe(name, **{"learner.device_memory_gb": 80}), offline=True).problems
    notes = "\n".join(fits.notes)
    for item in ("weights", "gradients", "optimizer", "activations", "tree packing", "80 GB device", "141 GB device"):
        assert item in notes
    needed = next(line.split()[1] for line in fits.notes if line.split()[0] == "sum")
    assert f"a rank needs {float(needed):.1f} GB and has 73.6 GB, {float(needed) - 73.6:.1f} GB too few" in problem
    assert "raise [learner.parallel] tensor or expert" in problem


def test_without_recomputation_the_recipe_is_refused_and_told_to_recompute():
    [problem] = preflight.check(recipe("mix_harness", **{"learner.recompute": "none"}), offline=True).problems
    assert "(activations" in problem
    assert 'set recompute = "full"' in problem


@pytest.mark.parametrize(("name", "experts"), [("mix_harness", 16), ("openclaw_ppo", 32)])
def test_more_expert_ranks_make_a_recipe_fit_80_gb(name, experts):
    smaller = {"learner.device_memory_gb": 80, "learner.parallel.expert": experts}
    assert preflight.check(recipe(name, **smaller), offline=True).problems == ()


def test_the_folders_own_shape_goes_before_the_published_one(model_dir, tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    table = {"model.path": str(folder), "model.context_tokens": 512}
    layout = {"learner.parallel.processes": 1, "learner.parallel.tensor": 1, "learner.parallel.expert": 1}
    notes = preflight.check(recipe("mix_harness", **table, **layout), offline=True).notes
    assert notes[0].startswith("memory plan of one rank: Qwen3-8B, 0.00 B parameters")
    assert not any("published" in note for note in notes)


def test_an_unknown_model_has_no_plan_and_no_problem():
    report = preflight.check(recipe("mix_harness", **{"model.path": "/models/Own-7B"}), offline=True)
    assert report.problems == ()
    assert report.notes == ("no memory plan: /models/Own-7B has no config.json, and Own-7B is not known",)


def test_a_layout_that_does_not_divide_the_published_model_is_named():
    layout = {"learner.parallel.tensor": 8}
    [problem] = preflight.check(recipe("mix_harness", **layout), offline=True).problems
    assert "tensor = 8 does not divide the model's 4 key-value heads" in problem


def test_check_prints_the_plan_before_its_verdict():
    result = CliRunner().invoke(app, ["check", str(RECIPES / "mix_harness.toml"), "--offline"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("memory plan of one rank: Qwen3-30B-A3B, 30.53 B parameters")
    assert lines[-1].endswith("no problem found")


def test_check_refuses_what_cannot_fit_with_exit_code_2():
    path = str(RECIPES / "mix_harness.toml")
    result = CliRunner().invoke(app, ["check", path, "--offline", "--set", "learner.device_memory_gb=80"])
    assert result.exit_code == 2
    assert "memory plan of one rank" in result.stdout
    assert "[learner] device_memory_gb = 80: a rank needs 83.4 GB" in result.output
