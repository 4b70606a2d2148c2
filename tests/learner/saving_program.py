"""A learner that does nothing but write checkpoints, until it is killed. Run by test_checkpoint.

Usage: saving_program.py MODEL_DIR FOLDER. Checkpoint n is begun when its weights are in FOLDER/v<n>.safetensors.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch

from clawpipe.learner import checkpoint, hf, parallel, push
from clawpipe.learner.model import build_model
from clawpipe.learner.optimizer import AdamW, wrap
from clawpipe.pipeline.config import LearnerConfig, ParallelConfig
from clawpipe.pipeline.records import StreamCursor


def main(model_dir: Path, folder: Path) -> None:
    with parallel.session(ParallelConfig()):
        model = build_model(model_dir, ParallelConfig(), torch.float32, seed=0)
        hf.load(model, model_dir)
        wrapped = wrap(model)
        optimizer = AdamW(wrapped, LearnerConfig(lr=1e-2))
        for number in count(1):
            optimizer.zero_grad()
            for p in wrapped.parameters():
                p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
            optimizer.step()
            push.stage(wrapped, folder, number)
            numbers = {"version": number, "updates": number, "cursor": StreamCursor(sequence=number)}
            checkpoint.save(folder / "checkpoints", wrapped, optimizer, **numbers, keep_last=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
