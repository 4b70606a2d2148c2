"""Programs from npm, installed by the real npm client from a small registry on this machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clawpipe.actors.harness import install
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.processes import free_port

CLAWPIPE = Path(sysconfig.get_path("scripts"), "clawpipe")
QWEN, NODE = "@qwen-code/qwen-code", install.NODE.package.format(arch="x64")
VERSION = install.PINS["qwen_code"].version
SCRIPT = "cli-entry.js"
QWEN_PROGRAM = f"node_modules/{QWEN}/{SCRIPT}"
# Stands in for node: says the version of itself, and of the script that it is given.
FAKE_NODE = '#!/bin/sh\n[ -f "$1" ] && { cat "$1"; exit; }\necho v0\n'

pytestmark = pytest.mark.skipif(
    shutil.which("npm") is None or os.uname().machine != "x86_64", reason="needs npm, and a machine with x86_64"
)


def package(files: Mapping[str, str], **manifest: object) -> bytes:
    """A package as npm's registry keeps it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path, text in {"package.json": json.dumps(manifest), **files}.items():
            info = tarfile.TarInfo(f"package/{path}")
            info.size, info.mode = len(text.encode()), 0o700
            tar.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


@dataclass
class Registry:
    """Serves packages the way npm asks for them, and counts what it was asked."""

    port: int
    packages: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # name -> (version, tarball)
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, files: Mapping[str, str], **manifest: object) -> None:
        self.packages[name] = (version, package(files, name=name, version=version, **manifest))

    def answer(self, path: str) -> bytes | None:
        self.asked.append(path)
        name = path.removeprefix("/").removesuffix(".tgz").replace("%2f", "/")
        if name not in self.packages:
            return None
        version, tarball = self.packages[name]
        if path.endswith(".tgz"):
            return tarball
        integrity = f"sha512-{b64encode(hashlib.sha512(tarball).digest()).decode()}"
        dist = {"tarball": f"http://127.0.0.1:{self.port}/{name}.tgz", "integrity": integrity}
        versions = {version: {"name": name, "version": version, "dist": dist}}
        return json.dumps({"name": name, "dist-tags": {"latest": version}, "versions": versions}).encode()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry that npm uses in this test, with a node and a small Qwen Code; HOME and caches are the test's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = served.answer(self.path)
            self.send_response(200 if data is not None else 404)
            self.end_headers()
            self.wfile.write(data or b"{}")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Registry(server.server_address[1])
    served.add(NODE, install.NODE.version, {"bin/node": FAKE_NODE})
    served.add(QWEN, VERSION, {SCRIPT: f"says {VERSION}\n"})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (tmp_path / "home").mkdir()
    for name, value in environment(tmp_path, served.port).items():
        monkeypatch.setenv(name, value)
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def environment(tmp_path: Path, port: int) -> dict[str, str]:
    return {
        "HOME": str(tmp_path / "home"),
        "CLAWPIPE_CACHE": str(tmp_path / "cache"),
        "npm_config_cache": str(tmp_path / "npm-cache"),
        "npm_config_registry": f"http://127.0.0.1:{port}/",
        "npm_config_noproxy": "127.0.0.1",
        "npm_config_userconfig": str(tmp_path / "npmrc"),
    }


def clawpipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(CLAWPIPE), "harness", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def listed() -> dict[str, dict[str, object]]:
    done = clawpipe("list", "--json")
    assert done.returncode == 0, done.stderr
    return {program["kind"]: program for program in json.loads(done.stdout)}


def test_a_program_and_node_are_installed_once(registry: Registry, tmp_path: Path) -> None:
    done = clawpipe("install", "qwen_code")
    assert done.stdout.splitlines() == [f"node {install.NODE.version}: installed", f"qwen_code {VERSION}: installed"]
    assert install.missing("qwen_code") is None
    binds = install.programs("qwen_code")
    assert Path(binds["/opt/node"], "bin/node").read_text() == FAKE_NODE
    assert Path(binds["/opt/qwen_code"], "node_modules", QWEN, SCRIPT).read_text() == f"says {VERSION}\n"
    asked = len(registry.asked)
    again = clawpipe("install", "qwen_code")
    assert again.stdout.splitlines() == [f"node {install.NODE.version}: is there", f"qwen_code {VERSION}: is there"]
    assert len(registry.asked) == asked


def test_nothing_of_the_users_is_touched(registry: Registry, tmp_path: Path) -> None:
    install.install("qwen_code")
    assert not list((tmp_path / "home").rglob("*"))
    assert {path.name for path in tmp_path.iterdir()} == {"home", "cache", "npm-cache"}
    there = sorted(path.name for path in (tmp_path / "cache" / "harness").iterdir())
    assert there == [f"node-{install.NODE.version}", f"qwen_code-{VERSION}"]


def test_install_scripts_are_not_run(registry: Registry, tmp_path: Path) -> None:
    scripts = {"preinstall": "exit 1", "postinstall": f"touch {tmp_path}/ran"}
    registry.add(QWEN, VERSION, {SCRIPT: ""}, scripts=scripts)
    assert install.install("qwen_code")
    assert not (tmp_path / "ran").exists()


def test_sandboxes_may_read_it_whatever_the_umask_is(registry: Registry, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install.install("qwen_code")
    finally:
        os.umask(before)
    folder = Path(install.programs("qwen_code")["/opt/qwen_code"])
    for path in (folder, *folder.rglob("*")):
        assert path.lstat().st_mode & 0o044 == 0o044, path
        assert not path.is_dir() or path.stat().st_mode & stat.S_IXOTH


def test_another_version_is_another_folder(registry: Registry, tmp_path: Path) -> None:
    registry.add(QWEN, "9.0.0", {SCRIPT: "says 9\n"})
    assert clawpipe("install", "qwen_code@9.0.0").returncode == 0
    assert install.missing("qwen_code", "9.0.0") is None
    missing = install.missing("qwen_code")
    assert missing is not None
    assert missing.endswith(f"qwen_code-{VERSION} is not installed; run `clawpipe harness install qwen_code`")
    assert "install qwen_code@8.0.0`" in (install.missing("qwen_code", "8.0.0") or "")


@pytest.mark.parametrize("lost", ["node", "qwen_code"])
def test_a_folder_that_has_lost_its_program_is_replaced(registry: Registry, tmp_path: Path, lost: str) -> None:
    install.install("qwen_code")
    binds = install.programs("qwen_code")
    files = {"node": Path(binds["/opt/node"], "bin/node"), "qwen_code": Path(binds["/opt/qwen_code"], QWEN_PROGRAM)}
    files[lost].unlink()
    (files[lost].parent / "left.txt").touch()
    done = clawpipe("install", "qwen_code")
    assert f"{lost} {install._pin(lost).version}: installed" in done.stdout.splitlines()
    assert files[lost].is_file()
    assert not (files[lost].parent / "left.txt").exists()
    there = sorted(path.name for path in (tmp_path / "cache" / "harness").iterdir())
    assert there == [f"node-{install.NODE.version}", f"qwen_code-{VERSION}"]


def test_a_package_without_its_program_is_not_taken(registry: Registry, tmp_path: Path) -> None:
    """Its binaries are optional packages of npm's, which it leaves out without a word when it cannot get them."""
    registry.add(QWEN, VERSION, {"readme.md": ""})
    with pytest.raises(ConfigError, match="qwen_code: npm installed it without its program"):
        install.install("qwen_code")
    assert list((tmp_path / "cache" / "harness").iterdir()) == []


def test_what_a_killed_installer_left_is_removed_and_never_used(registry: Registry, tmp_path: Path) -> None:
    name = "import os; from clawpipe.actors.sandbox.identity import new_identity; print(new_identity())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    dead = subprocess.run([sys.executable, "-c", name], capture_output=True, text=True, check=True, env=env).stdout
    left = tmp_path / "cache" / "harness" / f"new-qwen_code-{dead.strip()}"
    (left / "node_modules").mkdir(parents=True)
    assert install.missing("qwen_code") is not None
    install.install("qwen_code")
    assert not left.exists()


def test_two_installers_at_once_both_succeed(registry: Registry, tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [str(CLAWPIPE), "harness", "install", "qwen_code"]
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    folders = {path.name for path in (tmp_path / "cache" / "harness").iterdir()}
    assert folders == {f"node-{install.NODE.version}", f"qwen_code-{VERSION}"}
    assert listed()["qwen_code"]["works"] is True


def test_a_program_that_does_not_start_is_not_installed(registry: Registry, tmp_path: Path) -> None:
    registry.add(NODE, install.NODE.version, {"bin/node": "#!/bin/sh\necho set-up is incomplete >&2\nexit 1\n"})
    with pytest.raises(ConfigError, match="node: it is installed and does not start"):
        install.install("qwen_code")
    assert not list((tmp_path / "cache" / "harness").iterdir())


def test_the_list_says_what_is_there_and_what_starts(registry: Registry, tmp_path: Path) -> None:
    clawpipe("install", "qwen_code")
    found = listed()
    qwen = found["qwen_code"]
    assert list(found) == ["node", *install.PINS]
    assert (qwen["version"], qwen["installed"], qwen["works"], qwen["says"]) == (VERSION, True, True, f"says {VERSION}")
    assert int(str(qwen["size_bytes"])) > 0
    assert (found["codex"]["installed"], found["codex"]["works"]) == (False, None)
    Path(install.programs("qwen_code")["/opt/node"], "bin/node").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    qwen = listed()["qwen_code"]
    assert (qwen["installed"], qwen["works"], qwen["says"]) == (True, False, "broken")


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    for part in ("clawpipe: ", *parts):
        assert part in lines[0]


def test_without_a_network_it_says_so_on_one_line(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{free_port()}/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    assert_refused(clawpipe("install", "qwen_code"), "ECONNREFUSED", "check the network")
    assert list((tmp_path / "cache" / "harness").iterdir()) == []


def test_a_version_that_is_not_there_is_said_on_one_line(registry: Registry) -> None:
    assert_refused(clawpipe("install", "qwen_code@0.0.1"), f"{QWEN}@0.0.1: npm could not install it", "ETARGET")


def test_without_npm_it_says_what_to_install(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert_refused(clawpipe("install", "qwen_code"), "npm is not on PATH; install Node.js")


def within(*mounts: str) -> subprocess.CompletedProcess[str]:
    """`harness install qwen_code` with other mounts than this machine's."""
    command = ["bwrap", "--dev-bind", "/", "/", *mounts, str(CLAWPIPE), "harness", "install", "qwen_code"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_full_disk_is_not_taken_for_the_network(registry: Registry, tmp_path: Path) -> None:
    registry.add(NODE, install.NODE.version, {"bin/node": FAKE_NODE, "large": os.urandom(2**19).hex()})
    done = within("--size", str(2**18), "--tmpfs", str(tmp_path / "cache"))
    assert_refused(done, "ENOSPC", f"the disk is full: make room in {tmp_path}/cache/harness, or set CLAWPIPE_CACHE")
    assert "check the network" not in done.stderr


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_cache_that_cannot_be_written_is_said_with_the_way_out(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    done = within("--ro-bind", str(tmp_path / "cache"), str(tmp_path / "cache"))
    assert_refused(done, "cannot be written into", "Read-only file system", "or set CLAWPIPE_CACHE to another folder")


@pytest.mark.parametrize("version", ["latest", ""])
def test_a_version_that_is_none_is_refused_before_anything_is_installed(
    registry: Registry, tmp_path: Path, version: str
) -> None:
    assert_refused(clawpipe("install", f"codex@{version}"), f"version {version!r} is no exact version")
    assert not (tmp_path / "cache").exists()
    assert registry.asked == []


def test_names_and_versions_that_are_none_are_refused() -> None:
    assert_refused(clawpipe("install", "vim"), "no harness 'vim'", "openclaw, claude_code, codex, opencode, qwen_code")
    for version in ("latest", "^1.0.0", "../1", "1/2"):
        with pytest.raises(ConfigError, match=r"is no exact version; write it like 0\.169\.0"):
            install.programs("codex", version)


def test_binds_and_commands_do_not_depend_on_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    assert install.programs("openclaw", "1.2.3") == {
        "/opt/node": f"{tmp_path}/harness/node-{install.NODE.version}/node_modules/{NODE}",
        "/opt/openclaw": f"{tmp_path}/harness/openclaw-1.2.3",
    }
    assert install.command("openclaw") == ("/opt/node/bin/node", "/opt/openclaw/node_modules/openclaw/openclaw.mjs")
    (program,) = install.command("claude_code")
    assert program.startswith("/opt/claude_code/node_modules/@anthropic-ai/")


@pytest.mark.harness
def test_what_is_installed_on_this_machine_starts() -> None:
    found = [program for program in install.find() if program.installed]
    if not found:
        pytest.skip("no program is installed; run `clawpipe harness install`")
    assert [(program.kind, program.works) for program in found] == [(program.kind, True) for program in found]
    assert all(program.version in program.says for program in found)
