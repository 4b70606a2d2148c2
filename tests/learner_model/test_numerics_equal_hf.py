"""Log-probabilities, entropies and gradients of packed forests against Hugging Face on separate sequences."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from clawpipe.learner import hf
from clawpipe.learner.model import PolicyModel, build_model
from clawpipe.learner.numerics import token_logprobs, token_logprobs_and_entropy
from clawpipe.pipeline.config import ParallelConfig

LOGPROB, GRADIENT = 1e-5, 1e-6


def backward(model: PolicyModel, case: SimpleNamespace, temperature: float, **options: int) -> torch.Tensor:
    model.zero_grad()
    logprob_E = token_logprobs(model, case.forest, temperature, **options)
    (case.weight_E * logprob_E).sum().backward()
    return logprob_E.detach()


def exported_gradients(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: grad.clone() for name, grad in hf.export(model, lambda p: p.grad)}


def assert_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=GRADIENT, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["line", "random", "comb", "star", "group"])
def test_a_packed_forest_equals_separate_sequences(
    kind: str, moe: PolicyModel, moe_folder: Path, oracle: ModuleType
) -> None:
    case = oracle.pack(oracle.random_sequences(kind, seed=3), seed=3)
    (expected_E,), expected = oracle.hf_gradients(oracle.build_hf("qwen3_moe"), [case], temperature=0.7)
    logprob_E = backward(moe, case, temperature=0.7)
    torch.testing.assert_close(logprob_E, expected_E, atol=LOGPROB, rtol=0)
    found = exported_gradients(moe)
    assert found.keys() == expected.keys()
    assert_gradients(found, expected)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {}),
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_the_other_architectures_equal_hugging_face(
    kind: str, overrides: dict[str, object], one_process: ParallelConfig, oracle: ModuleType, tmp_path: Path
) -> None:
    theirs = oracle.build_hf(kind, **overrides)
    folder = oracle.save_hf(theirs, tmp_path / "model")
    ours = build_model(folder, one_process, torch.float32, seed=1)
    hf.load(ours, folder)
    case = oracle.pack(oracle.random_sequences("random", seed=5), seed=5)
    (expected_E,), expected = oracle.hf_gradients(theirs, [case], temperature=1.0)
    torch.testing.assert_close(backward(ours, case, 1.0), expected_E, atol=LOGPROB, rtol=0)
    assert_gradients(exported_gradients(ours), expected)


def test_the_entropy_is_that_of_the_tempered_distribution(moe: PolicyModel, oracle: ModuleType) -> None:
    case = oracle.pack(oracle.random_sequences("random", seed=8), seed=8)
    logprob_E, entropy_E = token_logprobs_and_entropy(moe, case.forest, 1.3)
    expected_logprob_E, expected_entropy_E = oracle.hf_entries(oracle.build_hf("qwen3_moe"), case, 1.3)
    torch.testing.assert_close(logprob_E, expected_logprob_E, atol=LOGPROB, rtol=0)
    torch.testing.assert_close(entropy_E, expected_entropy_E, atol=LOGPROB, rtol=0)
    assert not entropy_E.requires_grad


def test_rows_in_chunks_give_the_same_values_and_gradients(moe: PolicyModel, oracle: ModuleType) -> None:
    case = oracle.pack(oracle.random_sequences("random", seed=2), seed=2)
    whole_E = backward(moe, case, 0.9)
    expected = exported_gradients(moe)
    in_chunks_E = backward(moe, case, 0.9, max_logits=oracle.VOCAB * 11)
    torch.testing.assert_close(in_chunks_E, whole_E, atol=LOGPROB, rtol=0)
    assert_gradients(exported_gradients(moe), expected)
    _, entropy_E = token_logprobs_and_entropy(moe, case.forest, 0.9)
    _, chunked_E = token_logprobs_and_entropy(moe, case.forest, 0.9, max_logits=oracle.VOCAB * 11)
    torch.testing.assert_close(chunked_E, entropy_E, atol=LOGPROB, rtol=0)


def test_recomputed_activations_give_the_same_gradients(moe: PolicyModel, oracle: ModuleType) -> None:
    case = oracle.pack(oracle.random_sequences("random", seed=4), seed=4)
    backward(moe, case, 1.0)
    expected = exported_gradients(moe)
    moe.config.recompute_granularity, moe.config.recompute_method = "full", "uniform"
    moe.config.recompute_num_layers = 1
    backward(moe, case, 1.0)
    assert_gradients(exported_gradients(moe), expected)


def test_a_forest_without_entries_has_zero_gradients_everywhere(moe: PolicyModel, oracle: ModuleType) -> None:
    case = oracle.pack([[3, 4, 5]], entry_share=0.0)
    assert backward(moe, case, 1.0).shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in moe.parameters())


def test_bfloat16_stays_near_float32(
    moe_folder: Path, one_process: ParallelConfig, moe: PolicyModel, oracle: ModuleType
) -> None:
    case = oracle.pack(oracle.random_sequences("random", seed=6), seed=6)
    rounded = build_model(moe_folder, one_process, torch.bfloat16, seed=1)
    hf.load(rounded, moe_folder)
    difference_E = token_logprobs(rounded, case.forest, 1.0) - token_logprobs(moe, case.forest, 1.0)
    assert difference_E.dtype == torch.float32
    assert difference_E.abs().median() < 0.05
    assert difference_E.abs().median() > 0
