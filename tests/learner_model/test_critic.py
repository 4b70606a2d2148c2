"""Values and gradients of packed forests against Hugging Face's hidden states and a head, on separate sequences."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from clawpipe.learner import critic, hf
from clawpipe.learner.critic import ValueModel, build_value_model, state_values
from clawpipe.learner.memory_plan import value_parameters
from clawpipe.learner.shape import read_shape
from clawpipe.pipeline.config import ParallelConfig

VALUE, GRADIENT = 1e-5, 1e-6


def value_model(folder: Path, parallel: ParallelConfig, head_H: torch.Tensor | None = None) -> ValueModel:
    model = build_value_model(folder, parallel, torch.float32, seed=1)
    critic.load_trunk(model, folder)
    if head_H is not None:
        with torch.no_grad():
            model.value_head.weight.copy_(head_H[None])
    return model


def assert_equal_to_hugging_face(model: ValueModel, theirs: torch.nn.Module, case, oracle: ModuleType) -> None:
    (expected_E,), expected = oracle.hf_value_gradients(theirs, [case])
    model.zero_grad()
    value_E = state_values(model, case.forest)
    (case.weight_E * value_E).sum().backward()
    assert expected_E.abs().mean() > 0.1
    torch.testing.assert_close(value_E.detach(), expected_E, atol=VALUE, rtol=0)
    found = {name: grad.clone() for name, grad in hf.export(model, lambda p: p.grad)}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=GRADIENT, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["line", "random", "comb", "star", "group"])
def test_values_of_a_packed_forest_equal_separate_sequences(
    kind: str, moe_folder: Path, one_process: ParallelConfig, oracle: ModuleType
) -> None:
    case = oracle.pack(oracle.random_sequences(kind, seed=3), seed=3)
    model = value_model(moe_folder, one_process, oracle.value_head())
    assert_equal_to_hugging_face(model, oracle.build_hf("qwen3_moe"), case, oracle)


@pytest.mark.parametrize(("kind", "overrides"), [("qwen3", {}), ("llama", {})])
def test_values_of_the_other_architectures_equal_hugging_face(
    kind: str, overrides: dict[str, object], one_process: ParallelConfig, oracle: ModuleType, tmp_path: Path
) -> None:
    theirs = oracle.build_hf(kind, **overrides)
    folder = oracle.save_hf(theirs, tmp_path / "model")
    case = oracle.pack(oracle.random_sequences("random", seed=5), seed=5)
    assert_equal_to_hugging_face(value_model(folder, one_process, oracle.value_head()), theirs, case, oracle)


def test_a_value_knows_nothing_of_the_token_that_follows(
    moe_folder: Path, one_process: ParallelConfig, oracle: ModuleType
) -> None:
    case = oracle.pack([[3, 4, 5, 6], [3, 4, 5, 9]], entry_share=1.0)
    model = value_model(moe_folder, one_process, oracle.value_head())
    value = dict(zip(case.forest.entry_token_E.tolist(), state_values(model, case.forest).tolist(), strict=True))
    tokens = case.forest.tokens_T.tolist()
    assert value[tokens.index(6)] == value[tokens.index(9)]
    assert value[tokens.index(6)] != value[tokens.index(5)]


def test_the_trunk_is_the_start_models_and_the_head_is_small_and_the_seeds(
    moe_folder: Path, one_process: ParallelConfig, oracle: ModuleType
) -> None:
    model = value_model(moe_folder, one_process)
    again = value_model(moe_folder, one_process)
    theirs = oracle.per_expert(dict(oracle.build_hf("qwen3_moe").state_dict()))
    found = dict(hf.export(model))
    head = found.pop("score.weight")
    assert found.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.items())
    assert torch.equal(head, again.value_head.weight)
    assert 0 < head.norm() < 0.05
    case = oracle.pack(oracle.random_sequences("random", seed=5), seed=5)
    assert state_values(model, case.forest).abs().max() < 0.2


def test_it_holds_as_many_parameters_as_the_memory_plan_says(moe_folder: Path, one_process: ParallelConfig) -> None:
    model = value_model(moe_folder, one_process)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held == value_parameters(read_shape(moe_folder), one_process)


def test_a_forest_without_entries_has_zero_gradients_everywhere(
    moe_folder: Path, one_process: ParallelConfig, oracle: ModuleType
) -> None:
    model = value_model(moe_folder, one_process)
    value_E = state_values(model, oracle.pack([[3, 4, 5]], entry_share=0.0).forest)
    value_E.sum().backward()
    assert value_E.shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
