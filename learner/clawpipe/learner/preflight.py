"""What the learner can say about a configuration before anything starts. Part of `clawpipe check`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from clawpipe.learner.memory_plan import GB, Load, active_parameters, memory_plan, parameters, refusal, table
from clawpipe.learner.published import published_shape
from clawpipe.learner.shape import ModelShape, check_layout, check_split, read_shape
from clawpipe.pipeline.checks import Report
from clawpipe.pipeline.config import (
    AlgorithmConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    PpoConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.errors import LearnerError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check(config: Config, offline: bool) -> Report:
    """Problems that would end the learner, one line each. `offline`: without looking at this machine."""
    problems = _layout(config)
    plan = Report() if problems else _plan(config)
    if config.schedule.groups_per_step * config.schedule.group_size < config.learner.minibatches:
        problems.append(
            f"[learner] minibatches = {config.learner.minibatches} is more than the rollouts of a batch "
            f"({config.schedule.groups_per_step} x {config.schedule.group_size}); lower it"
        )
    problems += _pretraining(config)
    if not offline:
        problems += [
            *_model_files(config.model),
            *_value_files(config.algorithm),
            *_machine(config.learner),
            *_push_folder(config.push.dir),
        ]
    return Report(problems=(*problems, *plan.problems), notes=plan.notes)


def _pretraining(config: Config) -> list[str]:
    algorithm, updates = config.algorithm, config.run.updates
    if not isinstance(algorithm, PpoConfig) or algorithm.value_pretrain_updates < updates:
        return []
    return [
        f"[algorithm] value_pretrain_updates = {algorithm.value_pretrain_updates} leaves the policy none of the "
        f"[run] updates = {updates}; raise updates, or lower value_pretrain_updates"
    ]


def _layout(config: Config) -> list[str]:
    parallel = config.learner.parallel
    try:
        check_layout(parallel, parallel.processes)
        shape = _shape(config.model)
        if shape is not None:
            check_split(shape, parallel)
            if shape.max_position < config.model.context_tokens:
                raise LearnerError(
                    f"[model] context_tokens = {config.model.context_tokens} is above the model's "
                    f"max_position_embeddings = {shape.max_position}; lower it"
                )
    except LearnerError as err:
        return [str(err)]
    return []


def _shape(model: ModelConfig) -> ModelShape | None:
    """The model's shape, as far as it is known: a folder that is missing is another check's business."""
    if model.tiny is not None:
        return _tiny_shape(model.tiny, model.context_tokens)
    return read_shape(Path(model.path)) if _has_folder(model) else None


def _has_folder(model: ModelConfig) -> bool:
    return (Path(model.path) / "config.json").exists()


def _plan(config: Config) -> Report:
    """The memory plan of a rank on the devices that [learner] device_memory_gb names."""
    learner, name = config.learner, Path(config.model.path).name
    if not learner.device_memory_gb:
        return Report()
    shape = _shape(config.model) or published_shape(name)
    if shape is None:
        return Report(notes=(f"no memory plan: {config.model.path} has no config.json, and {name} is not known",))
    try:
        check_split(shape, learner.parallel)
    except LearnerError as err:
        return Report(problems=(str(err),))
    load = plan_load(config)
    items = memory_plan(shape, learner.parallel, load)
    refused = refusal(items, learner.device_memory_gb, load)
    return Report(
        problems=() if refused is None else (refused,),
        notes=(*_plan_heading(config, shape), *table(items, learner.device_memory_gb)),
    )


def plan_load(config: Config) -> Load:
    """What the configuration's largest forest asks of a rank.

    That is a forest of `pack_tokens`, or one branch of the whole context; a rollout whose branches together hold more
    is a larger forest of its own, which is not planned with. Nor are more nodes below a token than one for each
    rollout of a group, each sharing nearly all of its tokens: eight at least, as rollouts of other groups share their
    harness's prompt.
    """
    learner = config.learner
    return Load(
        tokens=max(learner.pack_tokens, config.model.context_tokens),
        readers=1 + max(config.schedule.group_size, 8),
        dtype=learner.dtype,
        recompute=learner.recompute,
        value_model=isinstance(config.algorithm, PpoConfig),
    )


def _plan_heading(config: Config, shape: ModelShape) -> list[str]:
    model, parallel = config.model, config.learner.parallel
    name = "[model.tiny]" if model.tiny is not None else Path(model.path).name
    whole = parameters(shape, ParallelConfig()).total
    data = parallel.processes // parallel.tensor
    lines = [
        f"memory plan of one rank: {name}, {whole / GB:.2f} B parameters, {active_parameters(shape) / GB:.2f} B active",
        f"  {parallel.processes} ranks = tensor {parallel.tensor} x data {data}; expert {parallel.expert}, "
        f"expert_tensor {parallel.expert_tensor}; {config.learner.dtype}, recompute {config.learner.recompute}",
    ]
    if model.tiny is None and not _has_folder(model):
        lines.append(f"  shape: the published one, since {model.path} has no config.json on this machine")
        if shape.max_position < model.context_tokens:
            lines.append(
                f"  note: the published max_position_embeddings = {shape.max_position} is below context_tokens = "
                f"{model.context_tokens}; a folder that says so is refused"
            )
    return lines


def _tiny_shape(tiny: TinyModelConfig, context_tokens: int) -> ModelShape:
    return ModelShape(
        model_type="qwen3_moe",
        vocab_size=tiny.vocab_size,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        ffn_size=tiny.expert_size,
        num_experts=tiny.num_experts,
        experts_per_token=tiny.experts_per_token,
        normalize_expert_weights=True,
        qk_norm=True,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position=context_tokens,
        tied_embeddings=True,
        initializer_range=tiny.initializer_range,
    )


def _model_files(model: ModelConfig) -> list[str]:
    if model.tiny is not None:
        return []
    folder = Path(model.path)
    if not folder.is_dir():
        return [f"[model] path = {folder}: no such folder; give a Hugging Face model folder"]
    problems = [
        f"[model] path = {folder}: {name} is missing; give a complete Hugging Face model folder"
        for name in ("config.json", *TOKENIZER_FILES)
        if not (folder / name).exists()
    ]
    if not any(folder.glob("*.safetensors")):
        problems.append(f"[model] path = {folder}: no *.safetensors; the learner reads no other format")
    return problems


def _value_files(algorithm: AlgorithmConfig) -> list[str]:
    path = algorithm.value_path if isinstance(algorithm, PpoConfig) else ""
    if not path or any(Path(path).glob("*.safetensors")):
        return []
    return [f"[algorithm] value_path = {path}: no *.safetensors; give a folder that `clawpipe value-pretrain` wrote"]


def _machine(learner: LearnerConfig) -> list[str]:
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))  # without importing torch, which takes seconds
    if present and learner.dtype == "float32":
        return ["[learner] dtype = float32: on CUDA the learner computes in bfloat16; set it so"]
    if 0 < present < learner.parallel.processes:
        return [
            f"[learner.parallel] processes = {learner.parallel.processes}, but this machine has {present} "
            "CUDA devices; lower processes, or start the learner with torchrun on several hosts"
        ]
    return []


def _push_folder(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return [f"[push] dir = {folder}: no such folder; make it, or name one that learner and engines share"]
    try:
        with tempfile.TemporaryFile(dir=folder):
            return []
    except OSError as err:
        return [f"[push] dir = {folder}: cannot be written ({err.strerror}); choose another folder"]
