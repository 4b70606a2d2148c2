"""ClawGym rows become tasks, the hidden verifier split off; what cannot be used is named with file and row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clawpipe.actors.tasks.load import load_tasks
from clawpipe.actors.tasks.task import McpServer
from clawpipe.pipeline.config import ClawGymTasksConfig, FilingTasksConfig
from clawpipe.pipeline.errors import TaskError

ROWS = Path(os.environ.get("CLAWGYM_ROWS", "no-rows"))  # a folder with train.jsonl and eval.jsonl
HOOK = "python3 reward/test.py /root/.openclaw/workspace"


def row(**changes: Any) -> dict[str, Any]:
    files = [{"file_path": "in/a.txt", "content": "A"}, {"file_path": "reward/test.py", "content": "print()"}]
    made = {"prompt": "Do it.", "hook_code": HOOK, "input_files": files, "origin_template": "---\nid: x/7\n---"}
    return {key: value for key, value in (made | changes).items() if value is not None}


def file(path: str, content: str = "") -> dict[str, str]:
    return {"file_path": path, "content": content}


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def load(path: Path, **settings: Any) -> Any:
    return load_tasks([ClawGymTasksConfig(path=str(path), name="gym", **settings)])


def test_a_row_becomes_a_task_without_its_hidden_files(tmp_path: Path) -> None:
    tasks = load(write(tmp_path, row()))
    task = tasks["gym/x/7"]
    assert (task.task_id, task.prompt) == ("gym/x/7", "Do it.")
    assert dict(task.files) == {"in/a.txt": b"A"}
    assert dict(task.grader) == {"test.py": b"print()"}
    assert task.grader_entry == "test.py"


def test_a_row_brings_its_mcp_servers(tmp_path: Path) -> None:
    servers = [{"name": "desk", "transport": "stdio", "command": "python3", "args": ["desk.py"], "env": {"A": "1"}}]
    tasks = load(write(tmp_path, row(mcp_servers=servers)))
    assert tasks["gym/x/7"].mcp == (McpServer(name="desk", command=("python3", "desk.py"), env={"A": "1"}),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a b"}, r"row 1: expected `str` matching regex .* at `\$\.mcp_servers\[0\]\.name`"),
        ({"transport": "sse"}, r"row 1: invalid enum value 'sse' - at `\$\.mcp_servers\[0\]\.transport`"),
        ({"url": "http://x"}, "row 1: unknown key `url`"),
    ],
)
def test_an_mcp_server_that_cannot_be_started_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load(write(tmp_path, row(mcp_servers=[{"name": "desk", "command": "python3"} | change])))


def test_a_row_without_an_id_is_named_by_its_position(tmp_path: Path) -> None:
    tasks = load(write(tmp_path, row(), row(origin_template=None), row(origin_template=None, task_id="own")))
    assert list(tasks) == ["gym/x/7", "gym/task_00001", "gym/own"]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rule": {"skip_rubric": True}},
        {"rules": [{"name": "r"}], "hook_lang": "bash", "category": "a", "macro_category": "b", "action": ["c"]},
        {"rubrics": [], "validation_mode": "code", "reward_aggregation": "mean"},
    ],
)
def test_every_producers_spelling_is_taken(tmp_path: Path, spelling: dict[str, Any]) -> None:
    assert list(load(write(tmp_path, row(**spelling)))) == ["gym/x/7"]


def test_hidden_files_may_be_listed_on_their_own(tmp_path: Path) -> None:
    listed = row(
        input_files=[file("a.txt") | {"file_format": "txt"}],
        reward_files=[file("reward/test.py", "1"), file("truth.json", "2")],
    )
    task = load(write(tmp_path, listed))["gym/x/7"]
    assert dict(task.files) == {"a.txt": b""}
    assert dict(task.grader) == {"test.py": b"1", "truth.json": b"2"}


def test_paths_are_brought_into_one_form(tmp_path: Path) -> None:
    files = [file("./in//b c.txt"), file("ü.txt", "ü"), file("./reward/./test.py"), file("reward.txt")]
    hook = "python3 -u ./reward/test.py"
    task = load(write(tmp_path, row(input_files=files, hook_code=hook)))["gym/x/7"]
    assert dict(task.files) == {"in/b c.txt": b"", "ü.txt": "ü".encode(), "reward.txt": b""}
    assert list(task.grader) == ["test.py"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row(input_files=[file("a.txt")]), "no verifier"),
        (row(hook_code=None), "no verifier"),
        (row(hook_code="bash reward/reward.sh"), "is not of the form"),
        (row(hook_code="python3 reward/other.py /w"), "runs reward/other.py, which is not among"),
        (row(input_files=[file("../a"), file("reward/test.py")]), "'../a' leads out of the workspace"),
        (row(input_files=[file("a/../../b"), file("reward/test.py")]), "leads out"),
        (row(input_files=[file("reward/../a"), file("reward/test.py")]), "leads out"),
        (row(input_files=[file("/etc/x"), file("reward/test.py")]), "'/etc/x' is absolute"),
        (row(input_files=[file("."), file("reward/test.py")]), "leads out of the workspace or nowhere"),
        (row(input_files=[file("a"), file("./a"), file("reward/test.py")]), "'a' is there twice"),
        (row(input_files=[file("a"), file("a/b"), file("reward/test.py")]), "'a' is a file and the folder of 'a/b'"),
        (row(prompt="  "), "the prompt is empty"),
        (row(rubric=[]), "unknown key `rubric`, remove it"),
        (row(input_files=[{"path": "a", "content": ""}]), "unknown key `path`"),
        (row(input_files=[file("a") | {"content": 5}]), "expected `str`, got `int` - at `$.input_files[0].content`"),
        ('{"prompt": "x"', "input data was truncated"),
        ("[]", "expected `object`, got `array`"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    path = write(tmp_path, row(), "", bad)
    with pytest.raises(TaskError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: row 3: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"\[\[tasks\]\] gym: the task id 'gym/x/7' is there twice"):
        load(write(tmp_path, row(), row()))


def test_the_same_file_can_be_two_sources(tmp_path: Path) -> None:
    path = str(write(tmp_path, row()))
    tasks = load_tasks([ClawGymTasksConfig(path=path, name=name) for name in ("a", "b")])
    assert list(tasks) == ["a/x/7", "b/x/7"]


def test_rows_can_be_picked(tmp_path: Path) -> None:
    path = write(tmp_path, *(row(origin_template=f"id: t{n}") for n in range(4)), "never read")
    assert list(load(path, limit=2)) == ["gym/t0", "gym/t1"]
    assert list(load(path, ids=("t3", "t1"))) == ["gym/t1", "gym/t3"]
    with pytest.raises(TaskError, match="no row has the id 't9'"):
        load(write(tmp_path, row()), ids=("t9",))


def test_a_source_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="gym: no task is left"):
        load(write(tmp_path))
    with pytest.raises(TaskError, match=r"none.jsonl: cannot be read .No such file or directory.; correct `path`"):
        load(tmp_path / "none.jsonl")


def test_sources_are_told_apart_by_their_names(tmp_path: Path) -> None:
    tasks = load_tasks([FilingTasksConfig(count=2), ClawGymTasksConfig(path=str(write(tmp_path, row())))])
    assert list(tasks) == ["filing/task_00000", "filing/task_00001", "clawgym/x/7"]


@pytest.mark.skipif(not ROWS.is_dir(), reason="needs ClawGym's rows; name their folder in CLAWGYM_ROWS")
@pytest.mark.parametrize(("name", "count"), [("train", 79), ("eval", 55)])
def test_every_published_row_loads_and_hides_its_verifier(name: str, count: int) -> None:
    path = ROWS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tasks = load_tasks([ClawGymTasksConfig(path=str(path), name="gym")])
    assert len(tasks) == len(rows) == count
    for given, task in zip(rows, tasks.values(), strict=True):
        texts = {f["file_path"]: f["content"].encode() for f in given["input_files"]}
        hidden = texts.pop("reward/check.py")
        assert dict(task.files) == texts
        assert dict(task.grader) == {"check.py": hidden}
        assert hidden not in task.files.values()
        assert task.task_id == "gym/" + given["origin_template"].split()[2]


@pytest.mark.skipif(not ROWS.is_dir(), reason="needs ClawGym's rows; name their folder in CLAWGYM_ROWS")
def test_published_rows_without_inputs_and_with_foreign_names_load() -> None:
    tasks = load_tasks([ClawGymTasksConfig(path=str(ROWS / "train.jsonl"), name="gym")])
    assert not tasks["gym/train/task_0176"].files
    assert not tasks["gym/train/task_0177"].files
    assert any(not path.isascii() for path in tasks["gym/train/task_0891"].files)
