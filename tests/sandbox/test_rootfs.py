"""The root that sandboxes see: whole, cached by content, and able to run what harnesses and graders need."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from clawpipe.actors.sandbox import rootfs
from clawpipe.pipeline.errors import SandboxError


def test_the_usual_programs_run_in_it(lab) -> None:
    script = """
set -e
for name in sh env cat ls cp mv rm mkdir grep sed find sort head tail wc tr cut date seq sleep true; do
    command -v $name >/dev/null || echo missing $name
done
printf 'b\\na\\n' | sort | sed 's/a/A/' | tr '\\n' ' '
find /work -name x -type f | wc -l
python3 -c 'import ssl, sqlite3, json, ctypes, zoneinfo, venv, zlib, sys; print(sys.version_info[:2], sys.prefix)'
python3 -c 'import zoneinfo, datetime; print(datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")))'
"""
    exit, _ = lab.one("sh", "-c", script, files={"x": b""})
    lines = exit.output.decode().splitlines()
    assert exit.code == 0, lines
    version = rootfs.find_python().library.name.removeprefix("python")
    assert lines == [
        "A b 1",
        f"({version.replace('.', ', ')}) /usr",
        "2026-07-01 00:00:00+02:00",
    ]


def test_programs_that_are_brought_along_find_the_whole_c_library(lab) -> None:
    names = ["libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libresolv.so.2", "libstdc++.so.6"]
    exit, _ = lab.one("python3", "-c", f"import ctypes; [ctypes.CDLL(name) for name in {names}]; print('all')")
    assert exit.output == b"all\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed on this machine")
def test_git_works_in_it(lab) -> None:
    script = "git init -q . && git add x && git -c user.name=a -c user.email=a@b commit -qm one && git log --format=%s"
    exit, _ = lab.one("sh", "-c", script, files={"x": b"1"})
    assert (exit.code, exit.output) == (0, b"one\n")


@pytest.mark.skipif(shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") is None, reason="node is not installed")
def test_node_works_in_it(lab) -> None:
    exit, _ = lab.one("node", "-e", "console.log(JSON.stringify(require('os').userInfo().username))")
    assert (exit.code, exit.output) == (0, b'"agent"\n')


def test_python_finds_its_compiled_modules(lab) -> None:
    """The root is read-only, so what is not compiled in it would be compiled at every start."""
    program = """
import importlib.util, json, os, subprocess, urllib.request
for module in json, subprocess, urllib.request:
    print(os.path.exists(importlib.util.cache_from_source(module.__file__)))
"""
    exit, _ = lab.python(program)
    assert exit.output == b"True\n" * 3


def test_preparing_again_costs_next_to_nothing(root_folder: Path) -> None:
    begun = time.monotonic()
    assert rootfs.prepare(root_folder.parent) == root_folder
    assert time.monotonic() - begun < 1


@pytest.mark.slow
def test_two_at_the_same_time_make_one_whole_root(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(rootfs.prepare(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert list(tmp_path.iterdir()) == [made[0]]
    assert (made[0] / "usr/bin/python3").exists()


def test_what_a_killed_build_left_is_removed(root_folder: Path) -> None:
    left = root_folder.parent / f"new-4000000-77-{os.stat('/proc/self/ns/pid').st_ino}-0123abcd"
    (left / "usr").mkdir(parents=True)
    assert rootfs.prepare(root_folder.parent) == root_folder
    assert not left.exists()


def test_everybody_may_read_it_and_nobody_gains_rights_by_it(root_folder: Path) -> None:
    for folder, _, files in os.walk(root_folder):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o755
        for name in files:
            mode = os.lstat(os.path.join(folder, name)).st_mode
            assert mode & 0o444 == 0o444
            assert not mode & (stat.S_ISUID | stat.S_ISGID)


def test_the_running_python_serves_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs.shutil, "which", lambda name, path=None: None)
    python = rootfs.find_python()
    assert (
        python.library == Path(sys.base_prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}").resolve()
    )
    assert (python.library / "os.py").exists()


def test_a_configured_folder_without_usr_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=str(tmp_path)):
        rootfs.find(str(tmp_path))
