"""One vLLM server as a child process: its command line, its environment, its start and its end.

vLLM is three kinds of process: the API server, which is our child, its EngineCore, and workers. Killing the
first leaves the others running, so the end is always the end of the whole session, and of everything that carries
this server's mark.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx

from clawpipe.actors.engines.plugin import BACKEND
from clawpipe.pipeline.config import EnginesConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.observe import Progress
from clawpipe.pipeline.processes import Child, port_is_free, start, sweep

READY_POLL_S = 0.2
ERROR_CHARS = 400
CONSEQUENCE = "Engine core initialization failed"

# What vLLM's log says on its way up, and which part of the start is behind it then (measured on two cores).
MILESTONES = (
    ("Resolved architecture", 0.35),
    ("Initializing a V1 LLM engine", 0.65),
    ("Starting to load model", 0.75),
    ("Creating weight transfer engine", 0.8),
    ("init engine (", 0.95),
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one server is started with."""

    name: str
    url: str  # http://127.0.0.1:<port>
    model_dir: str  # Hugging Face folder
    model_name: str  # as clients say it
    context_tokens: int
    config: EnginesConfig
    seed: int


@asynccontextmanager
async def running(settings: ServerSettings, run_dir: Path, owner: str) -> AsyncIterator[Child]:
    """Starts the server and waits until it answers; ends the whole tree with the block.

    EngineError when the port is taken, the server dies while it starts, or does not answer in time.
    """
    log = run_dir / "logs" / f"{settings.name}.log"
    await anyio.to_thread.run_sync(sweep, owner, log)
    check_port(settings)
    offset = log.stat().st_size if log.exists() else 0
    try:
        async with start(
            command(settings), log=log, owner=owner, name=settings.name, env=environment(settings.config)
        ) as child:
            await _wait_ready(child, settings, log, offset, run_dir)
            yield child
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(sweep, owner, log)


def check_port(settings: ServerSettings) -> None:
    """EngineError when somebody listens on the server's port already."""
    port = urlsplit(settings.url).port or 80
    if not port_is_free(port):
        raise EngineError(
            f"{settings.name}: port {port} is in use; end what listens there, or set another [engines] port "
            "(0: a free one)"
        )


def command(settings: ServerSettings) -> list[str]:
    """The command line. Sampling defaults of the model folder are off: sampling is the configuration's."""
    address = urlsplit(settings.url)
    config = settings.config
    options = {
        "--model": settings.model_dir,
        "--served-model-name": settings.model_name,
        "--host": address.hostname or "127.0.0.1",
        "--port": address.port or 80,
        "--dtype": config.dtype,
        "--max-model-len": settings.context_tokens,
        "--max-num-seqs": config.max_num_seqs,
        "--seed": settings.seed,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--uvicorn-log-level": "warning",
    }
    switches = ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-log-stats"]
    if config.eager:
        switches.append("--enforce-eager")
    # -P: the current folder must not come before the installed packages.
    server = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, *(str(word) for pair in options.items() for word in pair), *switches, *config.extra_args]


def environment(config: EnginesConfig) -> dict[str, str]:
    """What vLLM reads from its environment."""
    shared = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that take weights
        "OMP_NUM_THREADS": str(config.threads),
    }
    if not _is_cpu_build():
        return shared
    return {
        **shared,
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins every engine to the same cores
        # One process for EngineCore and worker: without it each step crosses shared memory, which costs a third
        # more CPU time per token, a process' memory, and a third import of vLLM at the start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def last_error(log: str) -> str:
    """The line of a vLLM log that says best why it ended: the last error that is not a mere consequence."""
    lines = [re.sub(r"^(\(.*?pid=\d+\)\s*)?(ERROR [^\]]*\]\s*)?", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    errors = [
        " ".join(lines[index : index + 2]) if line.endswith("Config") else line
        for index, line in enumerate(lines)
        if re.search(r"(^|\s)[\w.]*(Error|Exception|error): \S", line) and CONSEQUENCE not in line
    ]
    return (errors or lines or ["no output"])[-1][:ERROR_CHARS]


async def _wait_ready(child: Child, settings: ServerSettings, log: Path, offset: int, run_dir: Path) -> None:
    progress = Progress(run_dir, settings.name, "engine start", total=1.0)
    limit_s = settings.config.start_timeout_s
    with anyio.move_on_after(limit_s):
        async with httpx.AsyncClient(base_url=settings.url, trust_env=False) as client:
            while not await _answers(client):
                text = await anyio.to_thread.run_sync(_read, log, offset)
                if child.returncode is not None:
                    raise EngineError(_start_failure(settings, f"ended with {_code(child.returncode)}", text, log))
                progress.at(max((done for mark, done in MILESTONES if mark in text), default=0.05))
                await anyio.sleep(READY_POLL_S)
        progress.finish()
        return
    text = await anyio.to_thread.run_sync(_read, log, offset)
    raise EngineError(
        _start_failure(settings, f"did not answer within [engines] start_timeout_s = {limit_s:.0f}", text, log)
    )


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


def _start_failure(settings: ServerSettings, what: str, text: str, log: Path) -> str:
    return f"{settings.name} at {settings.url}: vLLM {what} while starting: {last_error(text)} (see {log})"


def _code(code: int) -> str:
    return f"signal {-code}" + (" (out of memory?)" if code == -9 else "") if code < 0 else f"code {code}"


def _read(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
