"""Demonstrations of the programs from npm, where they are installed: their own tools solve the tasks of the script."""

from __future__ import annotations

import random
import warnings
from typing import Any

import anyio
import msgspec
import pytest

from clawpipe.actors.harness import install
from clawpipe.actors.recording.rolls import Roll
from clawpipe.actors.recording.studio import record
from clawpipe.actors.recording.takes import Shape, takes
from clawpipe.actors.recording.tries import problem_of
from clawpipe.pipeline.config import (
    ClaudeCodeConfig,
    CodexConfig,
    InstalledHarnessConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)
from clawpipe.pipeline.observe import Progress

pytestmark = [pytest.mark.harness, pytest.mark.slow]
CLEAN = [Shape(0), Shape(3)]


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("openclaw", OpenClawConfig()),
        ("claude_code", ClaudeCodeConfig()),
        ("claude_code", ClaudeCodeConfig(name="bare", bare=True)),
        ("codex", CodexConfig()),
        ("opencode", OpenCodeConfig()),
        ("qwen_code", QwenCodeConfig()),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_script_solves_its_tasks_in_the_real_program(
    kind: str, entry: InstalledHarnessConfig, make_config: Any, syllables_runtime: Any
) -> None:
    if install.missing(kind) is not None:
        pytest.skip(f"{kind} is not installed; run `clawpipe harness install {kind}`")
    config = make_config(entry)
    sandbox = msgspec.structs.replace(
        config.sandbox, memory_bytes=2 * 1024**3, scratch_bytes=256 * 1024**2, max_processes=256, cpus=2.0
    )
    config = msgspec.structs.replace(config, sandbox=msgspec.structs.replace(sandbox, wall_clock_s=300.0))
    wanted = list(takes(entry, CLEAN, random.Random(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn about each other
        renderer, recordings = anyio.run(
            record, config, syllables_runtime, wanted, Progress(syllables_runtime.path(), "demos", kind)
        )
    assert [problem_of(each) for each in recordings] == [None, None]
    for recording in recordings:
        said = [text for text, sampled in Roll.of(recording, renderer).pieces if sampled]
        assert said == [f"{turn}<|im_end|>" for turn in recording.take.script]
