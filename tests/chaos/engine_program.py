"""An engine that needs no model: it answers what the proxy asks of vLLM, in two turns, and writes down what it said.

    engine_program.py RUN_DIR PORT

Its first turn does what the filing task asks, or nearly; its second turn ends the work. No two answers are alike, so
that whatever was put together from two attempts at a rollout shows. Every answer is a line of <run_dir>/answers.jsonl
before the proxy gets it: {"request_id", "prompt", "ids"}.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import anyio
from aiohttp import web
from tokenizers import Tokenizer

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.records import EngineState, PushReport

NAME = "scripted"
TURN = "<|im_start|>assistant\n"
END_OF_TURN = "<|im_end|>"
SHORTEST_S, LONGEST_S = 0.02, 0.15  # of an answer
WRITE = re.compile(r'Write the text "([^"]*)" to the file "([^"]*)"')
COPY = re.compile(r'Copy the line "([^"]*)" of "([^"]*)" to the file "([^"]*)"')


class Engine:
    """What is sampled, under the newest version that the learner has announced."""

    def __init__(self, tokenizer: Tokenizer, answers: TextIO) -> None:
        self._tokenizer = tokenizer
        end_id = tokenizer.token_to_id(END_OF_TURN)
        assert end_id is not None
        self._end_id = end_id
        self._answers = answers
        self._dice = random.Random()
        self.version = 0

    async def generate(self, request: web.Request) -> web.Response:
        """POST /inference/v1/generate."""
        asked = await request.json()
        await anyio.sleep(self._dice.uniform(SHORTEST_S, LONGEST_S))
        text = self._turn(self._tokenizer.decode(asked["token_ids"], skip_special_tokens=False))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end_id]
        assert len(ids) <= asked["sampling_params"]["max_tokens"]
        answer = {"request_id": asked["request_id"], "prompt": asked["token_ids"], "ids": ids}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
        return web.json_response({"choices": [self._choice(ids)]})

    async def abort(self, request: web.Request) -> web.Response:
        """POST /inference/v1/abort_requests: every answer is nearly there."""
        return web.json_response({})

    def _turn(self, prompt: str) -> str:
        word = f"{self._dice.getrandbits(40):010x}"
        if prompt.count(TURN) > 1:
            return f"{word}\n" + call("finish", {})
        flaw = self._dice.choice(("", f" {word}"))
        if found := WRITE.search(prompt):
            text, path = found.groups()
            return f"{word}\n" + call("write_file", {"path": path, "content": text + flaw})
        found = COPY.search(prompt)
        assert found is not None, prompt
        key, source, path = found.groups()
        folder = path.rpartition("/")[0]
        command = f"mkdir -p {folder} && grep '^{key}=' {source} > '{path}{flaw}'"
        return f"{word}\n" + call("run_command", {"command": command})

    def _choice(self, ids: list[int]) -> dict[str, Any]:
        content = [{"token_id": each, "logprob": -self._dice.random()} for each in ids]
        span = {"version": str(self.version), "start": 0, "end": len(ids)}
        return {
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": content},
            "weight_versions": [span],
        }


def call(name: str, arguments: dict[str, str]) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def follow(engine: Engine, broker: Broker, url: str) -> None:
    """Takes every version that the learner announces, as a push would bring it."""
    async for weights in broker.weights():
        engine.version = weights.version
        now_s = time.time()
        state = EngineState(name=NAME, url=url, version=weights.version, healthy=True, since_s=now_s)
        await broker.set_engine(state)
        await broker.report_push(PushReport(engine=NAME, version=weights.version, pause_s=0.001, applied_s=now_s))


async def main(run_dir: Path, port: int) -> None:
    config, runtime = configuration.restore(run_dir / "config.json"), runtimes.load(run_dir)
    tokenizer = Tokenizer.from_file(str(Path(runtime.init_model_dir, "tokenizer.json")))
    with (run_dir / "answers.jsonl").open("a") as answers:
        engine = Engine(tokenizer, answers)
        await serve(engine, port)
        async with Broker.of_run(runtime, config.nats) as broker:
            await follow(engine, broker, f"http://127.0.0.1:{port}")


async def serve(engine: Engine, port: int) -> None:
    """From now on, until the process ends."""
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_post("/inference/v1/abort_requests", engine.abort)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", port).start()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
