"""The generated task family, and its grader on workspaces made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from clawpipe.actors.tasks import filing
from clawpipe.actors.tasks.load import load_tasks
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import FilingTasksConfig
from clawpipe.pipeline.errors import TaskError


def lay_out(task: Task, folder: Path) -> tuple[Path, Path]:
    """The workspace as the agent gets it, and the grader's folder."""
    for name, files in (("work", task.files), ("grader", task.grader)):
        for path, content in files.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return folder / "work", folder / "grader"


def checks_of(grader: Path, workspace: Path) -> dict[str, bool]:
    argv = [sys.executable, "-I", str(grader / "check.py"), str(workspace)]
    verdict: dict[str, bool] = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return verdict


def expected_of(task: Task) -> tuple[str, str]:
    expected = json.loads(task.grader["expected.json"])
    return expected["path"], expected["content"]


def put(workspace: Path, path: str, text: str) -> None:
    (workspace / path).parent.mkdir(parents=True, exist_ok=True)
    (workspace / path).write_text(text)


Change = Callable[[Path, str, str], None]


def right(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text)


def right_with_line_end(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text + "\n")


def untouched(workspace: Path, path: str, text: str) -> None:
    pass


def without_folder(workspace: Path, path: str, text: str) -> None:
    put(workspace, path.split("/")[1], text)


def wrong_text(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text + "x")


def one_file_too_many(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text)
    put(workspace, "extra.txt", "")


def input_changed(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text)
    for file in workspace.glob("*.txt"):
        file.write_text("changed")


def input_deleted(workspace: Path, path: str, text: str) -> None:
    put(workspace, path, text)
    for file in workspace.glob("*.txt"):
        file.unlink()


def folder_in_its_place(workspace: Path, path: str, text: str) -> None:
    (workspace / path).mkdir(parents=True)


def link_in_its_place(workspace: Path, path: str, text: str) -> None:
    (workspace / path).parent.mkdir(parents=True)
    (workspace / path).symlink_to("../settings.txt")


def bytes_in_its_place(workspace: Path, path: str, text: str) -> None:
    (workspace / path).parent.mkdir(parents=True)
    (workspace / path).write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("change", "exists", "name", "content", "clean"),
    [
        (untouched, 0, 0, 0, 0),
        (right, 1, 1, 1, 1),
        (right_with_line_end, 1, 1, 1, 1),
        (without_folder, 1, 0, 0, 0),
        (wrong_text, 1, 1, 0, 1),
        (one_file_too_many, 1, 1, 1, 0),
        (input_changed, 1, 1, 1, 0),
        (input_deleted, 1, 1, 1, 0),
        (folder_in_its_place, 0, 0, 0, 0),
        (link_in_its_place, 1, 1, 0, 1),
        (bytes_in_its_place, 1, 1, 0, 1),
    ],
)
@pytest.mark.parametrize("kind", ["Write", "Copy"])
def test_each_check_answers_for_its_own(
    tmp_path: Path, change: Change, exists: int, name: int, content: int, clean: int, kind: str
) -> None:
    tasks = load_tasks([FilingTasksConfig(count=20)])
    task = next(task for task in tasks.values() if task.prompt.startswith(kind))
    workspace, grader = lay_out(task, tmp_path)
    change(workspace, *expected_of(task))
    wanted = {"exists": bool(exists), "name": bool(name), "content": bool(content), "clean": bool(clean)}
    assert checks_of(grader, workspace) == wanted


def test_prompts_quote_what_must_be_copied() -> None:
    kinds: Counter[str] = Counter()
    for task in load_tasks([FilingTasksConfig(count=400)]).values():
        path, content = expected_of(task)
        if task.prompt.startswith("Write"):
            kinds["write"] += 1
            assert task.prompt == f'Write the text "{content}" to the file "{path}".'
        else:
            kinds["copy"] += 1
            key = content.split("=")[0]
            assert task.prompt == f'Copy the line "{key}" of "settings.txt" to the file "{path}".'
            lines = task.files["settings.txt"].decode().split("\n")
            assert (len(lines), lines.count(content)) == (3, 1)
            assert sum(line.startswith(key + "=") for line in lines) == 1
    assert 150 < kinds["write"] < 250


def test_the_seed_decides_the_tasks() -> None:
    one, same, other = (load_tasks([FilingTasksConfig(count=50, seed=seed)]) for seed in (1, 1, 2))
    assert one == same
    assert [t.prompt for t in one.values()] != [t.prompt for t in other.values()]
    fewer = load_tasks([FilingTasksConfig(count=20, seed=1)])
    assert list(fewer.values()) == list(one.values())[:20]


def test_settings_widen_and_narrow_the_family() -> None:
    found = filing.errands(FilingTasksConfig(folders=2, stems=3, rows=5), Random(0), 300)
    paths, rows = set(), set()
    for errand in found:
        paths.add(errand.path)
        if errand.reads:
            rows.add(len(errand.files[errand.reads].split("\n")))
    assert len(paths) == 6
    assert rows == {5}


def test_a_family_larger_than_its_words_is_refused() -> None:
    with pytest.raises(TaskError, match="stems = 99 is over 28; lower it"):
        load_tasks([FilingTasksConfig(stems=99)])


def test_words_are_distinct() -> None:
    for words in (filing.WORDS, filing.STEMS, filing.FOLDERS, filing.KEYS):
        assert len(set(words)) == len(words)
    assert len(filing.WORDS) >= 100
