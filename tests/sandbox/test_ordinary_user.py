"""Without root there are no control groups and no quotas, but sandboxes, their network and their end all work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

USER = "61234"
PROGRAM = """
import json, os, socket, sys, threading
from pathlib import Path
import msgspec, trio
from clawpipe.pipeline.config import SandboxConfig
from clawpipe.actors.sandbox.supervisor import Supervisor

ASK = '''
import os, socket
with socket.create_connection(("localhost", 8080), 5) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode(), os.getuid(), open("a/b").read())
os.makedirs("shut/in")
os.chmod("shut/in", 0)
os.chmod("shut", 0)
if os.fork() == 0:
    os.setsid()
    while True:
        open("late", "a").write("x")
'''
FORKS = '''
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    print(count)
'''

def answer(listener):
    listener.setblocking(True)
    connection, _ = listener.accept()
    with connection:
        connection.recv(100)
        connection.sendall(b"from outside")

def alive():
    return [pid for pid in filter(str.isdigit, os.listdir("/proc"))
            if owner(pid) == os.getuid() and int(pid) != os.getpid()]

def owner(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None

async def main():
    config = msgspec.json.decode(sys.argv[1], type=SandboxConfig)
    said = {}
    async with Supervisor.open(config, "test-user", Path(sys.argv[2])) as host:
        said["missing"] = host.missing_limits
        async with host.sandbox({"a/b": b"ours"}, name="one", port=8080, binds={"/bound": sys.argv[2]}) as box:
            thread = threading.Thread(target=answer, args=(box.listener,))
            thread.start()
            exit = await box.run(["python3", "-I", "-c", ASK], wall_clock_s=30)
            thread.join()
            said["alive"] = alive()
            said["exit"] = [str(exit.reason), exit.code, exit.output.decode()]
            first = await box.collect()
            await trio.sleep(0.1)
            said["same"] = first == await box.collect()
            said["late"] = first.read("late") is not None
        async with host.sandbox({}, name="two", max_processes=20) as box:
            exit = await box.run(["python3", "-I", "-c", FORKS], wall_clock_s=30)
            said["forks"] = exit.output.decode()
            exit = await box.run(["sh", "-c", "sleep 60 & sleep 60"], wall_clock_s=0.5)
            said["clock"] = str(exit.reason)
            exit = await box.run(["python3", "-I", "-c", "b = bytearray(400 << 20)"], wall_clock_s=30)
            said["memory"] = exit.output.decode().splitlines()[-1]
    said["left"] = [path.name for path in Path(sys.argv[2]).iterdir()]
    print(json.dumps(said))

trio.run(main)
"""


def _site_packages() -> str | None:
    """Where trio and msgspec are, if the system's Python is the version that they were built for."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not Path(f"/usr/bin/python{version}").exists() or shutil.which("setpriv") is None:
        return None
    return os.path.dirname(os.path.dirname(msgspec.__file__))


def test_an_ordinary_user_has_sandboxes(lab, tmp_path: Path) -> None:
    packages = _site_packages()
    if packages is None:
        pytest.skip("needs the system's Python in this version, and setpriv")
    folder = Path(lab.config.rootfs).parent / "user"
    folder.mkdir()
    os.chown(folder, int(USER), int(USER))
    roots = [str(Path(__file__).parents[2] / name) for name in ("pipeline", "actors")]
    argv = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--inh-caps=-all", "--"]
    argv += [f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}", "-c", PROGRAM]
    argv += [msgspec.json.encode(lab.config).decode(), str(folder / "sandboxes")]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([*roots, packages]), "HOME": str(folder)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {
        "missing": ["memory", "pids", "cpu", "workspace"],
        "alive": [],
        "exit": ["exited", 0, "from outside 1000 ours\n"],
        "same": True,
        "late": True,
        "forks": "19\n",
        "clock": "wall_clock",
        "memory": "MemoryError",
        "left": ["groups.json"],
    }
