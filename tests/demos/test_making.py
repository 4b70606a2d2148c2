"""`clawpipe demos`, and where a model's demonstrations lie."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clawpipe.pipeline import demos, models
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    ModelConfig,
    OpenClawConfig,
)
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.runtime import Runtime

ROW = {
    "harness": "h",
    "rollouts": 6,
    "tried_again": 2,
    "calls": {"main": 14, "nudge": 1},
    "mean_reward": 1.0,
    "mean_reward_flawed": None,
}


class Roles:
    """Notes what is run; the role `demos` writes what the real one writes."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.run_dirs: list[str] = []

    def of(self, role: str) -> Callable[[Config, Runtime], None]:
        def main(config: Config, runtime: Runtime) -> None:
            self.run.append(role)
            self.run_dirs.append(runtime.run_dir)
            if role == "demos":
                target = Path(runtime.demos_path)
                target.write_text("{}\n")
                target.with_suffix(models.SUMMARY_SUFFIX).write_text(json.dumps([ROW]))

        return main


def test_the_roles_run_in_order_and_the_table_says_what_was_recorded(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    roles = Roles()
    target = demos.make(make_config(AgentLoopConfig()), tmp_path / "out.jsonl", roles.of)
    assert roles.run == ["demos"]
    assert target == tmp_path / "out.jsonl"
    assert list(demos.table(target)) == [
        "harness          rollouts again  reward  flawed  calls by role",
        "h                       6     2    1.00       -  main 14, nudge 1",
    ]


def test_a_harness_that_is_not_installed_is_said_before_anything_runs(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    roles = Roles()
    with pytest.raises(ConfigError, match=r"clawpipe harness install openclaw"):
        demos.make(make_config(OpenClawConfig()), tmp_path / "out.jsonl", roles.of)
    assert roles.run == []


def test_a_model_of_ones_own_needs_a_place_for_the_file(make_config: Any, tmp_path: Path) -> None:
    config = msgspec.structs.replace(make_config(AgentLoopConfig()), model=ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="say --out FILE"):
        demos.make(config, None, Roles().of)


def test_a_place_that_takes_no_file_is_said_before_anything_runs(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    (tmp_path / "file").touch()
    roles = Roles()
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        demos.make(make_config(AgentLoopConfig()), tmp_path, roles.of)
    with pytest.raises(ConfigError, match="cannot be written"):
        demos.make(make_config(AgentLoopConfig()), tmp_path / "file" / "out.jsonl", roles.of)
    assert roles.run == []


def test_everything_that_is_made_beside_the_file_is_named_after_it(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path / "cache"))
    roles = Roles()
    target = demos.make(make_config(AgentLoopConfig()), tmp_path / "out.jsonl", roles.of)
    assert roles.run_dirs == [str(tmp_path / "out.run")]
    assert models.syllables_dir(target) == tmp_path / "out.syllables"


def test_without_recordings_there_is_no_table(tmp_path: Path) -> None:
    assert list(demos.table(tmp_path / "demos.jsonl")) == []


def test_the_tokenizer_for_recordings_is_made_only_where_something_is_recorded(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    loop, mixed = make_config(AgentLoopConfig()), make_config(AgentLoopConfig(), OpenClawConfig())
    assert models.model_folders(loop).missing() == ("demos", "model")
    assert models.model_folders(mixed).missing() == ("syllables", "demos", "model")
    written = models.model_folders(mixed).demos
    assert written is not None
    written.parent.mkdir(parents=True)
    written.touch()
    assert models.model_folders(mixed).missing() == ("model",)


@pytest.mark.parametrize(
    ("model", "message"),
    [("[model.tiny]", "run `clawpipe harness install openclaw`"), ("[model]\npath = '/model'", "say --out FILE")],
)
def test_the_command_refuses_in_one_line(tmp_path: Path, model: str, message: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"{model}\n[[harness]]\nkind = 'openclaw'\n[[tasks]]\nkind = 'filing'\n")
    done = subprocess.run(
        [sysconfig.get_path("scripts") + "/clawpipe", "demos", str(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "CLAWPIPE_CACHE": str(tmp_path / "cache")},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert message in line


def test_a_models_key_follows_what_recordings_depend_on(make_config: Any) -> None:
    def key(*harness: Any, **model: Any) -> str:
        config = make_config(*harness)
        return models.model_key(msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **model)))

    loop, claw = AgentLoopConfig(), OpenClawConfig()
    assert key(claw) != key(OpenClawConfig(version="2026.9.5"))
    assert key(claw) != key(claw, context_tokens=32768)  # what a harness says depends on its window
    assert key(loop) == key(loop, context_tokens=32768)
