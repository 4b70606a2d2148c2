"""MCP servers of a rollout: who brings them, and the stock server, asked by a real client inside a real sandbox."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from clawpipe.actors.harness import documents_program as program
from clawpipe.actors.harness import mcp, mcp_folder
from clawpipe.actors.sandbox.identity import new_identity
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import McpServer, Task
from clawpipe.pipeline.config import McpConfig, SandboxConfig
from clawpipe.pipeline.errors import SandboxError, TaskError
from harness.mcp_documents import CLIENT, SECRET, write_documents

FIRST_UID = 340_000


def task(*servers: McpServer) -> Task:
    return Task(task_id="t/0", prompt="p", files={}, grader={}, grader_entry="g.py", mcp=servers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "documents")


@pytest.fixture
def documents(folder: Path) -> program.Documents:
    return program.Documents(str(folder))


# Who brings which server ------------------------------------------------------------------------------------


def test_configured_servers_come_before_those_of_the_task() -> None:
    own = McpConfig(name="own", command=("/usr/bin/env", "x"), env={"A": "1"})
    brought = McpServer(name="brought", command=("python3", "server.py"))
    found, binds = mcp.servers([own], task(brought))
    assert found == (McpServer(name="own", command=("/usr/bin/env", "x"), env={"A": "1"}), brought)
    assert binds == {}


def test_a_folder_of_documents_becomes_the_stock_server_over_a_bind_of_it() -> None:
    [server], binds = mcp.servers([McpConfig(name="library", documents="/srv/books")], task())
    assert server.command == ("/usr/bin/python3", "-I", "-S", "/opt/clawpipe-mcp", "/opt/documents/library")
    assert binds == {"/opt/documents/library": "/srv/books", "/opt/clawpipe-mcp": str(mcp_folder.folder())}


def test_a_name_of_the_configuration_that_a_task_uses_too_is_refused_with_both_places() -> None:
    with pytest.raises(TaskError, match=r"task t/0: its MCP server 'a' has the name of a \[\[harness.mcp\]\] entry"):
        mcp.servers([McpConfig(name="a", command=("x",))], task(McpServer(name="a", command=("y",))))


def test_a_name_that_a_task_uses_twice_is_refused() -> None:
    twice = McpServer(name="a", command=("y",))
    with pytest.raises(TaskError, match="has the name of another of its servers"):
        mcp.servers([], task(twice, twice))


# What a machine must have -----------------------------------------------------------------------------------


def test_documents_that_are_no_folder_are_a_problem(tmp_path: Path) -> None:
    [problem] = mcp.problems([McpConfig(name="a", documents=str(tmp_path / "gone"))], "")
    assert problem.startswith("[[harness.mcp]] a: documents = ")
    assert problem.endswith("gone is not a folder; correct the path")


def test_a_sandbox_with_another_python_is_a_problem_of_the_stock_server_alone(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.9").touch()
    (tmp_path / "usr/bin/python3").symlink_to("python3.9")
    [problem] = mcp.problems([McpConfig(name="a", documents=str(tmp_path))], str(tmp_path))
    assert "the sandbox's /usr/bin/python3 is python3.9" in problem
    assert list(mcp.problems([McpConfig(name="a", command=("x",))], str(tmp_path))) == []


def test_nothing_is_wrong_with_a_folder_on_this_machine(folder: Path) -> None:
    assert list(mcp.problems([McpConfig(name="a", documents=str(folder))], "")) == []


def test_the_server_is_built_once_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    pid, _, namespace, mark = new_identity().split("-")
    (tmp_path / "mcp" / f"new-{pid}-1-{namespace}-{mark}").mkdir(parents=True)  # of a process that is no more
    built = mcp_folder.prepare()
    made_ns = (built / "__main__.py").stat().st_mtime_ns
    assert mcp_folder.prepare() == built
    assert (built / "__main__.py").stat().st_mtime_ns == made_ns
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    assert not [path for path in built.rglob("*") if path.is_symlink()]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mcp").write_text("in the way")
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    with pytest.raises(SandboxError, match=r"the stock server could not be built in .*mcp"):
        mcp_folder.prepare()


# The server's tools -----------------------------------------------------------------------------------------


def test_search_finds_words_by_their_beginning_and_shows_the_lines(documents: program.Documents) -> None:
    found = documents.search("Nests NORTH", 10)
    assert found == f"1 documents found.\n\nnotes/heron.md (4 lines)\n4: {SECRET.capitalize()}."


def test_a_word_in_the_name_counts_more_than_one_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one owl")
    (tmp_path / "owls.md").write_text("some text")
    found = program.Documents(str(tmp_path)).search("owl", 10)
    assert [block.split()[0] for block in found.split("\n\n")[1:]] == ["owls.md", "a.md"]


def test_a_rare_word_counts_more_than_a_common_one() -> None:
    common = [program.Document(path=f"{n}", counts={"the": 3}, size=100) for n in range(9)]
    rare = program.Document(path="rare", counts={"heron": 1}, size=100)
    assert program.rank([*common, rare])[0] == rare


def test_of_equal_counts_the_shorter_document_comes_first() -> None:
    long, short = (program.Document(path=p, counts={"a": 2}, size=size) for p, size in (("0", 900), ("1", 100)))
    assert program.rank([long, short, program.Document(path="2", counts={}, size=10)]) == [short, long]


def test_more_results_than_asked_for_are_counted_and_not_shown(documents: program.Documents) -> None:
    found = documents.search("heron owl", 1)
    assert found.startswith("3 documents found.")
    assert len(found.split("\n\n")) == 2


def test_a_search_without_a_hit_says_so(documents: program.Documents) -> None:
    assert documents.search("penguin", 5) == "No document has any of: penguin"


def test_a_search_shows_a_bounded_part_of_a_document_however_long_its_lines(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(("x" * 100_000 + " needle ") * 20)
    found = program.Documents(str(tmp_path)).search("needle", 5)
    assert "needle" in found
    assert len(found) < 1000


def test_read_gives_numbered_lines_and_says_how_to_go_on(documents: program.Documents) -> None:
    assert documents.read("notes/owl.md", 2, 2) == (
        "2: \n3: The owl hunts at night.\n(lines 2 to 3 of 43; go on with offset 4)"
    )
    assert documents.read("notes/owl.md", 43, 5) == "43: Nothing new."


def test_reading_on_gives_the_whole_document_whatever_its_size(tmp_path: Path) -> None:
    text = "".join(f"{number} " for number in range(50_000))
    (tmp_path / "a.txt").write_text(text)
    documents, offset, parts = program.Documents(str(tmp_path)), 1, []
    while True:
        body, _, rest = documents.read("a.txt", offset, 1000).partition("\n(lines ")
        parts += [line.split(": ", 1)[1] for line in body.splitlines()]
        if not rest:
            break
        assert len(body) < 1.2 * program.MAX_READ_CHARS
        offset = int(rest.rsplit(" ", 1)[1].rstrip(")"))
    assert "".join(parts) == text


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "notes/../../x", "out", "a\0b"])
def test_nothing_outside_the_folder_is_read(documents: program.Documents, path: str) -> None:
    with pytest.raises(program.Refusal, match="outside the documents"):
        documents.read(path, 1, 10)


def test_a_search_does_not_follow_links_out_of_the_folder(documents: program.Documents) -> None:
    assert documents.search("root", 5) == "No document has any of: root"


@pytest.mark.parametrize(
    ("path", "message"),
    [("notes", "is a folder"), (".", "is a folder"), ("gone.md", "no document gone.md"), ("owl.bin", "not a text")],
)
def test_what_cannot_be_read_is_said(documents: program.Documents, path: str, message: str) -> None:
    with pytest.raises(program.Refusal, match=message):
        documents.read(path, 1, 10)


def test_a_line_behind_the_end_is_refused_with_the_number_of_lines(documents: program.Documents) -> None:
    with pytest.raises(program.Refusal, match="has only 2 lines"):
        documents.read("index.txt", 3, 10)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("write", {}, "error: there is no tool write; there are search and read"),
        ("read", {}, "error: the arguments of read are wrong (path: Field required)"),
        ("search", {"query": "a", "limit": 0}, "limit: Input should be greater than or equal to 1"),
        ("search", {"query": "a", "folder": "/"}, "folder: Extra inputs are not permitted"),
        ("search", {"query": " ?! "}, "error: the query has no word in it"),
    ],
)
def test_wrong_calls_are_tool_errors(
    documents: program.Documents, name: str, arguments: dict[str, Any], message: str
) -> None:
    result = program.call(documents, name, arguments)
    assert result.is_error
    assert message in result.content[0].text  # type: ignore[union-attr]


def test_the_program_refuses_to_start_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([str(tmp_path / "gone")]) == 2
    assert "give one folder" in capsys.readouterr().err


# In a sandbox -----------------------------------------------------------------------------------------------


def ask_in_a_sandbox(folder: Path, work_dir: Path, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """What a client in a sandbox is told by the server that it starts there."""
    entry = McpConfig(name="library", documents=str(folder))
    mcp.prepare([entry])
    [server], binds = mcp.servers([entry], task())
    files = {"client.py": CLIENT.encode(), "calls.json": json.dumps(calls).encode()}

    async def main() -> bytes:
        config = SandboxConfig(first_uid=FIRST_UID)
        async with (
            Supervisor.open(config, "test-mcp", work_dir) as host,
            host.sandbox(files, name="mcp", binds=binds) as box,
        ):
            argv = ["/usr/bin/python3", "-I", "-S", "/work/client.py", *server.command]
            return (await box.run(argv, wall_clock_s=60)).output

    output = trio.run(main)
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    print({name: told[name] for name in ("start_s", "server_cpu_s", "kb")})
    return told


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("bwrap") is None, reason="needs root and bubblewrap")
def test_a_client_in_a_sandbox_lists_searches_and_reads(folder: Path, tmp_path: Path) -> None:
    told = ask_in_a_sandbox(
        folder,
        tmp_path / "work",
        ("search", {"query": "heron nests"}),
        ("read", {"path": "notes/heron.md", "offset": 4}),
        ("read", {"path": "../../etc/passwd"}),
        ("read", {"path": "notes/owl.md", "offset": "many"}),
    )
    assert told["tools"] == ["search", "read"]
    found, read, outside, wrong = told["answers"]
    assert found[0] is False
    assert "notes/heron.md (4 lines)" in found[1]
    assert read == [False, f"4: {SECRET.capitalize()}."]
    assert outside == [True, "error: '../../etc/passwd' is outside the documents; give a path as search shows it"]
    assert wrong[0] is True
    assert "offset" in wrong[1]
    assert told["kb"] < 200 * 1024
