"""A small random model on disk, and batches of small prefix trees over its vocabulary."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline.forest import Batch, Forest, RolloutRow
from clawpipe.pipeline.records import float_bytes, int_bytes
from clawpipe.pipeline.runtime import Runtime

with warnings.catch_warnings():
    # Megatron-Core and torch warn about each other while they are imported.
    warnings.simplefilter("ignore")
    import torch

    from clawpipe.learner import hf, parallel, update  # noqa: F401
    from clawpipe.learner.model import build_model
    from clawpipe.pipeline.config import ParallelConfig

_MEGATRON = ("ignore::UserWarning:megatron", "ignore::DeprecationWarning:megatron", "ignore::FutureWarning:megatron")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron-Core warns about defaults of its own; a warning of ours is still an error."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for text in _MEGATRON:
                item.add_marker(pytest.mark.filterwarnings(text))


MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights, large enough that a token's context matters."""
    source = tmp_path_factory.mktemp("config")
    (source / "config.json").write_text(json.dumps(MODEL))
    target = tmp_path_factory.mktemp("model") / "tiny"
    with parallel.session(ParallelConfig()):
        model = build_model(source, ParallelConfig(), torch.float32, seed=3)
        hf.save_hf_folder(model, source, target)
    return target


def make_forest(shared: list[int], tails: dict[int, list[int]], mu: dict[int, list[float]], version: int = 0) -> Forest:
    """One trunk and one tail per rollout; every tail token is a loss entry."""
    tokens, position, parent = list(shared), list(range(len(shared))), list(range(-1, len(shared) - 1))
    end = [len(shared) + sum(map(len, tails.values()))] * len(shared)
    entries: list[tuple[int, float, int]] = []
    for rollout, tail in tails.items():
        stop = len(tokens) + len(tail)
        for depth, (token, logprob) in enumerate(zip(tail, mu[rollout], strict=True)):
            entries.append((len(tokens), logprob, rollout))
            parent.append(len(tokens) - 1 if depth else len(shared) - 1)
            position.append(len(shared) + depth)
            tokens.append(token)
            end.append(stop)
    return Forest(
        tokens=int_bytes(tokens),
        position=int_bytes(position),
        parent=int_bytes(parent),
        end=np.asarray(end, "<i8").tobytes(),
        entry_token=int_bytes([e[0] for e in entries]),
        entry_logprob=float_bytes([e[1] for e in entries]),
        entry_version=int_bytes([version] * len(entries)),
        entry_rollout=int_bytes([e[2] for e in entries]),
    )


def make_batch(version: int = 0, seed: int = 0, batch_id: str = "b1") -> Batch:
    """Two groups of three rollouts, tails of unequal lengths; the last rollout has no entries."""
    rng = np.random.default_rng(seed)
    advantages = [1.0, -0.5, 0.25, -1.0, 0.75, 0.0]
    lengths = [5, 3, 7, 4, 6, 0]
    forests = []
    for group in range(2):
        rows = [row for row in range(3 * group, 3 * group + 3) if lengths[row]]
        tails = {row: rng.integers(1, 64, lengths[row]).tolist() for row in rows}
        mu = {row: (-4.0 + rng.standard_normal(lengths[row])).clip(-8, -0.1).tolist() for row in rows}
        forests.append(make_forest(rng.integers(1, 64, 6).tolist(), tails, mu, version))
    rollouts = tuple(
        RolloutRow(
            rollout_id=f"r{row}",
            group_id=f"g{row // 3}",
            harness="even" if row % 2 == 0 else "odd",
            reward=0.1 * row,
            advantage=advantages[row],
            num_trainable=lengths[row],
        )
        for row in range(6)
    )
    return Batch(batch_id=batch_id, version=version, rollouts=rollouts, forests=tuple(forests))


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Makes a folder that of a run on a model."""

    def make(model_dir: Path, folder: Path) -> Path:
        raw = {
            "model": {"path": str(model_dir)},
            "harness": [{"kind": "agentloop"}],
            "tasks": [{"kind": "filing"}],
        }
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_bytes(configuration.dump(msgspec.convert(raw, configuration.Config)))
        # Where the folder was when it ran is of no account.
        run = Runtime(run_id="cp-test", run_dir="/elsewhere", start_model_dir=str(model_dir))
        (folder / "runtime.json").write_bytes(msgspec.json.encode(run))
        return folder

    return make


@pytest.fixture(scope="session", name="make_forest")
def _make_forest() -> Callable[..., Forest]:
    return make_forest


@pytest.fixture(scope="session", name="make_batch")
def _make_batch() -> Callable[..., Batch]:
    return make_batch
