"""Stages weight versions for the engines: one safetensors file each, in a folder that they all can read.

The engines read a file when the announcement reaches them, so the newest few stay; a version's number is
never used again, so a file never changes under its name.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from clawpipe.learner import hf
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.records import WeightVersion

KEEP_LAST = 3  # an engine that is still swapping reads the one before, a restarted engine the newest

_NAME = re.compile(r"v(\d+)\.safetensors")


def stage(model: torch.nn.Module, folder: Path, version: int) -> WeightVersion:
    """Writes <folder>/v<version>.safetensors with Hugging Face's names, complete or not at all.

    A collective call; when it returns, the file is there. Raises LearnerError when the folder cannot take it.
    """
    path = folder / f"v{version}.safetensors"
    try:
        hf.save_weights(model, path)
    except OSError as err:
        raise LearnerError(f"{path}: weights cannot be written ({err}); make room there or change [push] dir") from err
    return WeightVersion(version=version, path=str(path), num_bytes=path.stat().st_size, created_s=time.time())


def remove_old(folder: Path, keep_last: int = KEEP_LAST) -> None:
    """Removes all but the `keep_last` newest versions, by number. Only the rank that writes calls this."""
    versions = sorted((int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)))
    for _, path in versions[:-keep_last]:
        path.unlink()


def next_version(last: WeightVersion | None) -> int:
    """The first number that no weights were ever announced under."""
    return 0 if last is None else last.version + 1
