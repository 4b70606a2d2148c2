"""What cannot run is said in one line before anything starts: exit code 2, nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes

CLAWPIPE = Path(sysconfig.get_path("scripts"), "clawpipe")
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
ROW = {
    "prompt": "Write a.txt.",
    "hook_code": "python3 reward/check.py /root/.openclaw/workspace",
    "input_files": [{"file_path": "reward/check.py", "content": "print('{}')"}],
    "rule": None,
    "origin_template": "---\nid: one\n---",
}


def up(tmp_path: Path, *arguments: str, config: Path = QUICKSTART) -> subprocess.CompletedProcess[str]:
    command = [str(CLAWPIPE), "up", str(config), "--run-dir", str(tmp_path / "run"), *arguments]
    environment = {**os.environ, "CLAWPIPE_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert not (tmp_path / "run" / "logs").exists(), "something was started"
    return result


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for part in ("clawpipe: ", *parts):
        assert part in lines[0]


def clawgym(tmp_path: Path, row: dict) -> tuple[str, ...]:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = tmp_path / "c.toml"
    config.write_text(f"[model.tiny]\n[[harness]]\nkind = 'agentloop'\n[[tasks]]\nkind = 'clawgym'\npath = '{path}'\n")
    return str(config), str(path)


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("learner.learning_rate=1", ("quickstart.toml", "unknown key `learning_rate` in learner", "remove it")),
        ("schedule.group_size=many", ("quickstart.toml", "schedule.group_size", "expected `int`, got `str`")),
        ("push.dir=/nowhere/at/all", ("[push] dir = /nowhere/at/all", "no such folder")),
    ],
)
def test_a_wrong_key_value_or_folder_is_refused(tmp_path, assignment, parts):
    assert_refused(up(tmp_path, "--set", assignment), *parts)


def test_a_missing_configuration_is_refused(tmp_path):
    assert_refused(up(tmp_path, config=tmp_path / "none.toml"), "none.toml", "cannot be read", "check the path")


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_refused(
            up(tmp_path, "--set", f"nats.port={port}"), f"[nats] port: port {port} is in use", "choose another"
        )
        assert_refused(up(tmp_path, "--set", f"engines.port={port}"), f"[engines] port: port {port} is in use")


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    shape = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 65536,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    config = tmp_path / "c.toml"
    config.write_text(f"[model]\npath = '{folder}'\n[[harness]]\nkind = 'agentloop'\n[[tasks]]\nkind = 'filing'\n")
    assert_refused(up(tmp_path, config=config), str(folder), "tokenizer.json is missing", "complete Hugging Face")


def test_a_task_row_without_a_verifier_is_refused(tmp_path):
    config, path = clawgym(tmp_path, {**ROW, "input_files": []})
    assert_refused(up(tmp_path, config=Path(config)), path, "reward/")


def test_a_run_folder_that_holds_a_run_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "runtime.json").write_text("{}")
    assert_refused(up(tmp_path), str(folder), "holds a run already", "--resume")


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "run").touch()
    assert_refused(up(tmp_path), str(tmp_path / "run"), "cannot be made", "--run-dir")


def test_a_summary_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    assert_refused(up(tmp_path, "--summary", str(tmp_path / "none" / "s.json")), "none/s.json", "make its folder")
    assert_refused(up(tmp_path, "--summary", str(tmp_path)), str(tmp_path), "name a file")


def test_a_broken_status_file_is_one_line(tmp_path):
    (tmp_path / "runtime.json").write_text('{"run_id": "x", "run_dir": "y"}')
    (tmp_path / "status.json").write_text("{broken")
    command = [str(CLAWPIPE), "status", "--json", "--run-dir", str(tmp_path)]
    assert_refused(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False), "status.json")


def test_check_says_every_problem(tmp_path):
    command = [str(CLAWPIPE), "check", str(QUICKSTART), "--set", "push.dir=/nowhere", "--set", "engines.port=1"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command += ["--set", f"nats.port={taken.getsockname()[1]}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "[push] dir" in result.stderr
    assert "[nats] port" in result.stderr
    assert len(result.stderr.splitlines()) >= 2


def test_a_run_is_not_resumed_with_another_model(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    loaded = configuration.load(QUICKSTART)
    (folder / "config.json").write_bytes(configuration.dump(loaded))
    runtimes.save(runtimes.Runtime(run_id="cp-test", run_dir=str(folder)))
    refused = up(tmp_path, "--resume", "--set", "model.tiny.hidden_size=32")
    assert_refused(refused, str(folder), "[model] is not what this run trains")
    assert (folder / "config.json").read_bytes() == configuration.dump(loaded)


def test_a_run_that_has_ended_cannot_be_drained(tmp_path):
    (tmp_path / "config.json").write_bytes(configuration.dump(configuration.load(QUICKSTART)))
    runtimes.save(runtimes.Runtime(run_id="cp-test", run_dir=str(tmp_path), nats_url="nats://127.0.0.1:1"))
    command = [str(CLAWPIPE), "drain", "--run-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "no run is going on here" in result.stderr
