"""docs/data_path.md and the README of the room name what there is: nothing is made up and nothing missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from clawpipe.pipeline.config import NatsConfig, ReplayConfig, ScheduleConfig
from clawpipe.pipeline.records import Flaw
from clawpipe.pipeline.segments import DropReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data_path.md").read_text()
TABLES = {"nats": NatsConfig, "replay": ReplayConfig, "schedule": ScheduleConfig}


def section(title):
    """The text under a heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text):
    """The code words in the first column of a section's table."""
    return [word for line in text.splitlines() if line.startswith("| `") for word in ticked(line.split("|")[1])]


def ticked(text):
    return re.findall(r"`([^`]+)`", text)


def test_every_flaw_is_explained():
    assert sorted(first_cells(section("Records that are set aside"))) == sorted(Flaw)


def test_every_reason_is_explained():
    learners_own = {"nonfinite_gradient", "decoupled_mask", "icepop_band", "geometric_mask", "veto", "tv"}
    assert set(first_cells(section("Why a sampled token is not trained"))) == {*DropReason, *learners_own}


def options():
    """(table, key, default as it is written, if it is) of the table of options."""
    for line in section("Options").splitlines():
        if line.startswith("| `["):
            _, keys, default, *_ = line.split("|")
            table = re.search(r"\[(\w+)\]", keys)[1]
            for key in ticked(keys):
                yield table, key.removeprefix(f"[{table}] "), "".join(ticked(default))


def test_the_options_exist_with_these_defaults():
    for table, key, default in options():
        value = getattr(TABLES[table](), key)
        assert not default or tomllib.loads(f"x = {default}")["x"] == value


def test_every_option_of_the_replay_queue_is_explained():
    assert {key for table, key, _ in options() if table == "replay"} == set(ReplayConfig.__struct_fields__)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+/test_\w+)`", PAGE))))
def test_the_tests_that_it_names_exist(name):
    assert (ROOT / "tests" / f"{name}.py").is_file()


def test_the_readme_names_every_module_of_the_room():
    readme = (ROOT / "pipeline" / "README.md").read_text()
    modules = {path.stem for path in (ROOT / "pipeline" / "clawpipe" / "pipeline").glob("*.py")} - {"__init__"}
    assert {word for word in ticked(readme) if re.fullmatch(r"\w+", word)} - {"pipeline"} == modules
