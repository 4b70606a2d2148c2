"""The running engine and the Megatron learner agree on logprobs, before and after a push of the learner's weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

with warnings.catch_warnings():
    # Megatron-Core and torch warn about absent GPU packages while they are imported.
    warnings.simplefilter("ignore")
    import torch

    from clawpipe.learner import hf, parallel, push
    from clawpipe.learner.model import PolicyModel, build_model
    from clawpipe.learner.numerics import token_logprobs
    from clawpipe.pipeline.config import ParallelConfig

from engine_fixture import RunningEngine, generate, prompt, worst

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::UserWarning:megatron"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]


@pytest.fixture
def learner_model(tiny_model_dir) -> Iterator[PolicyModel]:
    """The engine's weights in the learner's own model, one process."""
    layout = ParallelConfig()
    with parallel.session(layout):
        model = build_model(tiny_model_dir, layout, torch.float32, seed=0)
        hf.load(model, tiny_model_dir)
        yield model


def learner_logprobs(model: PolicyModel, ids: list[int], completion: list[int], temperature: float) -> np.ndarray:
    """The completion's logprobs from one unbranched path."""
    tokens = torch.tensor(ids + completion)
    total = len(tokens)
    path = SimpleNamespace(
        tokens_T=tokens,
        position_T=torch.arange(total),
        parent_T=torch.arange(total) - 1,
        end_T=torch.full((total,), total),
        entry_token_E=torch.arange(len(ids), total),
    )
    with torch.no_grad():
        return token_logprobs(model, path, temperature).numpy()


def largest_difference(engine: RunningEngine, model: PolicyModel, client: httpx.Client) -> float:
    """Over three prompts and two temperatures."""
    differences = []
    for seed, temperature in ((1, 1.0), (2, 1.0), (3, 0.7)):
        ids = prompt(seed)
        answer = generate(client, engine.url, ids, salt=str(engine.version), temperature=temperature)
        assert answer.spans == [(str(engine.version), 0, len(answer.ids))]
        differences.append(worst(answer.logprobs, learner_logprobs(model, ids, answer.ids, temperature)))
    return max(differences)


def test_engine_and_learner_agree_before_and_after_a_push(engine, learner_model, tmp_path):
    with httpx.Client(timeout=300) as client:
        assert largest_difference(engine, learner_model, client) <= 1e-5
        with torch.no_grad():
            for parameter in learner_model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        assert largest_difference(engine, learner_model, client) > 0.05
        push.stage(learner_model, tmp_path, engine.version + 1)
        engine.push(tmp_path)
        assert largest_difference(engine, learner_model, client) <= 1e-5
