"""Recordings through real parts: agentloop in a real sandbox, on the real proxy and broker."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.recording.studio import Recording, record
from clawpipe.actors.recording.takes import shapes, takes
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    FilingTasksConfig,
    ModelConfig,
    ProxyConfig,
    SandboxConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.models import syllables_dir
from clawpipe.pipeline.observe import Progress
from clawpipe.pipeline.runtime import Runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from clawpipe.learner import syllables

FAMILY = FilingTasksConfig()
SYSTEM = "You work on files."
RECORDED = ("test_recording.py", "test_real_harnesses.py")


@dataclass(frozen=True)
class Studio:
    """What was recorded, and what reads it."""

    config: Config
    runtime: Runtime
    renderer: Renderer
    recordings: list[Recording] = field(default_factory=list)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is recorded needs a sandbox."""
    here = Path(__file__).parent
    usable = os.geteuid() == 0 and shutil.which("bwrap") is not None
    for item in items:
        if item.path.parent == here and item.path.name in RECORDED:
            item.add_marker(pytest.mark.sandbox)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs root and bubblewrap"))


@pytest.fixture(scope="session")
def loop() -> AgentLoopConfig:
    return AgentLoopConfig(system=SYSTEM, max_turns=5, max_tokens=2000)


@pytest.fixture(scope="session")
def syllables_runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """A run folder with the tokenizer of syllables."""
    folder = tmp_path_factory.mktemp("demos")
    runtime = Runtime(run_id="tests", run_dir=str(folder), demos_path=str(folder / "demos.jsonl"))
    syllables.main(make_config(AgentLoopConfig()), runtime)
    return runtime


@pytest.fixture(scope="session")
def renderer(syllables_runtime: Runtime) -> Renderer:
    return Renderer(syllables_dir(Path(syllables_runtime.demos_path)))


@pytest.fixture(scope="session")
def studio(loop: AgentLoopConfig, syllables_runtime: Runtime) -> Studio:
    """One recording per shape, of agentloop, for a run that samples broken calls again."""
    config = structs.replace(make_config(loop), proxy=ProxyConfig(on_malformed_tool_call="resample"))
    wanted = list(takes(loop, shapes([FAMILY]), random.Random(7)))
    progress = Progress(syllables_runtime.path(), "demos", "recording")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn about each other
        renderer, recordings = anyio.run(record, config, syllables_runtime, wanted, progress)
    return Studio(config, syllables_runtime, renderer, recordings)


def make_config(*harness: Any) -> Config:
    return Config(
        model=ModelConfig(tiny=TinyModelConfig()),
        harness=harness,
        tasks=(FAMILY,),
        sandbox=SandboxConfig(slots=2, wall_clock_s=60.0, memory_bytes=256 * 1024**2, first_uid=330_000),
    )


@pytest.fixture(scope="session", name="make_config")
def _make_config() -> Callable[..., Config]:
    return make_config
