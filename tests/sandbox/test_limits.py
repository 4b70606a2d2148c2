"""What one sandbox may use, on this machine and, as files, on machines with other control groups."""

from __future__ import annotations

import os
from pathlib import Path

from clawpipe.actors.sandbox.identity import new_identity
from clawpipe.actors.sandbox.limits import Hierarchies, Limits, find_hierarchies, open_root, sweep
from clawpipe.actors.sandbox.process import Reason

MIB = 1024**2


def test_memory_is_limited_and_its_use_is_measured(lab) -> None:
    exit, _ = lab.python("b = []\nwhile True: b.append(bytearray(8 << 20))", memory_bytes=64 * MIB)
    assert (exit.reason, exit.code) == (Reason.EXITED, 137)
    assert exit.oom_kills == 1
    assert 60 * MIB < exit.peak_memory_bytes <= 64 * MIB


def test_files_in_memory_count_as_memory_and_filling_it_is_the_programs_doing(lab) -> None:
    """They belong to no process, so the kernel ends one process after the other, bubblewrap's too."""
    names = "/tmp/a /tmp/b /tmp/c /home/agent/d /home/agent/e /home/agent/f"
    program = f"for f in {names}; do head -c 15M /dev/zero >$f; done"
    exit, _ = lab.one("sh", "-c", program, memory_bytes=64 * MIB)
    assert (exit.reason, exit.code) == (Reason.EXITED, 137)
    assert exit.oom_kills >= 1
    assert exit.peak_memory_bytes <= 64 * MIB


def test_the_number_of_processes_is_limited(lab) -> None:
    program = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    print(count)
"""
    exit, _ = lab.python(program, max_processes=20)
    assert exit.output == b"19\n"  # and the program itself


def test_a_fork_bomb_is_capped_and_ended(lab) -> None:
    exit, _ = lab.one("bash", "-c", ":(){ :|:& };: 2>/dev/null; sleep 60", max_processes=32, wall_clock_s=2.0)
    assert exit.reason is Reason.WALL_CLOCK
    assert exit.wall_s < 15
    uid = lab.config.first_uid
    assert not [p for p in filter(str.isdigit, os.listdir("/proc")) if _uid(p) == uid]


def _uid(pid: str) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def test_processor_time_is_limited(lab) -> None:
    program = """
import time
begun = time.monotonic()
while time.monotonic() - begun < 1.5: pass
print(time.process_time() / (time.monotonic() - begun))
"""
    exit, _ = lab.python(program, cpus=0.2)
    assert float(exit.output) < 0.35


def test_the_workspace_has_a_quota_of_bytes(lab) -> None:
    program = """
try:
    for index in range(1000):
        open(f"f{index}", "wb").write(b"x" * (1 << 20))
except OSError as error:
    print(index, error.strerror)
"""
    exit, _ = lab.python(program)
    assert exit.output == b"16 No space left on device\n"


def test_a_file_larger_than_the_quota_cannot_be_made_even_without_content(lab) -> None:
    exit, _ = lab.one("truncate", "-s", "10G", "sparse")
    assert exit.code == 128 + 25  # SIGXFSZ


def test_the_workspace_has_a_quota_of_files(lab, config) -> None:
    program = """
count = 0
try:
    while True:
        open(f"f{count}", "w").close()
        count += 1
except OSError as error:
    print(count, error.strerror)
"""
    exit, _ = lab.python(program, wall_clock_s=60) if config.workspace_files < 1000 else _few_files(lab, program)
    count, _, why = exit.output.decode().strip().partition(" ")
    assert why == "No space left on device"
    assert 190 <= int(count) <= 216


def _few_files(lab, program: str):
    import msgspec

    small = msgspec.structs.replace(lab.config, workspace_files=200)
    return type(lab)(small, lab.work_dir).python(program)


HYBRID = """
30 20 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
""".strip()


def test_hierarchies_of_a_hybrid_machine() -> None:
    found = find_hierarchies(HYBRID, "8:pids:/\n4:memory:/job/7\n2:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/")
    root = Path("/sys/fs/cgroup")
    assert found.v1 == {"memory": root / "memory/job/7", "pids": root / "pids", "cpu": root / "cpu,cpuacct/job"}
    assert (found.v2, found.v2_top) == (root / "unified", root / "unified")


def test_hierarchies_of_a_plain_machine_and_of_a_container() -> None:
    plain = "30 20 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    found = find_hierarchies(plain, "0::/user.slice/session-1.scope")
    assert (found.v1, found.v2) == ({}, Path("/sys/fs/cgroup/user.slice/session-1.scope"))
    inside = "30 20 0:26 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
    assert find_hierarchies(inside, "5:memory:/docker/abc").v1 == {"memory": Path("/sys/fs/cgroup/memory")}


def _plain_tree(top: Path) -> Hierarchies:
    """A picture of a cgroup2 machine: our own group below a slice whose controllers are not handed down yet."""
    own = top / "user.slice/session.scope"
    own.mkdir(parents=True)
    for folder in (top, own.parent, own):
        (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n" if folder != own else "\n")
        (folder / "cgroup.subtree_control").write_text("cpu memory pids\n" if folder == top else "\n")
    return Hierarchies({}, own, top)


def test_on_plain_cgroup2_the_nearest_parent_that_has_all_controllers_is_taken(tmp_path: Path) -> None:
    here = _plain_tree(tmp_path)
    groups = _opened(here, "clawpipe-x")
    assert groups.folders == [tmp_path / "user.slice/clawpipe-x"]
    assert groups.controllers == {"cpu", "memory", "pids"}
    assert (tmp_path / "user.slice/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "user.slice/clawpipe-x/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_limits_in_cgroup2_have_its_files_and_units(tmp_path: Path) -> None:
    group = _opened(_plain_tree(tmp_path), "clawpipe-x").create("box", Limits(64 * MIB, 0.5, 20))
    folder = tmp_path / "user.slice/clawpipe-x/box"
    assert group.folders == [folder]
    assert (folder / "memory.max").read_text() == str(64 * MIB)
    assert (folder / "pids.max").read_text() == "22"
    assert (folder / "cpu.max").read_text() == "50000 100000"
    (folder / "memory.peak").write_text("12345\n")
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert (group.peak_bytes(), group.oom_kills()) == (12345, 2)


def _opened(here: Hierarchies, name: str):
    """`open_root` on a picture: the kernel's files of a new folder have to be drawn first."""
    new = here.v2.parent / name
    new.mkdir()
    (new / "cgroup.subtree_control").write_text("")
    return open_root(here, name)


def test_without_any_hierarchy_there_is_nothing_to_limit_and_nothing_fails() -> None:
    groups = open_root(Hierarchies({}), "clawpipe-x")
    group = groups.create("box", Limits(1, 1, 1))
    group.kill()
    assert (groups.controllers, group.folders, group.populated(), group.remove()) == (set(), [], False, True)
    assert (group.peak_bytes(), group.oom_kills()) == (None, 0)


def test_groups_of_the_living_of_other_containers_and_of_others_are_not_swept(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "memory/job", tmp_path / "memory/another-job"
    here = os.stat("/proc/self/ns/pid").st_ino
    dead = f"clawpipe-run-4000000-77-{here}-0123abcd"
    kept = {
        f"clawpipe-run-{new_identity()}",
        f"clawpipe-run-4000000-77-{here + 1}-0123abcd",
        f"systemd-4000000-77-{here}-0123abcd",
        "clawpipe-by-hand",
    }
    for folder in (own / dead, elsewhere / dead, *(own / name for name in kept)):
        folder.mkdir(parents=True)
    assert sweep(Hierarchies({"memory": own})) == [dead]
    assert {path.name for path in own.iterdir()} == kept
    assert list(elsewhere.iterdir()) == []
