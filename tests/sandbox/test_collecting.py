"""Workspaces: laid out, left behind in every bad state that an agent can make, and collected on the host."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawpipe.actors.sandbox import workspace
from clawpipe.actors.sandbox.collect import (
    File,
    Folder,
    Link,
    Skipped,
    Snapshot,
    WorkspaceRefused,
    collect,
    dump_snapshot,
    restore_snapshot,
)
from clawpipe.actors.sandbox.supervisor import Supervisor

FILES = {"a/b.txt": b"one\n", "a/c.txt": b"two\n", "d/e/f": b"three\n"}


def contents(snapshot: Snapshot) -> dict[bytes, bytes]:
    return {path: entry.data for path, entry in snapshot.entries.items() if isinstance(entry, File)}


def collected(folder: Path, **limits: int) -> Snapshot:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return collect(fd, **{"max_files": 1000, "max_bytes": 1 << 20, **limits})
    finally:
        os.close(fd)


def test_an_untouched_workspace_is_collected_as_it_was(lab) -> None:
    _, snapshot = lab.one("true", files=FILES)
    assert contents(snapshot) == {path.encode(): data for path, data in FILES.items()}
    assert [path for path, entry in snapshot.entries.items() if isinstance(entry, Folder)] == [b"a", b"d", b"d/e"]
    assert snapshot.skipped == ()


def test_changes_deletions_and_renamed_folders_are_collected(lab) -> None:
    program = "echo more >>a/b.txt; rm a/c.txt; mv d moved; mkdir d; echo new >d/new; chmod 751 d/new; ln -s a l"
    exit, snapshot = lab.one("sh", "-ec", program, files=FILES)
    assert exit.code == 0, exit.output
    assert contents(snapshot) == {b"a/b.txt": b"one\nmore\n", b"moved/e/f": b"three\n", b"d/new": b"new\n"}
    assert snapshot.entries[b"d/new"].mode == 0o751
    assert snapshot.entries[b"l"] == Link(b"a")


def test_a_folder_of_the_task_can_be_renamed_by_the_system_call(lab) -> None:
    exit, _ = lab.python("import os; os.rename('d', 'x'); print(os.listdir('x/e'))", files=FILES)
    assert exit.output == b"['f']\n"


def test_the_task_files_belong_to_the_agent(lab) -> None:
    exit, _ = lab.one("sh", "-ec", "chmod 700 a/b.txt; touch -d 2001-01-01 a/c.txt; stat -c %U a/b.txt", files=FILES)
    assert (exit.code, exit.output) == (0, b"agent\n")


def test_two_sandboxes_on_one_layer_do_not_see_each_others_changes(lab) -> None:
    async def body(host: Supervisor):
        async with host.sandbox(FILES, name="a") as first, host.sandbox(FILES, name="b") as second:
            await first.run(["sh", "-c", "rm -r a; echo x >d/e/f"], wall_clock_s=20)
            return await first.collect(), await second.collect()

    first, second = lab.run(body)
    assert contents(first) == {b"d/e/f": b"x\n"}
    assert contents(second) == {path.encode(): data for path, data in FILES.items()}


def test_a_snapshot_becomes_a_workspace_again_with_modes_links_and_times(lab) -> None:
    old = 1_000_000_000_000_000_000
    left = Snapshot(
        {
            b"run.sh": File(b"#!/bin/sh\necho ran\n", 0o755, old),
            b"shut": Folder(0o500),
            b"shut/in": File(b"x", 0o400, old),
            b"to": Link(b"/etc/shadow"),
            b"\xff\n": File(b"odd", 0o644, old),
        }
    )

    async def body(host: Supervisor):
        async with host.sandbox(left, name="again") as box:
            exit = await box.run(["sh", "-c", "./run.sh; cat shut/in; readlink to; stat -c %Y run.sh"], wall_clock_s=20)
            return exit, await box.collect()

    exit, again = lab.run(body)
    assert exit.output == b"ran\nx/etc/shadow\n1000000000\n"
    assert again == left


def test_where_overlays_are_refused_files_are_copied(lab) -> None:
    async def body(host: Supervisor):
        host._host.ground.has_overlay = False
        async with host.sandbox(FILES, name="copied") as box:
            exit = await box.run(["sh", "-ec", "rm a/c.txt; mv d x; head -c 15M /dev/zero >big"], wall_clock_s=20)
            return exit, await box.collect()

    exit, snapshot = lab.run(body)
    assert exit.code == 0, exit.output  # the copy itself is not charged to the quota
    assert set(contents(snapshot)) == {b"a/b.txt", b"x/e/f", b"big"}


def test_links_out_of_the_workspace_are_kept_as_data(lab) -> None:
    program = "import os; os.symlink('/etc/shadow', 'r.txt'); os.symlink('/', 'out'); os.symlink('..', 'up')"
    _, snapshot = lab.python(program)
    assert snapshot.entries == {b"r.txt": Link(b"/etc/shadow"), b"out": Link(b"/"), b"up": Link(b"..")}


def test_pipes_sockets_and_devices_are_skipped_and_hard_links_cannot_lead_out(lab) -> None:
    program = """
import os, socket, stat
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("socket")
for work in (lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0)),
             lambda: os.mknod("white", 0o600 | stat.S_IFCHR, 0),
             lambda: os.link("/usr/bin/python3", "hard")):
    try:
        work()
        print("made")
    except OSError as error:
        print(error.strerror)
"""
    exit, snapshot = lab.python(program)
    assert exit.output.decode().splitlines() == ["Operation not permitted"] * 2 + ["Invalid cross-device link"]
    assert snapshot.entries == {}
    assert snapshot.skipped == (Skipped(b"pipe", "special"), Skipped(b"socket", "special"))


def test_names_are_bytes(lab) -> None:
    program = "import os\nfor name in (b'a\\nb\\xff\\xfe', b'-rf', b'x' * 255, b'.git', b' '): open(name, 'w').close()"
    _, snapshot = lab.python(program)
    assert set(snapshot.entries) == {b"a\nb\xff\xfe", b"-rf", b"x" * 255, b".git", b" "}


def test_setuid_bits_have_no_effect_and_are_not_collected(lab) -> None:
    exit, snapshot = lab.one("sh", "-c", "cp /usr/bin/id me; chmod 6755 me; ./me -u")
    assert exit.output == b"1000\n"
    assert snapshot.entries[b"me"].mode == 0o755


def test_files_closed_to_their_owner_are_collected(lab) -> None:
    _, snapshot = lab.one("sh", "-c", "mkdir d; echo x >d/f; chmod 0 d/f; chmod 0 d")
    assert snapshot.read("d/f") == b"x\n"


@pytest.mark.parametrize(
    ("limit", "program"),
    [
        ("depth", "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')"),
        ("files", "for index in range(5100): open(f'f{index}', 'w').close()"),
        ("bytes", "for index in range(12): open(f'f{index}', 'wb').write(b'x' * (1 << 20))"),
    ],
)
def test_more_than_the_limits_is_refused_by_name(lab, limit: str, program: str) -> None:
    import msgspec

    small = msgspec.structs.replace(lab.config, collect_max_bytes=10 << 20)
    with pytest.raises(WorkspaceRefused) as refusal:
        type(lab)(small, lab.work_dir).python(program)
    assert refusal.value.limit == limit


def test_what_the_task_brings_is_not_counted_against_the_agent(lab) -> None:
    import msgspec

    tight = msgspec.structs.replace(lab.config, collect_max_files=1, collect_max_bytes=4)
    tight_lab = type(lab)(tight, lab.work_dir)
    _, snapshot = tight_lab.one("sh", "-c", "echo abc >new", files=FILES)
    assert snapshot.read("new") == b"abc\n"
    with pytest.raises(WorkspaceRefused):
        tight_lab.one("sh", "-c", "echo abcd >new", files=FILES)


def test_a_sparse_file_is_refused_by_its_length_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WorkspaceRefused) as refusal:
        collected(tmp_path)
    assert refusal.value.limit == "bytes"


def test_collecting_leaves_no_descriptor_open_even_when_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(WorkspaceRefused):
        collected(tmp_path, max_depth=2)
    collected(tmp_path)
    assert os.listdir("/proc/self/fd") == before


names = st.binary(min_size=1, max_size=12).filter(
    lambda name: not set(name) & set(b"/\0") and name not in (b".", b"..")
)
leaves = st.one_of(
    st.builds(File, st.binary(max_size=64), st.integers(0, 0o777), st.integers(0, 2**62)),
    st.builds(Link, st.binary(min_size=1, max_size=20).filter(lambda target: b"\0" not in target)),
)
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=4), lambda t: st.dictionaries(names, leaves | t, max_size=4)
)


def flat(tree: dict, prefix: bytes = b"") -> dict:
    entries = {}
    for name, entry in sorted(tree.items()):
        path = prefix + name
        if isinstance(entry, dict):
            entries[path] = Folder(0o755)
            entries |= flat(entry, path + b"/")
        else:
            entries[path] = entry
    return entries


@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_any_tree_survives_writing_collecting_and_storing(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    folder = tmp_path_factory.mktemp("tree")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        workspace.write_entries(fd, flat(tree))
        snapshot = collect(fd, max_files=1000, max_bytes=1 << 20)
    finally:
        os.close(fd)
    assert snapshot == Snapshot(flat(tree))
    assert restore_snapshot(dump_snapshot(snapshot)) == snapshot


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a/../../x", b"", b"a//b", b"./a", b"a/"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: bytes) -> None:
    (tmp_path / "inner").mkdir()
    fd = os.open(tmp_path / "inner", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(ValueError, match="not a relative path"):
            workspace.write_entries(fd, {path: File(b"x")})
    finally:
        os.close(fd)
    assert os.listdir(tmp_path) == ["inner"]


def test_writing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "inner").mkdir()
    fd = os.open(tmp_path / "inner", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            workspace.write_entries(fd, {b"l": Link(b"../outside"), b"l/x": File(b"x")})
    finally:
        os.close(fd)
    assert os.listdir(tmp_path / "outside") == []


def test_a_layer_is_written_once_and_differs_with_its_content(tmp_path: Path) -> None:
    layers = workspace.Layers(tmp_path / "layers")
    first = layers.get(FILES)
    assert layers.get(dict(reversed(FILES.items()))) == first
    assert layers.get({**FILES, "a/b.txt": b"other"}) != first
    assert layers.get({"ab": b"c"}) != layers.get({"a": b"bc"})
    assert {path.name for path in (tmp_path / "layers").iterdir() if path.name.startswith(".")} == set()
    assert stat.S_IMODE(first.stat().st_mode) == 0o755
