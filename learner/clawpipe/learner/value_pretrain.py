"""`clawpipe value-pretrain CONFIG`: a value model that has seen the batches of another run before its own begins.

`clawpipe replay RUN --batches DIR` writes the batches. Each row's return is its reward, so that those of a GRPO run
serve too; of a group without spread they hold no tokens. The result is a folder for [algorithm] value_path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from clawpipe.learner import batch, hf
from clawpipe.learner.correction import build_correction
from clawpipe.learner.critic import load_value_model
from clawpipe.learner.parallel import Ranks
from clawpipe.learner.ppo import Critic, make_critic, value_update
from clawpipe.learner.shape import read_shape
from clawpipe.learner.update import Objective, Report
from clawpipe.pipeline.config import Config, PpoConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.models import model_folders

SHOWN = ("value_loss", "explained_variance", "value_mean", "advantage_std")


def pretrain(config: Config, ranks: Ranks, batches: Path, out: Path, epochs: int) -> Iterator[str]:
    """Writes the folder `out`; gives a line for each batch. Raises LearnerError for what a user can act on.

    A collective call. What a batch says of the value model is measured before it learns from it.
    """
    algorithm, start = config.algorithm, model_folders(config).start
    if not isinstance(algorithm, PpoConfig):
        raise LearnerError('[algorithm] kind is not "ppo", so there is no value model to teach; set kind = "ppo"')
    if not (start / "config.json").exists():
        raise LearnerError(
            f"{start}: the run's start model is not there; `clawpipe up` makes a tiny one, or give a path"
        )
    hf.check_target(out)
    paths = sorted(batches.glob("*.msgpack"))
    if not paths:
        raise LearnerError(f"{batches}: no batches (*.msgpack); write them with `clawpipe replay RUN --batches DIR`")
    torch.set_num_threads(config.learner.threads)
    critic = make_critic(load_value_model(config, start), config.learner, algorithm.value_lr)
    for epoch in range(epochs):
        for path in paths:
            report = _learn(critic, ranks, config, path, read_shape(start).vocab_size)
            yield _line(epoch, path, report)
    hf.save_hf_folder(critic.model, start, out)
    yield f"value model written to {out}; name it in [algorithm] value_path"


def _learn(critic: Critic, ranks: Ranks, config: Config, path: Path, vocab_size: int) -> Report:
    objective = Objective(
        algorithm=config.algorithm,
        correction=build_correction(config.correction),
        temperature=config.proxy.temperature,
        max_staleness=config.schedule.max_staleness,
        minibatches=config.learner.minibatches,
    )
    try:
        found = _with_returns(batch.decode(path.read_bytes()))
        forests = batch.load(found, vocab_size=vocab_size, version=found.version)
    except LearnerError as err:
        raise LearnerError(f"{path}: {err}") from err
    return value_update(critic, ranks, found.rollouts, forests, version=found.version, objective=objective)


def _with_returns(found: Batch) -> Batch:
    return replace(found, rollouts=tuple(replace(row, advantage=row.reward) for row in found.rollouts))


def _line(epoch: int, path: Path, report: Report) -> str:
    numbers: Sequence[str] = [f"{name} {report.metrics[name]:.4f}" for name in SHOWN if name in report.metrics]
    nonfinite = ["the gradient was not finite: nothing was learned"] if report.num_nonfinite else []
    return f"epoch {epoch + 1}, {path.stem}: {', '.join([*numbers, *nonfinite]) or 'nothing to learn from'}"
