"""The role `model`: builds a tiny Qwen3-MoE with its own tokenizer, as a folder that transformers and vLLM load.

Runs once, after `demos` and before `coldstart` and the engine. The same configuration and demonstrations give
the same folder. Its weights are random.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from clawpipe.learner import demonstrations
from clawpipe.learner.atoms import atoms_of, without_atoms
from clawpipe.learner.demonstrations import Conversation, Demonstration, Filled
from clawpipe.learner.safetensor_files import finish_folder
from clawpipe.learner.tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer
from clawpipe.pipeline.config import Config, TinyModelConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.observe import EventLog, Progress
from clawpipe.pipeline.runtime import Runtime

ROPE_THETA = 10_000.0
KERNEL_MULTIPLE = 32  # vLLM's CPU kernel for experts wants such sizes


def main(config: Config, runtime: Runtime) -> None:
    """Writes `runtime.init_model_dir`. LearnerError when sizes do not fit or demonstrations cannot be read."""
    tiny = config.model.tiny
    if tiny is None:
        raise LearnerError("the role `model` builds what [model.tiny] describes; add the table, or do not run it")
    log = EventLog("model")
    progress = Progress(runtime.path(), "model", "building the model", total=3)
    disable_progress_bar()  # it would write into the log, one JSON object per line
    check_sizes(tiny)
    found = demonstrations.read(Path(runtime.demos_path))
    progress.at(1, "tokenizer")
    tokenizer = make_tokenizer(found, tiny.vocab_size, config.model.context_tokens)
    progress.at(2, "weights")
    model = build(tiny, tokenizer, config.model.context_tokens)
    save(model, tokenizer, Path(runtime.init_model_dir))
    progress.finish(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    log.info("model built", parameters=model.num_parameters(), vocabulary=len(tokenizer), seed=tiny.seed)


def make_tokenizer(found: Sequence[Demonstration], vocab_size: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer of these demonstrations; what harnesses always say in the same words is made of atoms."""
    atoms = atoms_of(demonstrations.recordings_of(found))
    return train_tokenizer(
        ((each.messages, each.tools) for each in found if isinstance(each, Conversation)),
        vocab_size,
        context_tokens,
        recorded=_between_atoms(found, atoms),
        atoms=atoms,
    )


def _between_atoms(found: Sequence[Demonstration], atoms: Sequence[str]) -> Iterator[str]:
    """What the recorded demonstrations say beside the atoms."""
    parts = {
        recording.name: [part for piece in recording.pieces for part in without_atoms(piece.text, atoms)]
        for recording in demonstrations.recordings_of(found)
    }
    for each in found:
        if isinstance(each, Filled):
            yield from map(each.fill, parts[each.recording.name])


def check_sizes(tiny: TinyModelConfig) -> None:
    """LearnerError for a shape that transformers or vLLM would refuse later, or compute wrongly."""
    for holds, what in (
        (tiny.hidden_size % KERNEL_MULTIPLE == 0, f"hidden_size must be a multiple of {KERNEL_MULTIPLE}"),
        (tiny.expert_size % KERNEL_MULTIPLE == 0, f"expert_size must be a multiple of {KERNEL_MULTIPLE}"),
        (tiny.num_heads % tiny.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"),
        (tiny.experts_per_token <= tiny.num_experts, "experts_per_token must not be above num_experts"),
    ):
        if not holds:
            raise LearnerError(f"[model.tiny]: {what}; change one of them")


def build(tiny: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, context_tokens: int) -> Qwen3MoeForCausalLM:
    """A model of this shape with random weights (float32), the same for the same seed and vocabulary."""
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.experts_per_token * tiny.expert_size,  # of dense layers: there are none
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=context_tokens,
        num_experts=tiny.num_experts,
        num_experts_per_tok=tiny.experts_per_token,
        moe_intermediate_size=tiny.expert_size,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=tiny.initializer_range,
        tie_word_embeddings=True,  # one table for reading and saying a word: copying is learned sooner
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = Qwen3MoeForCausalLM(config)
    # Nothing but the ends: sampling settings in a model folder would silently become the engine's defaults.
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    return model


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Writes the folder under another name first: it appears complete or not at all."""
    staging = target.with_name(target.name + ".incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    tokenizer.save_pretrained(staging)
    model.save_pretrained(staging)
    finish_folder(staging, target)
