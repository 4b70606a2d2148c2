"""A small real tokenizer, vLLM's real parsers, a scripted engine behind our own Protocol, slots over real sockets."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clawpipe.actors import link
from clawpipe.actors.proxy import service
from clawpipe.actors.proxy.parse import TurnParser
from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.proxy.slots import listening
from clawpipe.actors.proxy.upstream import NOTHING, Sampled, Wanted
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    FilingTasksConfig,
    ModelConfig,
    ProxyConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import FinishReason, RolloutManifest, RolloutRequest, Scored, VersionSpan

sys.path.insert(0, str(Path(__file__).parent))  # for chat_requests

WAIT_S = 300.0  # for what comes at once on a machine that does nothing else; only a fault lasts that long
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

EXEC = {
    "type": "function",
    "function": {
        "name": "exec",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}
LIST = {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}}


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    corpus = ['{"name": "exec", "arguments": {"cmd": "ls -la"}}\n', "system user assistant hello world the  file\n\n"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        corpus * 5, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, chat_template=TEMPLATE
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the role `proxy`."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    return folder


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir)


@pytest.fixture(scope="session")
def make_parser(renderer: Renderer) -> Callable[..., TurnParser]:
    def make(tool_parser: str = "hermes", reasoning_parser: str = "") -> TurnParser:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's imports warn about each other
            return TurnParser(renderer.tokenizer, tool_parser, reasoning_parser, renderer.generation_prompt)

    return make


@pytest.fixture(scope="session")
def parser(make_parser: Callable[..., TurnParser]) -> TurnParser:
    return make_parser()


@dataclass
class ScriptedSampler:
    """Says what the script says, one entry per call: text that ends its turn, or ready-made samples, or an error.

    `hold`: a call waits for it before it answers; a call that is cut meanwhile hands over its first two tokens.
    """

    renderer: Renderer
    script: list[Any] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    said: list[Sampled] = field(default_factory=list)
    hold: anyio.Event | None = None

    def ids(self, text: str) -> list[int]:
        return self.renderer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def turn(self, text: str) -> Sampled:
        return sampled([*self.ids(text), self.renderer.end_of_turn_id])

    async def ready(self) -> None:
        """There is always a next script."""

    async def sample(self, wanted: Wanted, cut: anyio.Event) -> Sampled:
        self.prompts.append(wanted.prompt.tolist())
        self.limits.append(wanted.max_tokens)
        entry = self.script.pop(0)
        if isinstance(entry, Exception):
            raise entry
        answer = self.turn(entry) if isinstance(entry, str) else entry
        if self.hold is not None and await _first(self.hold, cut) is cut:
            answer = sampled(answer.ids[:2], FinishReason.CUT) if len(answer.ids) else NOTHING
        self.said.append(answer)
        return answer


async def _first(*events: anyio.Event) -> anyio.Event:
    """The event that is set first."""
    async with anyio.create_task_group() as group:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            group.cancel_scope.cancel()

        for event in events:
            group.start_soon(wait, event)
    return next(event for event in events if event.is_set())


def sampled(ids, finish: FinishReason = FinishReason.STOP, version: int = 3) -> Sampled:
    return Sampled(
        ids=np.array(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
        versions=(VersionSpan(version=version, start=0, end=len(ids)),),
        finish_reason=finish,
    )


@pytest.fixture
def make_sampled() -> Callable[..., Sampled]:
    return sampled


@pytest.fixture
def sampler(renderer: Renderer) -> ScriptedSampler:
    return ScriptedSampler(renderer)


class SlotClient:
    """The supervisor's side of the link, as a test needs it."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.sock.setblocking(False)
        self.listeners: list[socket.socket] = []

    async def ask(self, message: link.ToProxy, fd: int | None = None) -> link.ToSlot:
        socket.send_fds(self.sock, [link.encode(message)], [] if fd is None else [fd])
        await anyio.wait_readable(self.sock)
        return link.decode_to_slot(self.sock.recv(link.MAX_PACKET_BYTES))

    async def take(self) -> link.Assigned | link.Drained:
        return await self.ask(link.Take())

    async def open(self, request: RolloutRequest) -> RolloutHandle:
        listener = socket.create_server(("127.0.0.1", 0))
        self.listeners.append(listener)
        message = link.Open(rollout_id=request.rollout_id, harness=request.harness)
        assert await self.ask(message, listener.fileno()) == link.Opened()
        return RolloutHandle(self, request, listener)

    def close(self) -> None:
        self.sock.close()
        for listener in self.listeners:
            listener.close()


@dataclass
class RolloutHandle:
    slot: SlotClient
    request: RolloutRequest
    listener: socket.socket  # our own copy stays open, as the supervisor's does
    attempt: int = 0

    def call_id(self, index: int) -> str:
        return f"{self.request.rollout_id}.a{self.attempt}.c{index}"

    def client(self, **options: Any) -> httpx.AsyncClient:
        port = self.listener.getsockname()[1]
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=WAIT_S, trust_env=False, **options)

    async def settle(self) -> link.Settled:
        return await self.slot.ask(link.Settle(rollout_id=self.request.rollout_id))

    async def close(self, outcome: Any = None) -> None:
        message = link.Close(
            rollout_id=self.request.rollout_id, outcome=outcome or Scored(reward=1.0), started_s=1.0, ended_s=2.0
        )
        assert await self.slot.ask(message) == link.Closed()


@dataclass
class Proxy:
    """A served proxy on a real nats-server."""

    broker: Broker
    path: Path
    slots: list[SlotClient] = field(default_factory=list)

    def slot(self) -> SlotClient:
        self.slots.append(SlotClient(self.path))
        return self.slots[-1]

    async def rollout(self, name: str = "r-0") -> RolloutHandle:
        request = RolloutRequest(rollout_id=name, group_id="g-0", task_id="t/0", harness="agentloop")
        await self.broker.publish_request(request)
        slot = self.slot()
        assigned = await slot.take()
        assert assigned.request == request
        return replace(await slot.open(request), attempt=assigned.attempt)

    async def records(self, number: int) -> list[Any]:
        """The first `number` records of the stream."""
        found: list[Any] = []
        with anyio.fail_after(WAIT_S):
            async for entry in self.broker.records():
                found.append(entry.record)
                if len(found) == number:
                    return found
        raise AssertionError

    async def manifest(self) -> RolloutManifest:
        number = await self.broker.last_records_sequence()
        *_, last = await self.records(number)
        assert isinstance(last, RolloutManifest)
        return last


@pytest.fixture
def make_proxy(nats_server, tmp_path, renderer, parser, sampler):
    """`async with make_proxy(keepalive_s=...) as proxy`: options are those of [proxy]."""

    @asynccontextmanager
    async def make(*, context_tokens: int = 4096, broker_for_proxy=None, **options: Any):
        config = Config(
            model=ModelConfig(tiny=TinyModelConfig(), context_tokens=context_tokens),
            harness=(AgentLoopConfig(),),
            tasks=(FilingTasksConfig(),),
            proxy=ProxyConfig(**{"settle_timeout_s": WAIT_S, **options}),
        )
        path = tmp_path / "proxy.sock"
        async with Broker.connect(nats_server.url, nats_server.token) as broker:
            await broker.setup(256 * 1024**2)
            with listening(path) as server:
                async with anyio.create_task_group() as group:
                    group.start_soon(
                        service.serve,
                        config,
                        server,
                        broker_for_proxy or broker,
                        sampler,
                        renderer,
                        parser,
                        EventLog("proxy"),
                    )
                    proxy = Proxy(broker, path)
                    try:
                        yield proxy
                    finally:
                        for slot in proxy.slots:
                            slot.close()
                        group.cancel_scope.cancel()

    return make


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("clawpipe").setLevel(logging.ERROR)


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    return [EXEC, LIST]
