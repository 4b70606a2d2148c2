"""A checkpoint's policy as a Hugging Face folder, in one process, whatever layout it was trained in.

The model is held once: weights are read into place and written a tensor at a time. There is no optimizer.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from clawpipe.learner import checkpoint, hf, parallel
from clawpipe.learner.checkpoint import Checkpoint
from clawpipe.learner.model import DTYPES, build_model
from clawpipe.learner.safetensor_files import staging_of
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.config import ParallelConfig
from clawpipe.pipeline.errors import LearnerError


def write_policy(run_dir: Path, target: Path, *, update: int | None, max_shard_bytes: int) -> Checkpoint:
    """Writes the policy of the newest checkpoint, or of the one after `update` updates; says which it was.

    The folder appears complete or not at all. ConfigError or LearnerError for what a user can act on.
    """
    config = configuration.restore(run_dir / "config.json")
    # The folder may have been moved since the run.
    runtime = msgspec.structs.replace(runtimes.load(run_dir), run_dir=str(run_dir))
    target = target.absolute()
    hf.check_target(target)
    found = _choose(runtime.checkpoint_dir, update)
    source = Path(runtime.start_model_dir)
    try:
        with parallel.session(ParallelConfig()):
            model = build_model(source, ParallelConfig(), DTYPES[config.learner.dtype], config.run.seed)
            checkpoint.load_weights(found, model)
            hf.save_hf_folder(model, source, target, max_shard_bytes)
    except OSError as err:
        raise LearnerError(f"{target}: cannot be written ({err}); make room there, or name another folder") from err
    finally:
        shutil.rmtree(staging_of(target), ignore_errors=True)
    return found


def _choose(folder: Path, update: int | None) -> Checkpoint:
    found = checkpoint.complete(folder)
    if not found:
        raise LearnerError(
            f"{folder}: no complete checkpoint; a run writes one every [checkpoint] every_updates, and when it ends"
        )
    if update is None:
        return found[-1]
    wanted = [each for each in found if each.manifest.updates == update]
    if not wanted:
        there = ", ".join(str(number) for number in sorted({each.manifest.updates for each in found}))
        raise LearnerError(f"{folder}: no checkpoint after {update} updates; there are those after {there}")
    return wanted[-1]
