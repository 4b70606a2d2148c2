"""Recorded demonstrations are cached: all that decides what a harness says in them is part of their name."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec

from clawpipe.actors.harness import install
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.recording.takes import shapes, takes
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline import models
from clawpipe.pipeline.config import (
    ClaudeCodeConfig,
    CodexConfig,
    FilingTasksConfig,
    InstalledHarnessConfig,
    ModelConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
    TinyModelConfig,
)

MODEL = ModelConfig(tiny=TinyModelConfig())
TASK = Task(task_id="probe/1", prompt="Do it.", files={}, grader={}, grader_entry="")
ENTRIES = (
    OpenClawConfig(),
    *(OpenClawConfig(name=api, api=api) for api in ("anthropic-messages", "openai-responses")),
    ClaudeCodeConfig(),
    ClaudeCodeConfig(name="bare", bare=True),
    CodexConfig(),
    OpenCodeConfig(),
    QwenCodeConfig(),
)


def fingerprint(entry: InstalledHarnessConfig) -> list[Any]:
    """Version, command line, environment and settings of the program, the tasks and what the model is made to say."""
    kind = str(type(entry).__struct_config__.tag)
    launch = make_harness(entry, MODEL).launch(TASK)
    argv = list(launch.argv)
    for number, word in enumerate(install.command(kind)):  # has this machine's processor in it
        argv = [text.replace(word, f"<{number}>") for text in argv]
    takes_ = list(takes(entry, shapes([FilingTasksConfig()]), random.Random(1)))
    said = [(take.errand.prompt, take.script) for take in takes_]
    return [install.PINS[kind].version, argv, launch.env, sorted(launch.binds), launch.home_files, said]


def test_what_decides_a_recording_is_part_of_its_key() -> None:
    """When this fails, recordings that lie in caches are out of date: put the new digest into `models.RECORDING`."""
    found = [install.NODE.version, *map(fingerprint, ENTRIES)]
    digest = hashlib.blake2b(msgspec.json.encode(found, order="deterministic"), digest_size=8).hexdigest()
    assert digest == models.RECORDING
