"""Real harnesses in real sandboxes, on the real proxy and broker, with a scripted engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken

import sandbox_items
from clawpipe.actors.harness import install
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from engine_fixture import build_tokenizer
from harness_live.live import Live
from harness_live.tongues import TONGUES, Tongue

# ChatML with Hermes calls; a system message may stand anywhere, as Claude Code has it.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sandbox_items.mark(items, Path(__file__).parent, pytest.mark.harness)


@pytest.fixture(scope="session")
def live_renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The tiny model's byte-level tokenizer, and marks for reasoning."""
    folder = tmp_path_factory.mktemp("live-model")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return Renderer(folder)


@pytest.fixture(scope="session")
def live_parser(live_renderer: Renderer) -> TurnParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn about each other
        return TurnParser(live_renderer.tokenizer, "hermes", "qwen3", live_renderer.generation_prompt)


@pytest.fixture
def live(live_renderer, live_parser, nats_server, tmp_path, monkeypatch) -> Live:
    return Live(live_renderer, live_parser, nats_server, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def installed() -> Callable[[str], None]:
    """Puts a harness's program into the cache. A machine that cannot get it fails: these tests are the point."""

    def put(kind: str) -> None:
        for name in ("node", kind):
            install.install(name)

    return put


@pytest.fixture
def tongue(kind: str, installed: Callable[[str], None]) -> Tongue:
    """The harness of a test's parameter `kind`, installed."""
    installed(kind)
    return TONGUES[kind]
