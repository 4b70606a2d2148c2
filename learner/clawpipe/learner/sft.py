"""The role `coldstart`: supervised training on scripted demonstrations, before the first rollout.

Runs once, in one process, through the same model, packing and log-probabilities as reinforcement learning.
Stage 1 trains on clean demonstrations until the model has learned to copy, which comes suddenly; stage 2 adds
flawed ones while the learning rates fall, so that reinforcement learning finds something to unlearn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from clawpipe.learner import batch, hf, parallel
from clawpipe.learner.batch import ForestTensors
from clawpipe.learner.demonstrations import read, sequence
from clawpipe.learner.model import PolicyModel, build_model
from clawpipe.learner.numerics import token_logprobs
from clawpipe.learner.optimizer import MuonAdamW, Optimizer
from clawpipe.pipeline.config import ColdStartConfig, Config, ParallelConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.forest import Batch, RolloutRow
from clawpipe.pipeline.observe import EventLog, Progress
from clawpipe.pipeline.packing import Branch, Trainable, pack
from clawpipe.pipeline.runtime import Runtime

CLIP_GRAD = 1.0
LAST_LR_SCALE = 0.05  # what stage 2 ends with
GATE_DEMONSTRATIONS = 64  # held-out ones that the gate looks at
USUAL_CLEAN_STEPS = 220  # how long stage 1 takes for agentloop alone; for the time left only


@dataclass(frozen=True, slots=True)
class Lessons:
    """The demonstrations as sequences, by their use."""

    clean: Sequence[Branch]
    flawed: Sequence[Branch]
    held_out: Mapping[str, Sequence[Branch]]  # per harness clean ones, not trained on


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cold start went."""

    clean_steps: int  # of stage 1
    gate_probability: float  # of held-out demonstrations of the harness that is learned worst, when stage 1 ended
    loss: float  # of the last step of stage 2, nats per token


def main(config: Config, runtime: Runtime) -> None:
    """Writes `runtime.start_model_dir`. LearnerError when stage 1 does not reach the gate."""
    recipe, tiny = config.model.coldstart, config.model.tiny
    if recipe is None or tiny is None:
        raise LearnerError("the role `coldstart` needs [model.tiny] and [model.coldstart]; add them, or do not run it")
    log = EventLog("coldstart")
    progress = Progress(runtime.path(), "coldstart", "cold start")
    torch.set_num_threads(config.learner.threads)
    source = Path(runtime.init_model_dir)
    lessons = read_lessons(Path(runtime.demos_path), source)
    with parallel.session(ParallelConfig()):
        model = build_model(source, ParallelConfig(), torch.float32, tiny.seed)
        hf.load(model, source)
        trainer = Trainer(model, recipe, lessons, random.Random(f"coldstart-{tiny.seed}"))
        outcome = trainer.run(progress)
        hf.save_hf_folder(model, source, Path(runtime.start_model_dir))
    progress.finish(f"{outcome.clean_steps} clean and {recipe.flawed_steps} flawed steps")
    log.info(
        "cold start finished",
        clean_steps=outcome.clean_steps,
        flawed_steps=recipe.flawed_steps,
        probability=outcome.gate_probability,
        loss=outcome.loss,
    )


def read_lessons(demos_path: Path, model_dir: Path) -> Lessons:
    """The demonstrations in the model's tokens. LearnerError when a kind of them is missing."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    clean: list[Branch] = []
    flawed: list[Branch] = []
    held_out: dict[str, list[Branch]] = {}
    for each in read(demos_path):
        kind = held_out.setdefault(each.harness, []) if each.held_out else flawed if each.flawed else clean
        kind.append(sequence(tokenizer, each))
    kinds = {"clean": clean, "flawed": flawed, "held_out": held_out}
    missing = [name for name, found in kinds.items() if not found]
    if missing:
        raise LearnerError(f"{demos_path}: no {' and no '.join(missing)} demonstrations; write the file anew")
    return Lessons(clean=clean, flawed=flawed, held_out=held_out)


class Trainer:
    """The two stages on one model."""

    def __init__(self, model: PolicyModel, recipe: ColdStartConfig, lessons: Lessons, dice: random.Random) -> None:
        self._model = model
        self._recipe = recipe
        self._lessons = lessons
        self._dice = dice
        self._optimizer: Optimizer = MuonAdamW(
            model, muon_lr=recipe.muon_lr, adamw_lr=recipe.adamw_lr, clip_grad=CLIP_GRAD
        )
        held_out = lessons.held_out.values()
        self._gates = [_forest(branches[:GATE_DEMONSTRATIONS], model.vocab_size) for branches in held_out]

    def run(self, progress: Progress) -> Outcome:
        """Both stages. LearnerError when `max_steps` do not open the gate."""
        clean_steps, probability = self._train_clean(progress)
        loss = self._train_mixed(progress, clean_steps)
        return Outcome(clean_steps=clean_steps, gate_probability=probability, loss=loss)

    def probability(self) -> float:
        """Mean over held-out demonstrations of the probability of all their assistant turns together.

        Of several harnesses the lowest: the cold start is over when the model can work in each of them.
        """
        return min(map(self._probability, self._gates))

    def _probability(self, gate: ForestTensors) -> float:
        with torch.no_grad():
            logprob_E = token_logprobs(self._model, gate, temperature=1.0)
        rollout_E = gate.entry_rollout_E
        logprob_R = torch.zeros(int(rollout_E.max()) + 1).index_add_(0, rollout_E, logprob_E.cpu())
        return float(logprob_R.exp().mean())

    def _train_clean(self, progress: Progress) -> tuple[int, float]:
        recipe, probability = self._recipe, 0.0
        for step in range(1, recipe.max_steps + 1):
            loss = self._step(self._draw(flawed_fraction=0.0), min(1.0, step / max(recipe.warmup_steps, 1)))
            if step % recipe.check_every_steps == 0:
                probability = self.probability()
            detail = f"step {step}, loss {loss:.3f}, held-out probability {probability:.3f}"
            is_usual = step <= USUAL_CLEAN_STEPS
            progress.at(step, detail, USUAL_CLEAN_STEPS + recipe.flawed_steps if is_usual else 0)  # 0: not known
            if probability >= recipe.gate_probability:
                return step, probability
        raise LearnerError(
            f"cold start: after max_steps = {recipe.max_steps} the model gives held-out demonstrations the "
            f"probability {probability:.3f}, below gate_probability = {recipe.gate_probability}; raise max_steps "
            "of [model.coldstart] or take another seed of [model.tiny]"
        )

    def _train_mixed(self, progress: Progress, clean_steps: int) -> float:
        total, loss = self._recipe.flawed_steps, math.nan
        for step in range(total):
            drawn = self._draw(self._recipe.flawed_fraction)
            loss = self._step(drawn, max(LAST_LR_SCALE, 1 - step / total))
            progress.at(clean_steps + step + 1, f"flawed step {step + 1}, loss {loss:.3f}", clean_steps + total)
        return loss

    def _draw(self, flawed_fraction: float) -> list[Branch]:
        """One batch. Neither list is walked through in order: a batch is a sample of all demonstrations."""
        lists = (self._lessons.clean, self._lessons.flawed)
        return [self._dice.choice(lists[self._dice.random() < flawed_fraction]) for _ in range(self._recipe.batch_size)]

    def _step(self, sequences: Sequence[Branch], lr_scale: float) -> float:
        """One optimizer step on the mean loss per sampled token, which is returned in nats."""
        forest = _forest(sequences, self._model.vocab_size)
        self._optimizer.set_lr(lr_scale)
        self._optimizer.zero_grad()
        loss = -token_logprobs(self._model, forest, temperature=1.0).mean()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.item()


def _forest(sequences: Sequence[Branch], vocab_size: int) -> ForestTensors:
    """The sequences as one forest: what they share, the system turn above all, is computed once."""
    trainables = [Trainable(rollout_index=index, branches=(branch,)) for index, branch in enumerate(sequences)]
    (forest,) = pack(trainables, budget_tokens=sum(len(branch.tokens) for branch in sequences))
    rows = tuple(
        RolloutRow(
            rollout_id=f"demonstration {index}",
            group_id="",
            harness="",
            reward=0.0,
            advantage=0.0,
            num_trainable=len(branch.entries),
        )
        for index, branch in enumerate(sequences)
    )
    demonstrations = Batch(batch_id="cold start", version=0, rollouts=rows, forests=(forest,))
    (tensors,) = batch.load(demonstrations, vocab_size=vocab_size, version=0)
    return tensors
