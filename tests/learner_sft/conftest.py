"""A small world of demonstrations, and a tiny model that knows its tokens."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

with warnings.catch_warnings():
    # Megatron-Core and torch warn about absent GPU packages while they are imported.
    warnings.simplefilter("ignore")
    from clawpipe.learner import sft, tiny  # noqa: F401
    from clawpipe.pipeline.config import (
        AgentLoopConfig,
        ColdStartConfig,
        Config,
        FilingTasksConfig,
        ModelConfig,
        TinyModelConfig,
    )
    from clawpipe.pipeline.runtime import Runtime

_MEGATRON = ("ignore::UserWarning:megatron", "ignore::DeprecationWarning:megatron", "ignore::FutureWarning:megatron")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Keeps a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
    {"type": "function", "function": {"name": "finish", "description": "Ends the work.", "parameters": {}}},
]
WORDS = "amber birch cedar dune ember fjord grove heron"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron-Core warns about defaults of its own; a warning of ours is still an error."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for text in _MEGATRON:
                item.add_marker(pytest.mark.filterwarnings(text))


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def messages(word: str, *, flawed: bool = False) -> list[dict[str, str]]:
    """A conversation of two assistant turns about one word."""
    return [
        {"role": "system", "content": "Keep words."},
        {"role": "user", "content": f'Keep "{word}".'},
        {"role": "assistant", "content": call("note", word="nothing" if flawed else word)},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": call("finish")},
    ]


def rows() -> Iterator[dict[str, Any]]:
    for word in WORDS.split():
        yield row(word)
        yield row(word, flawed=True)
    for word in WORDS.split()[:4]:
        yield row(word, held_out=True)


def row(word: str, *, flawed: bool = False, held_out: bool = False) -> dict[str, Any]:
    said = messages(word, flawed=flawed)
    return {"kind": "conversation", "tools": TOOLS, "messages": said, "flawed": flawed, "held_out": held_out}


@dataclass(frozen=True)
class World:
    """Configuration and folders of a run whose demonstrations are written."""

    config: Config
    runtime: Runtime

    def with_recipe(self, **changes: Any) -> Config:
        recipe = msgspec.structs.replace(self.config.model.coldstart, **changes)
        model = msgspec.structs.replace(self.config.model, coldstart=recipe)
        return msgspec.structs.replace(self.config, model=model)

    def with_model(self, **changes: Any) -> Config:
        small = msgspec.structs.replace(self.config.model.tiny, **changes)
        return msgspec.structs.replace(self.config, model=msgspec.structs.replace(self.config.model, tiny=small))


def _config() -> Config:
    small = TinyModelConfig(vocab_size=480, hidden_size=32, num_layers=1, num_experts=2, expert_size=32, seed=5)
    recipe = ColdStartConfig(batch_size=8, max_steps=300, gate_probability=0.2, flawed_steps=4)
    return Config(
        model=ModelConfig(tiny=small, coldstart=recipe, context_tokens=512),
        harness=(AgentLoopConfig(),),
        tasks=(FilingTasksConfig(),),
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Demonstrations, and nothing made of them yet."""
    demos = tmp_path / "demos.jsonl"
    demos.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    runtime = Runtime(
        run_id="run",
        run_dir=str(tmp_path),
        demos_path=str(demos),
        init_model_dir=str(tmp_path / "init"),
        start_model_dir=str(tmp_path / "start"),
    )
    return World(_config(), runtime)


@pytest.fixture
def built(world: World) -> World:
    """The same after the role `model`."""
    tiny.main(world.config, world.runtime)
    return world


@pytest.fixture(scope="session", name="tools")
def _tools() -> list[dict[str, Any]]:
    return TOOLS


@pytest.fixture(scope="session", name="conversation")
def _conversation() -> list[dict[str, str]]:
    return messages("cedar")
