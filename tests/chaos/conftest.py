"""The kill matrix runs on real sandboxes: as root, with bubblewrap."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sandbox_items
from chaos.forks import Forks
from chaos.scene import Scene
from engine_fixture import build_tokenizer

# ChatML with Hermes calls.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sandbox_items.mark(items, Path(__file__).parent)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template: all that a model is to the proxy."""
    folder = tmp_path_factory.mktemp("chaos-model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def forks(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The process that all parts of all runs are forked from."""
    log = tmp_path_factory.mktemp("chaos-forks") / "forks.log"
    forks = Forks(model_dir, log, owner=f"chaos-{uuid.uuid4().hex[:12]}")
    yield forks
    forks.close()


@pytest.fixture
def make_scene(
    model_dir: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Scene]]:
    """Makes the run of a seed; ends what a failed test left running."""
    made: list[Scene] = []

    def make(seed: int) -> Scene:
        made.append(Scene(tmp_path_factory.mktemp("c"), model_dir, forks, seed))  # a short path, for proxy.sock
        return made[-1]

    yield make
    for scene in made:
        scene.clear()
