"""The load of the proxy's benchmark: conversations as harnesses hold them, and a bare HTTP client that costs little."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import anyio.abc
import numpy as np
from proxy_setup import MODEL, VERSION, Rollout, World, sources

GENERATE = "/inference/v1/generate"
STALE_S = 3.0  # vLLM closes a connection that was idle for 5 s
NUM_TOOLS = 12


class Dialect(Protocol):
    """One of the protocols in which a harness asks."""

    path: str

    def body(self, talk: Talk, max_tokens: int, stream: bool) -> bytes:
        """The request."""
        ...

    def said(self, answer: bytes, stream: bool) -> str:
        """The text of the answer."""
        ...


@dataclass
class Talk:
    """A conversation in no protocol's form."""

    system: str
    tools: list[dict[str, Any]]  # name, description, parameters
    turns: list[str]  # user, assistant, user, ...


class Chat:
    """OpenAI Chat Completions."""

    path = "/v1/chat/completions"

    def body(self, talk: Talk, max_tokens: int, stream: bool) -> bytes:
        said = [{"role": role, "content": text} for role, text in _roles(talk)]
        tools = [{"type": "function", "function": tool} for tool in talk.tools]
        messages = [{"role": "system", "content": talk.system}, *said]
        return _json(model=MODEL, messages=messages, tools=tools, max_tokens=max_tokens, stream=stream, temperature=1.0)

    def said(self, answer: bytes, stream: bool) -> str:
        if not stream:
            return str(json.loads(answer)["choices"][0]["message"]["content"] or "")
        deltas = [choice["delta"] for event in _events(answer) for choice in event["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


class Messages:
    """Anthropic Messages."""

    path = "/v1/messages"

    def body(self, talk: Talk, max_tokens: int, stream: bool) -> bytes:
        said = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in _roles(talk)]
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in talk.tools
        ]
        system = [{"type": "text", "text": talk.system}]
        return _json(
            model=MODEL,
            system=system,
            messages=said,
            tools=tools,
            max_tokens=max_tokens,
            stream=stream,
            temperature=1.0,
        )

    def said(self, answer: bytes, stream: bool) -> str:
        if not stream:
            return "".join(block.get("text", "") for block in json.loads(answer)["content"])
        deltas = [event["delta"] for event in _events(answer) if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas)


class Responses:
    """OpenAI Responses."""

    path = "/v1/responses"

    def body(self, talk: Talk, max_tokens: int, stream: bool) -> bytes:
        kinds = {"user": "input_text", "assistant": "output_text"}
        said = [
            {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]}
            for role, text in _roles(talk)
        ]
        tools = [{"type": "function", "strict": False, **tool} for tool in talk.tools]
        return _json(
            model=MODEL,
            instructions=talk.system,
            input=said,
            tools=tools,
            max_output_tokens=max_tokens,
            stream=stream,
            store=False,
            temperature=1.0,
        )

    def said(self, answer: bytes, stream: bool) -> str:
        if not stream:
            items = [item for item in json.loads(answer)["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in items for part in item["content"])
        return "".join(event["delta"] for event in _events(answer) if event["type"] == "response.output_text.delta")


DIALECTS: dict[str, Dialect] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}


def _roles(talk: Talk) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(talk.turns):
        yield ("assistant" if number % 2 else "user"), text


def _json(**body: Any) -> bytes:
    return json.dumps(body).encode()


def _events(answer: bytes) -> Iterator[dict[str, Any]]:
    for line in answer.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


class Wire:
    """One kept connection to one server; `post` gives the body of the answer, whatever its status."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stream: anyio.abc.SocketStream | None = None
        self._used_s = 0.0

    async def ready(self) -> None:
        """Connects, where the server may have closed what there was."""
        if self._stream is not None and time.monotonic() - self._used_s > STALE_S:
            await self.close()
        if self._stream is None:
            self._stream = await anyio.connect_tcp("127.0.0.1", self._port)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, the answer's body)."""
        await self.ready()
        assert self._stream is not None
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await self._stream.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        data = bytearray()
        while not _complete(data):
            data += await self._stream.receive()
        self._used_s = time.monotonic()
        return _parsed(bytes(data))

    async def close(self) -> None:
        """Hangs up."""
        if self._stream is not None:
            await self._stream.aclose()
        self._stream = None


def _complete(data: bytearray) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(data[:end]).lower()
    _, found, rest = head.partition(b"content-length:")
    if found:
        return len(data) - end - 4 >= int(rest.split(b"\r\n", 1)[0])
    return data.endswith(b"\r\n0\r\n\r\n")


def _parsed(data: bytes) -> tuple[int, bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if b"chunked" not in head.lower():
        return status, body
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
        if length == 0:
            break
    return status, whole


class Books:
    """Text that an agent might read, cut to a number of tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._text = "\n".join(sources())

    def page(self, seed: int | str, num_tokens: int) -> str:
        """Some `num_tokens` tokens, others for every seed."""
        at = random.Random(seed).randrange(len(self._text) - 8 * num_tokens)
        ids = self.tokenizer.encode(self._text[at : at + 8 * num_tokens], add_special_tokens=False).ids[:num_tokens]
        text: str = self.tokenizer.decode(ids)
        return text

    def opening(self, seed: str, num_tokens: int) -> Talk:
        """A first request of about `num_tokens` tokens: a quarter system, some quarter tools, the rest the task."""
        system = self.page(-1, num_tokens // 4)
        tools = [self._tool(number, num_tokens // 4 // NUM_TOOLS) for number in range(NUM_TOOLS)]
        said = self.tokenizer.encode(system + json.dumps(tools), add_special_tokens=False).ids
        return Talk(system, tools, [self.page(seed, num_tokens - len(said))])

    def _line(self, seed: int, num_tokens: int) -> str:
        return " ".join(self.page(seed, num_tokens).split())

    def _tool(self, number: int, num_tokens: int) -> dict[str, Any]:
        names = ("path", "pattern", "limit")
        properties = {name: {"type": "string", "description": self._line(number, num_tokens // 10)} for name in names}
        parameters = {"type": "object", "properties": properties, "required": ["path"]}
        return {
            "name": f"tool_{number}",
            "description": self._line(100 + number, num_tokens // 2),
            "parameters": parameters,
        }


@dataclass
class Sample:
    """One call of one conversation, made in several ways: seconds by way."""

    took_s: dict[str, float]
    new_tokens: int
    prompt_tokens: int


@dataclass
class Load:
    """What a pass is made of."""

    dialect: Dialect
    max_tokens: int
    stream: bool
    turns: int
    new_tokens: int
    pause_s: float  # mean, before every timed call: engines and cores must not be what is measured
    text_every: int  # turns between two calls of vLLM's own endpoint, which cost the engine most


@dataclass
class Conversation:
    """One harness at work. The engine has seen a prompt before it is timed: every way finds the same warm cache."""

    world: World
    rollout: Rollout
    load: Load
    talk: Talk
    books: Books
    prompt: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_calls: int = 0
    broken: int = 0

    def __post_init__(self) -> None:
        engine = int(self.world.engine_url.rpartition(":")[2])
        self._engine_tokens, self._engine_text, self._proxy = Wire(engine), Wire(engine), Wire(self.rollout.port)
        self._random = random.Random(self.rollout.request.rollout_id)  # every pass reads other pages

    async def open(self) -> None:
        """The first call, through the proxy alone: it fills every cache, and its record says what the prompt is."""
        await self._through_proxy()
        record = await self._record()
        self.prompt = np.frombuffer(record.prompt_delta, np.int32).tolist()

    async def go_on(self) -> None:
        """The later calls: each with tokens and through the proxy, every few also on the engine with text."""
        for turn in range(self.load.turns):
            new = await self._next_prompt(turn)
            body = self.load.dialect.body(self.talk, self.load.max_tokens, self.load.stream)
            ways = [
                ("tokens", self._engine_tokens, GENERATE, self._tokens(self.load.max_tokens)),
                ("proxy", self._proxy, self.load.dialect.path, body),
            ]
            await self._post(self._engine_tokens, GENERATE, self._tokens(1))
            if turn % self.load.text_every == 0:
                await self._post(self._engine_text, self.load.dialect.path, self.load.dialect.body(self.talk, 1, False))
                ways.append(("vllm", self._engine_text, self.load.dialect.path, body))
            self._random.shuffle(ways)
            took = {way: await self._timed(wire, path, body, way) for way, wire, path, body in ways}
            self.samples.append(Sample(took, new, len(self.prompt)))

    async def _timed(self, wire: Wire, path: str, body: bytes, way: str) -> float:
        """Seconds that one call takes, after a pause."""
        await anyio.sleep(self._random.uniform(0, 2 * self.load.pause_s))
        await wire.ready()
        began = time.perf_counter()
        status, answer = await wire.post(path, body)
        took = time.perf_counter() - began
        _check(status, answer)
        if way == "proxy":
            self._heard(answer)
        return took

    async def close(self) -> None:
        """Hangs up and ends the rollout."""
        for wire in (self._engine_tokens, self._engine_text, self._proxy):
            await wire.close()
        await self.rollout.close()

    async def _through_proxy(self) -> None:
        body = self.load.dialect.body(self.talk, self.load.max_tokens, self.load.stream)
        self._heard(await self._post(self._proxy, self.load.dialect.path, body))

    def _heard(self, answer: bytes) -> None:
        self.talk.turns.append(self.load.dialect.said(answer, self.load.stream))
        self.num_calls += 1

    async def _post(self, wire: Wire, path: str, body: bytes) -> bytes:
        status, answer = await wire.post(path, body)
        _check(status, answer)
        return answer

    async def _record(self) -> Any:
        return await self.world.record(self.rollout.call_id(self.num_calls - 1))

    async def _next_prompt(self, turn: int) -> int:
        """The prompt that the proxy is going to send, by the form of the tiny model's template; how much is new."""
        record = await self._record()
        if turn and record.prompt_tokens != len(self.prompt):
            raise SystemExit(f"{record.call_id}: {record.prompt_tokens} tokens, and not {len(self.prompt)} as expected")
        self.broken += record.graft_broken is not None
        completion = np.frombuffer(record.completion_ids, np.int32).tolist()
        page = self.books.page(self._random.getrandbits(32), self.load.new_tokens)
        self.talk.turns.append(page)
        after = f"<|im_end|>\n<|im_start|>user\n{page}<|im_end|>\n<|im_start|>assistant\n"
        ids = self.books.tokenizer.encode(after, add_special_tokens=False).ids
        new = ids[1:] if completion and completion[-1] == ids[0] else ids
        self.prompt += completion + new
        return len(new)

    def _tokens(self, max_tokens: int) -> bytes:
        """What `EngineSampler` sends."""
        sampling = {
            "temperature": 1.0,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
            "max_tokens": max_tokens,
        }
        return _json(token_ids=self.prompt, sampling_params=sampling, cache_salt=str(VERSION), stream=False)


def _check(status: int, answer: bytes) -> None:
    if status != 200:
        raise SystemExit(f"answered with {status}: {answer[:500]!r}")
