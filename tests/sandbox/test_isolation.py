"""What a sandbox can see and touch of its host: nothing that was not given to it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import trio

from clawpipe.actors.sandbox.supervisor import Supervisor


def test_nothing_of_the_hosts_environment_or_paths_is_readable_from_any_process(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "s3cr3t-value")
    program = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        print(pid, name, open(f"/proc/{pid}/{name}").read().replace(chr(0), " "))
"""
    exit, _ = lab.python(program, env={"GIVEN": "value-of-ours"}, port=8080)
    text = exit.output.decode()
    assert exit.code == 0
    assert "1 environ PATH=" in text
    assert "value-of-ours" in text  # the reading works: our own variable is found
    assert "s3cr3t-value" not in text
    assert str(lab.work_dir) not in text
    assert lab.config.rootfs not in text


def test_only_the_given_variables_are_set(lab) -> None:
    exit, _ = lab.one("env", env={"ONE": "1", "HOME": "/tmp"})
    names = dict(line.split("=", 1) for line in exit.output.decode().splitlines())
    assert names.pop("ONE") == "1"
    assert names.pop("HOME") == "/tmp"
    assert set(names) == {"USER", "PATH", "LANG", "TZ", "TMPDIR", "PWD"}
    assert names["PWD"] == "/work"


def test_ports_of_the_host_are_refused_and_names_and_addresses_lead_nowhere(lab) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        program = f"""
import socket
def attempt(work):
    try:
        return repr(work())
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
print(attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)))
print(attempt(lambda: socket.getaddrinfo("example.com", 80)))
print(attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2)))
print(attempt(lambda: socket.create_connection(("8.8.8.8", 53), 2)))
print(socket.gethostbyname("localhost"))
print(sorted(name for _, name in socket.if_nameindex()))
"""
        for port in (8080, None):
            exit, _ = lab.python(program, port=port)
            refused, unknown, *unreachable, localhost, devices = exit.output.decode().splitlines()
            assert refused == "ConnectionRefusedError 111"
            assert unknown.startswith("gaierror")
            assert unreachable == ["OSError 101", "OSError 101"]
            assert localhost == "127.0.0.1"
            assert devices == "['lo']"


def test_everything_but_workspace_home_tmp_and_shm_is_read_only(lab, tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / "file").write_text("host")
    program = """
import os
for path in ("/x", "/usr/x", "/usr/bin/python3", "/etc/hosts", "/dev/x", "/opt/bound/file", "/opt/bound/new",
             "/proc/sys/kernel/hostname", "/work/x", "/tmp/x", "/dev/shm/x", "/home/agent/x"):
    try:
        open(path, "a").write("x")
        print(path, "written")
    except OSError as error:
        print(path, error.strerror)
"""
    exit, _ = lab.python(program, binds={"/opt/bound": str(tmp_path / "bound")})
    said = dict(line.split(" ", 1) for line in exit.output.decode().splitlines())
    written = {path for path, what in said.items() if what == "written"}
    assert written == {"/work/x", "/tmp/x", "/dev/shm/x", "/home/agent/x"}
    assert said["/x"] == said["/usr/x"] == said["/opt/bound/file"] == "Read-only file system"
    assert (tmp_path / "bound" / "file").read_text() == "host"


def test_a_bound_folder_that_only_root_may_read_is_readable_inside(lab, tmp_path: Path) -> None:
    folder = tmp_path / "grader"
    folder.mkdir(mode=0o700)
    (folder / "check.py").write_text("print('graded')")
    (folder / "check.py").chmod(0o600)
    exit, _ = lab.one("python3", "/grader/check.py", binds={"/grader": str(folder)})
    assert (exit.code, exit.output) == (0, b"graded\n")


def test_a_cached_folder_can_be_bound(lab) -> None:
    async def body(host: Supervisor) -> bytes:
        folder = await host.folder({"a/check.py": b"print(7)"})
        assert folder == await host.folder({"a/check.py": b"print(7)"})
        async with host.sandbox({}, name="bound", binds={"/grader": folder}) as box:
            return (await box.run(["python3", "/grader/a/check.py"], wall_clock_s=20)).output

    assert lab.run(body) == b"7\n"


def test_the_user_has_no_rights(lab) -> None:
    exit, _ = lab.one("cat", "/proc/self/status")
    status = dict(line.split(":\t") for line in exit.output.decode().splitlines() if ":\t" in line)
    assert status["Uid"] == status["Gid"] == "1000\t1000\t1000\t1000"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def _host_uids(lab, command: str) -> list[int]:
    """Host uids, of this test's range, that run `command` now."""
    first = lab.config.first_uid
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            uid = Path(f"/proc/{pid}").stat().st_uid
            if first <= uid < first + 1000 and Path(f"/proc/{pid}/comm").read_text().strip() == command:
                found.append(uid)
        except OSError:
            continue
    return found


def test_two_sandboxes_at_the_same_time_have_different_host_uids(lab) -> None:
    async def body(host: Supervisor) -> list[int]:
        async with trio.open_nursery() as nursery:
            for index in range(3):

                async def sleeper(name: str = f"s{index}") -> None:
                    async with host.sandbox({}, name=name) as box:
                        await box.run(["sleep", "60"], wall_clock_s=60)

                nursery.start_soon(sleeper)
            with trio.fail_after(30):
                while len(uids := _host_uids(lab, "sleep")) < 3:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        return uids

    assert sorted(lab.run(body)) == [lab.config.first_uid + n for n in range(3)]


def test_no_descriptor_of_the_supervisor_leaks_in(lab) -> None:
    exit, _ = lab.python("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))", port=8080)
    assert json.loads(exit.output) == [0, 1, 2, 3]  # 3 is the listing itself


def test_only_the_sandboxs_own_processes_exist(lab) -> None:
    exit, _ = lab.python(
        "import os, signal\n"
        "print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\n"
        "try: os.kill(1, signal.SIGKILL)\n"
        "except OSError as error: print(error)\n"
        f"try: os.kill({os.getpid()}, 0)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    processes, *rest = exit.output.decode().splitlines()
    assert len(json.loads(processes)) == 2  # pid 1 and the program
    assert rest[-1] == "No such process"
    assert exit.code == 0  # pid 1 took no notice of the signal


def test_shm_and_tmp_have_sizes_of_their_own(lab) -> None:
    exit, _ = lab.one("sh", "-c", "df -B1 --output=target,size /dev/shm /tmp /home /work | tail -4")
    sizes = dict(line.split() for line in exit.output.decode().splitlines())
    assert sizes["/dev/shm"] == str(8 * 1024**2)
    assert sizes["/tmp"] == sizes["/home"] == str(64 * 1024**2)
    assert sizes["/work"] == str(lab.config.workspace_bytes)


def test_home_files_are_there_and_writable(lab) -> None:
    exit, _ = lab.one(
        "sh", "-c", "cat ~/.config/a && echo more >>~/.config/a && cat ~/.config/a", home_files={".config/a": b"1\n"}
    )
    assert exit.output == b"1\n1\nmore\n"


def test_another_sandboxs_files_are_out_of_reach(lab) -> None:
    async def body(host: Supervisor) -> bytes:
        async with (
            host.sandbox({"mine.txt": b"x"}, name="a"),
            host.sandbox({}, name="b") as other,
        ):
            looking = "find / -name mine.txt -not -path '/proc/*' 2>/dev/null; ls /mnt /media /srv 2>&1"
            return (await other.run(["sh", "-c", looking], wall_clock_s=30)).output

    said = lab.run(body).decode()
    assert "mine.txt" not in said
    assert said.count("No such file") == 3
