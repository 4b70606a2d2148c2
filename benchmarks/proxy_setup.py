"""What the proxy's benchmark runs on: a tiny model, and one vLLM, nats-server and proxy as processes."""

from __future__ import annotations

import socket
import struct
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clawpipe.actors import link
from clawpipe.actors.engines.server import ServerSettings, running
from clawpipe.actors.engines.transfer import apply, init_transfer
from clawpipe.learner import tiny
from clawpipe.learner.tokenizer import CHAT_TEMPLATE, MARKS, SPECIAL
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import nats_server
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    EnginesConfig,
    FilingTasksConfig,
    ModelConfig,
    ProxyConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.processes import Child, free_port, start
from clawpipe.pipeline.records import CallRecord, EngineState, RolloutRequest, Scored, WeightVersion
from clawpipe.pipeline.runtime import Runtime

MODEL = "policy"
VERSION = 0  # of the weights
CONTEXT_TOKENS = 32768
TOOL_PARSER = "hermes"
STORE_BYTES = 1024**3
READY_S = 120.0
COUNTED = Path(__file__).with_name("proxy_counted.py")


@dataclass
class World:
    """All that runs."""

    config: Config
    engine_url: str
    socket: Path
    broker: Broker
    proxy: psutil.Process
    engine: psutil.Process
    count_file: Path
    records: dict[str, CallRecord] = field(default_factory=dict)  # by call id

    def encoded_tokens(self) -> int:
        """How many tokens the proxy has encoded so far."""
        return int(struct.unpack("q", self.count_file.read_bytes())[0])

    async def record(self, call_id: str) -> CallRecord:
        """The record of a call, which is stored before the call is answered."""
        while call_id not in self.records:  # noqa: ASYNC110  # an event per call would be made only to be set
            await anyio.sleep(0.002)
        return self.records[call_id]


@dataclass
class Rollout:
    """A rollout as its supervisor holds it: the link to the proxy, and the listener that the proxy serves."""

    link: socket.socket
    listener: socket.socket
    request: RolloutRequest
    attempt: int

    @property
    def port(self) -> int:
        """Where the harness would find its provider."""
        return int(self.listener.getsockname()[1])

    def call_id(self, index: int) -> str:
        """As the proxy names its calls."""
        return f"{self.request.rollout_id}.a{self.attempt}.c{index}"

    async def close(self) -> None:
        """Settles and ends it."""
        rollout_id = self.request.rollout_id
        await _ask(self.link, link.Settle(rollout_id=rollout_id))
        outcome = Scored(reward=0.0)
        await _ask(self.link, link.Close(rollout_id=rollout_id, outcome=outcome, started_s=0.0, ended_s=1.0))
        self.link.close()
        self.listener.close()


async def open_rollout(world: World, name: str) -> Rollout:
    """A rollout whose listener is served."""
    request = RolloutRequest(rollout_id=name, group_id=name, task_id="t/0", harness=world.config.harness[0].name)
    await world.broker.publish_request(request)
    slot = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slot.connect(str(world.socket))
    slot.setblocking(False)
    assigned = await _ask(slot, link.Take())
    assert isinstance(assigned, link.Assigned)
    listener = socket.create_server(("127.0.0.1", 0))
    opening = link.Open(rollout_id=assigned.request.rollout_id, harness=assigned.request.harness)
    assert await _ask(slot, opening, listener.fileno()) == link.Opened()
    return Rollout(slot, listener, assigned.request, assigned.attempt)


async def _ask(slot: socket.socket, message: link.ToProxy, *fds: int) -> link.ToSlot:
    socket.send_fds(slot, [link.encode(message)], list(fds))
    await anyio.wait_readable(slot)
    return link.decode_to_slot(slot.recv(link.MAX_PACKET_BYTES))


@asynccontextmanager
async def world(folder: Path, profile: str = "") -> AsyncIterator[World]:
    """Builds the model and starts everything; ends it with the block."""
    config = _config()
    model_dir = folder / "model"
    _build_model(config, model_dir)
    url = f"http://127.0.0.1:{free_port()}"
    settings = ServerSettings(
        name="vllm-0",
        url=url,
        model_dir=str(model_dir),
        model_name=MODEL,
        context_tokens=CONTEXT_TOKENS,
        config=config.engines,
        seed=0,
    )
    server = nats_server.prepare(folder, port=0, token="", max_store_bytes=STORE_BYTES)
    runtime = Runtime(
        run_id=f"bench-{time.time_ns()}",
        run_dir=str(folder),
        nats_url=server.url,
        nats_token=server.token,
        engine_urls=(url,),
        init_model_dir=str(model_dir),
    )
    (folder / "config.json").write_bytes(configuration.dump(config))
    runtimes.save(runtime)
    count_file = folder / "encoded"
    count_file.write_bytes(struct.pack("q", 0))
    serve = [sys.executable, str(COUNTED), str(folder), str(count_file), *([profile] if profile else [])]
    async with (
        _child(folder, runtime, "nats", list(server.argv)),
        running(settings, folder, f"{runtime.run_id}/engine") as engine,
        _broker(runtime, config) as broker,
        _child(folder, runtime, "proxy", serve) as proxy,
    ):
        await _push(url, next(model_dir.glob("*.safetensors")))
        state = EngineState(name="vllm-0", url=url, version=VERSION, healthy=True, since_s=time.time())
        await broker.set_engine(state)
        made = World(
            config=config,
            engine_url=url,
            socket=runtime.proxy_socket,
            broker=broker,
            proxy=_python_of(proxy),
            engine=_python_of(engine),
            count_file=count_file,
        )
        await _until_served(made, proxy)
        async with anyio.create_task_group() as group:
            group.start_soon(_follow_records, made)
            yield made
            group.cancel_scope.cancel()


def _config() -> Config:
    engines = EnginesConfig(
        dtype="bfloat16",
        eager=True,
        max_num_seqs=32,
        extra_args=("--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER),
    )
    return Config(
        model=ModelConfig(
            name=MODEL, tiny=TinyModelConfig(vocab_size=8192), context_tokens=CONTEXT_TOKENS, tool_parser=TOOL_PARSER
        ),
        harness=(AgentLoopConfig(),),
        tasks=(FilingTasksConfig(count=1),),
        engines=engines,
        proxy=ProxyConfig(settle_timeout_s=1.0),
    )


def _build_model(config: Config, folder: Path) -> None:
    """The tiny model with a tokenizer that was trained on what agents read, so that a token is some four characters."""
    assert config.model.tiny is not None
    tokenizer = _tokenizer(config.model.tiny.vocab_size)
    tiny.save(tiny.build(config.model.tiny, tokenizer, CONTEXT_TOKENS), tokenizer, folder)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(sources(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def sources() -> Iterator[str]:
    """Text that every machine has: Python's own library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _child(folder: Path, runtime: Runtime, name: str, argv: list[str]) -> AbstractAsyncContextManager[Child]:
    return start(argv, log=folder / "logs" / f"{name}.log", owner=f"{runtime.run_id}/{name}", name=name)


@asynccontextmanager
async def _broker(runtime: Runtime, config: Config) -> AsyncIterator[Broker]:
    assert await nats_server.answers(runtime.nats_url, READY_S)
    async with Broker.of_run(runtime, config.nats) as broker:
        await broker.setup(STORE_BYTES)
        yield broker


async def _push(url: str, path: Path) -> None:
    num_bytes = await anyio.to_thread.run_sync(lambda: path.stat().st_size)
    weights = WeightVersion(version=VERSION, path=str(path), num_bytes=num_bytes, created_s=time.time())
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        await init_transfer(client, READY_S)
        await apply(client, weights, clear_cache=True, timeout_s=READY_S)


def _python_of(child: Child) -> psutil.Process:
    """The child itself; setpriv, which starts it, is replaced by it."""
    return psutil.Process(child.pid)


async def _until_served(made: World, proxy: Child) -> None:
    """The first rollout is taken when the proxy has its model and an engine."""
    with anyio.fail_after(READY_S):
        while not made.socket.exists():
            if proxy.returncode is not None:
                raise SystemExit(f"the proxy ended with {proxy.returncode}; see logs/proxy.log in the --keep folder")
            await anyio.sleep(0.1)
        await (await open_rollout(made, "first")).close()


async def _follow_records(made: World) -> None:
    async for entry in made.broker.records():
        if isinstance(entry.record, CallRecord):
            made.records[entry.record.call_id] = entry.record
