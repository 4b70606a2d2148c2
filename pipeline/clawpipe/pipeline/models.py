"""The tiny model's cache: which folder a configuration's model lives in, and which roles make it.

The key is a digest of everything that the model depends on, so a changed recipe is a new folder and an
unchanged one is built once per machine. Folders appear by rename: a half-built one is never used.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clawpipe.pipeline.config import AgentLoopConfig, Config, FilingTasksConfig, HarnessConfig

RECIPE = 1  # counted up when the same configuration would build another model
# The same for recorded demonstrations: digest of pinned versions, command lines, settings and scripts of all harnesses.
RECORDING = "58fbd5ad805d5c3b"  # tests/demos/test_recording_key.py computes it
SUMMARY_SUFFIX = ".summary.json"  # beside recorded demonstrations: how the recording went


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Where the parts of a model are, or will be."""

    init: Path  # configuration, tokenizer, first weights: what engines start from
    start: Path  # the weights that the learner starts from
    demos: Path | None = None
    recorded: bool = False  # whether demonstrations are recorded through real harnesses

    def missing(self) -> tuple[str, ...]:
        """The roles that must still run, in order."""
        if self.demos is None:
            return ()
        made = [("demos", self.demos), ("model", self.init / "config.json")]
        if self.start != self.init:
            made.append(("coldstart", self.start / "config.json"))
        roles = tuple(role for role, product in made if not product.exists())
        return ("syllables", *roles) if self.recorded and "demos" in roles else roles


def model_folders(config: Config) -> ModelFolders:
    """The folders of the configuration's model."""
    if config.model.tiny is None:
        path = Path(config.model.path)
        return ModelFolders(init=path, start=path)
    folder = cache_dir() / "models" / model_key(config)
    init = folder / "init"
    return ModelFolders(
        init=init,
        start=folder / "start" if config.model.coldstart else init,
        demos=folder / "demos.jsonl",
        recorded=bool(recorded_harnesses(config)),
    )


def model_key(config: Config) -> str:
    """Digest of what a tiny model depends on: its shape, its cold start, what the harnesses show it."""
    demonstrated = [source for source in config.tasks if isinstance(source, FilingTasksConfig)]
    parts: tuple[object, ...] = (RECIPE, config.model.tiny, config.model.coldstart, config.harness, demonstrated)
    if recorded_harnesses(config):
        parts += (RECORDING, config.model.name, config.model.context_tokens, platform.machine())
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def recorded_harnesses(config: Config) -> tuple[HarnessConfig, ...]:
    """The entries of [[harness]] whose demonstrations are recorded: all but agentloop, whose side is ours to write."""
    return tuple(entry for entry in config.harness if not isinstance(entry, AgentLoopConfig))


def syllables_dir(demos_path: Path) -> Path:
    """Where the role `syllables` puts the tokenizer that demonstrations are recorded with."""
    return demos_path.with_suffix(".syllables")


def cache_dir() -> Path:
    """What clawpipe builds once per machine: $CLAWPIPE_CACHE, else its folder in the user's cache."""
    given = os.environ.get("CLAWPIPE_CACHE")
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{root}/clawpipe").expanduser().resolve()
