"""What the learner says about a configuration before anything starts."""

from __future__ import annotations

import msgspec
import pytest

from clawpipe.learner import preflight
from clawpipe.pipeline.config import Config, RunConfig

BASE = {"harness": [{"kind": "agentloop"}], "tasks": [{"kind": "filing"}]}


def config(**tables) -> Config:
    tables.setdefault("model", {"tiny": {}, "context_tokens": 512})
    return msgspec.convert({**BASE, **tables}, Config)


def check(config: Config, offline: bool) -> list[str]:
    return list(preflight.check(config, offline).problems)


def test_the_defaults_have_no_problems(tmp_path):
    assert check(config(push={"dir": str(tmp_path)}), offline=False) == []
    assert check(config(push={"dir": "/nowhere"}), offline=True) == []


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ({"processes": 3, "tensor": 3, "expert_tensor": 3}, "does not divide the model's 4 attention heads"),
        ({"processes": 3, "expert": 3}, "does not divide the model's 4 experts"),
        ({"processes": 2, "pipeline": 2}, "set pipeline = 1"),
        ({"processes": 3, "expert": 2}, "not a multiple"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_named(parallel, problem):
    [found] = check(config(learner={"parallel": parallel}), offline=True)
    assert problem in found
    assert found.startswith("[learner.parallel]")


def test_more_optimizer_steps_than_rollouts_are_refused():
    schedule = {"groups_per_step": 1, "group_size": 2}
    [found] = check(config(learner={"minibatches": 3}, schedule=schedule), offline=True)
    assert "[learner] minibatches = 3" in found


def test_a_context_beyond_the_model_is_refused(model_dir):
    [found] = check(config(model={"path": str(model_dir), "context_tokens": 2048}), offline=True)
    assert "context_tokens = 2048" in found
    assert "max_position_embeddings = 1024" in found


def test_a_model_folder_without_tokenizer_or_weights_is_named(model_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    table = {"path": str(tmp_path), "context_tokens": 512}
    found = check(config(model=table, push={"dir": str(tmp_path)}), offline=False)
    assert [text.partition(": ")[2].partition(";")[0] for text in found] == [
        "tokenizer.json is missing",
        "tokenizer_config.json is missing",
        "no *.safetensors",
    ]
    assert check(config(model=table), offline=True) == []


def test_a_missing_model_folder_and_a_missing_push_folder_are_named(tmp_path):
    table = {"path": str(tmp_path / "none"), "context_tokens": 512}
    model, push = check(config(model=table, push={"dir": str(tmp_path / "shm")}), offline=False)
    assert "no such folder; give a Hugging Face model folder" in model
    assert push.startswith("[push] dir")


def test_ppo_with_groups_of_one_has_no_problems(tmp_path):
    recipe = config(algorithm={"kind": "ppo"}, schedule={"group_size": 1}, push={"dir": str(tmp_path)})
    assert check(recipe, offline=False) == []


def test_pre_training_that_leaves_the_policy_no_update_is_refused():
    recipe = config(algorithm={"kind": "ppo", "value_pretrain_updates": 4}, run={"updates": 4})
    [found] = check(recipe, offline=True)
    assert "value_pretrain_updates = 4 leaves the policy none" in found
    assert check(msgspec.structs.replace(recipe, run=RunConfig(updates=5)), offline=True) == []
