"""One rank of a small learner: trains on given batches and says what came out. Run by test_layouts under torchrun.

Usage: rank_program.py PLAN.json..., one layout after the other. A plan names the model, the layout, the batches
(files with a Batch each; by one of them the value model may be pre-trained), the algorithm, where to put the weights
after the first update, where to save a checkpoint after it, and where the report goes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from clawpipe.learner import batch as batches
from clawpipe.learner import checkpoint, hf, parallel
from clawpipe.learner.correction import build_correction
from clawpipe.learner.critic import build_value_model, load_trunk
from clawpipe.learner.model import build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.learner.ppo import Critic, ppo_update, value_update
from clawpipe.learner.update import Objective, Policy, update
from clawpipe.pipeline.config import (
    GeometricMaskConfig,
    GrpoConfig,
    LearnerConfig,
    LinearRate,
    ParallelConfig,
    PpoConfig,
)
from clawpipe.pipeline.records import StreamCursor


def train(plan: dict, ranks: parallel.Ranks, layout: ParallelConfig) -> dict:
    settings = LearnerConfig(lr=1e-3, eps=1e-4, clip_grad=0.05, lr_schedule=LinearRate(decay_updates=12))
    model = build_model(Path(plan["model"]), layout, torch.float32, 0, plan.get("recompute", "none"))
    hf.load(model, Path(plan["model"]))
    wrapped = wrap(model)
    optimizer = AdamW(wrapped, settings)
    policy = Policy(model=wrapped, optimizer=optimizer, ranks=ranks)
    critic = teach(plan, layout, settings) if plan.get("ppo") else None
    taught = critic and critic.learned
    objective = Objective(
        algorithm=PpoConfig() if critic else GrpoConfig(),
        correction=build_correction(GeometricMaskConfig(low=0.4, high=1.5, veto_below=0.05, cap=1.5)),
        temperature=1.0,
        max_staleness=4,
        minibatches=plan["minibatches"],
    )
    report = []
    if plan.get("resume"):
        found = checkpoint.latest(Path(plan["resume"]))
        checkpoint.load(found, wrapped, optimizer, taught)
    for number, path in enumerate(plan["batches"]):
        batch = batches.decode(Path(path).read_bytes())
        forests = batches.load(batch, vocab_size=64, version=9)
        if critic and path == plan.get("pretrain"):
            done = value_update(critic, ranks, batch.rollouts, forests, version=9, objective=objective)
        elif critic:
            done = ppo_update(policy, critic, batch.rollouts, forests, version=9, objective=objective)
        else:
            done = update(policy, batch.rollouts, forests, version=9, objective=objective)
        masked = {f"masked/{reason}": tokens for reason, tokens in done.masked_tokens.items()}
        report.append({**done.metrics, **masked, "next_lr": optimizer.next_lr})
        if number == 0 and plan.get("weights"):
            hf.save_weights(wrapped, Path(plan["weights"]))
            if critic:
                hf.save_weights(critic.model, Path(plan["weights"]).with_name("values.safetensors"))
        if number == 0 and plan.get("save"):
            cursor = StreamCursor(sequence=17, done=("r9",))
            where = {"version": 5, "updates": 4, "cursor": cursor, "keep_last": 2}
            checkpoint.save(Path(plan["save"]), wrapped, optimizer, critic=taught, **where)
    return {"metrics": report, "num_parameters": sum(parameter.numel() for parameter in model.parameters())}


def teach(plan: dict, layout: ParallelConfig, settings: LearnerConfig) -> Critic:
    model = build_value_model(Path(plan["model"]), layout, torch.float32, 0)
    load_trunk(model, Path(plan["model"]))
    wrapped = wrap(model)
    return Critic(model=wrapped, optimizer=AdamW(wrapped, settings))


def execute(plan: dict) -> None:
    """Carries out one plan on this rank."""
    layout = ParallelConfig(**plan["layout"])
    if "port" in plan:
        # Each layout's ranks meet anew: torchrun's own store still holds the keys of the one before.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = str(plan["port"])
    with parallel.session(layout) as ranks:
        report = train(plan, ranks, layout)
        if ranks.is_main:
            Path(plan["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        execute(json.loads(Path(path).read_text()))
