"""What cannot run is said in one line before anything starts: exit code 2, nothing left running."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.audit import audit
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import LedgerFile
from clawpipe.pipeline.records import RolloutRequest
from clawpipe.pipeline.replay_command import replay

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


def clawpipe(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(CLAWPIPE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a run that has just begun has, except its ledger and its records."""
    (tmp_path / "config.json").write_bytes(configuration.dump(configuration.load(QUICKSTART)))
    runtimes.save(runtimes.Runtime(run_id="cp-test", run_dir=str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("command", ["ledger", "replay"])
def test_a_folder_that_does_not_exist_has_no_ledger(tmp_path, command):
    assert_refused(clawpipe(command, tmp_path / "none"), str(tmp_path / "none"), "there is no such folder")


def test_a_ledger_that_balances_ends_with_code_0_and_one_that_does_not_with_1(run_folder):
    file = LedgerFile(run_folder / "ledger.sqlite")
    ledger = Ledger()
    ledger.requested(RolloutRequest(rollout_id="r-000000-0", group_id="g-000000", task_id="t", harness="h"))
    file.write(ledger.changes())
    found = clawpipe("ledger", run_folder)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, "the books balance")
    ledger.rows["r-000000-0"].sampled = 3
    ledger.requested(RolloutRequest(rollout_id="r-000000-0", group_id="g-000000", task_id="t", harness="h"))
    file.write(ledger.changes())
    file.close()
    found = clawpipe("ledger", run_folder, "--json")
    assert (found.returncode, json.loads(found.stdout)["rollout"]) == (1, "r-000000-0")


TOOLS = {"ledger": partial(audit, goes_on=False), "replay": partial(replay, goes_on=False)}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Callable[..., object]:
    """The command without the start of a process: its errors are what `main` prints."""
    return TOOLS[request.param]


def test_a_folder_that_holds_no_run_has_no_ledger(tmp_path, tool):
    with pytest.raises(ClawpipeError, match=re.escape(str(tmp_path))):
        tool(tmp_path)


def test_a_run_that_has_not_begun_has_no_ledger(run_folder, tool):
    with pytest.raises(ClawpipeError, match=r"ledger.sqlite: there is no ledger; give the folder of a run"):
        tool(run_folder)


def test_a_ledger_that_is_none_is_refused(run_folder, tool):
    (run_folder / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ClawpipeError, match=r"ledger.sqlite: not a ledger that can be read \(file is not a database\)"):
        tool(run_folder)


def test_a_ledger_of_an_older_version_is_refused(run_folder, tool):
    with closing(sqlite3.connect(run_folder / "ledger.sqlite")) as db:
        db.execute("CREATE TABLE rollouts (rollout_id TEXT PRIMARY KEY, row BLOB)")
    with pytest.raises(ClawpipeError, match=r"ledger.sqlite: was written by another version of clawpipe"):
        tool(run_folder)


def test_a_summary_that_is_none_is_refused(run_folder):
    LedgerFile(run_folder / "ledger.sqlite").close()
    (run_folder / "summary.json").write_text("{broken")
    with pytest.raises(ClawpipeError, match=r"summary.json: not the summary of a run"):
        audit(run_folder, goes_on=False)


def test_a_run_without_stored_records_is_not_replayed(run_folder):
    LedgerFile(run_folder / "ledger.sqlite").close()
    with pytest.raises(ClawpipeError, match="the run has no stored records"):
        replay(run_folder, goes_on=False)


def test_bodies_are_not_written_where_no_folder_can_be(run_folder):
    LedgerFile(run_folder / "ledger.sqlite").close()
    (run_folder / "taken").touch()
    with pytest.raises(ClawpipeError, match=r"--batches .*taken: cannot be made"):
        replay(run_folder, goes_on=False, batches_dir=run_folder / "taken")


def test_the_command_line_starts_without_torch():
    load = "import sys, typer; from clawpipe.pipeline import cli; cli.add_commands(typer.Typer())"
    script = f"{load}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("False\n", "")
