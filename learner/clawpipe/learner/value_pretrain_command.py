"""The command `clawpipe value-pretrain`. Torch is loaded when it runs, not when the command line starts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline.cli import ConfigPath, Overrides, parse_overrides


def value_pretrain(
    config: ConfigPath,
    batches: Annotated[Path, typer.Option(help="What `clawpipe replay RUN --batches DIR` wrote.")],
    out: Annotated[Path, typer.Option(help="A new folder for the value model; name it in [algorithm] value_path.")],
    epochs: Annotated[int, typer.Option(min=1, help="How often each batch is learned from.")] = 1,
    set_: Overrides = None,
) -> None:
    """Teaches a value model by the batches of an earlier run."""
    loaded = configuration.load(config, parse_overrides(set_ or []))
    with warnings.catch_warnings():
        # Megatron-Core and torch warn about each other; nobody who teaches a value model can act on it.
        warnings.filterwarnings("ignore", module="megatron|torch")
        from clawpipe.learner import parallel
        from clawpipe.learner.value_pretrain import pretrain
    with parallel.session(loaded.learner.parallel, loaded.run.seed) as ranks:
        for line in pretrain(loaded, ranks, batches, out, epochs):
            if ranks.is_main:
                typer.echo(line)
