"""Starting one vLLM server: what a failure says."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import pytest

from clawpipe.actors.engines.server import ServerSettings, command, environment, last_error, running
from clawpipe.pipeline.config import EnginesConfig
from clawpipe.pipeline.errors import EngineError
from clawpipe.pipeline.processes import free_port, owned


def settings(model_dir: Path | str, port: int, context_tokens: int = 2048) -> ServerSettings:
    return ServerSettings(
        name="vllm-3",
        url=f"http://127.0.0.1:{port}",
        model_dir=str(model_dir),
        model_name="policy",
        context_tokens=context_tokens,
        config=EnginesConfig(dtype="float32", eager=True, start_timeout_s=300, extra_args=("--block-size", "32")),
        seed=5,
    )


def start(server: ServerSettings, run_dir: Path, owner: str) -> None:
    async def run() -> None:
        async with running(server, run_dir, owner):
            raise AssertionError("it came up")

    anyio.run(run)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"vllm-3: port {port} is in use; .*\[engines\] port"):
            start(settings("anywhere", port), tmp_path, "test-port")


@pytest.mark.engine
@pytest.mark.slow
def test_a_failed_start_says_why_and_leaves_nothing_running(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = settings(tiny_model_dir, free_port(), context_tokens=1_000_000)
    with pytest.raises(EngineError) as caught:
        start(server, tmp_path, "test-failed-start")
    message = str(caught.value)
    assert message.startswith(f"vllm-3 at {server.url}: vLLM ended with code 1 while starting: ")
    assert "max_model_len (1000000) is greater than" in message
    assert message.endswith(f"(see {tmp_path}/logs/vllm-3.log)")
    assert owned("test-failed-start") == []


def test_the_root_cause_is_found_behind_its_consequences() -> None:
    log = """\
(EngineCore pid=12) ERROR 11-29 15:03:29 [core.py:1100] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-29 15:03:29 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 15:03:29 [core.py:1100]   File "x.py", line 3, in check
(EngineCore pid=12) ERROR 11-29 15:03:29 [core.py:1100] ValueError: To serve one request, 4 GiB of cache are needed
(APIServer pid=11)   File "utils.py", line 1, in wait
(APIServer pid=11)     raise RuntimeError(
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    assert last_error(log) == "ValueError: To serve one request, 4 GiB of cache are needed"


def test_a_log_without_an_error_gives_its_last_line() -> None:
    assert last_error("INFO: one\n\nINFO: two\n\n") == "INFO: two"
    assert last_error("") == "no output"


def test_sampling_defaults_of_the_model_are_off_and_the_users_arguments_come_last() -> None:
    words = command(settings("/models/x", 8001))
    assert words[words.index("--generation-config") + 1] == "vllm"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "8001"
    assert words[-2:] == ["--block-size", "32"]


def test_threads_are_the_configured_ones() -> None:
    assert environment(EnginesConfig(threads=3))["OMP_NUM_THREADS"] == "3"
