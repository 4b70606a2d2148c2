"""`clawpipe export RUN_DIR --hf DIR`: what the command line must know of it, without torch, which takes seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes

MAX_SHARD_BYTES = 5_000_000_000


def export(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN_DIR")],
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="The folder to write: a new or an empty one.")],
    update: Annotated[
        int | None,
        typer.Option(min=0, help="The policy after so many updates; default: that of the newest checkpoint."),
    ] = None,
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Of one file of weights.")] = MAX_SHARD_BYTES,
) -> None:
    """Writes the policy of a run's checkpoint as a folder that transformers and vLLM load."""
    runtimes.load(run_dir)
    configuration.restore(run_dir / "config.json")
    with warnings.catch_warnings():
        # Megatron-Core and torch warn about each other; nobody who exports can act on it.
        warnings.filterwarnings("ignore", module="megatron|torch")
        from clawpipe.learner.export import write_policy

        found = write_policy(run_dir, hf, update=update, max_shard_bytes=max_shard_bytes)
    typer.echo(f"{hf}: the policy after {found.manifest.updates} updates, from {found.path}")
