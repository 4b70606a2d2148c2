"""The system-call filter: as a program against the kernel's own numbers, and as the kernel applies it."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawpipe.actors.sandbox import seccomp
from clawpipe.pipeline.errors import SandboxError

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = frozenset(
    re.findall(
        r"\w+",
        """
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module fsconfig
    fsmount fsopen fspick init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp
    kexec_file_load kexec_load keyctl mount mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree
    perf_event_open pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl
    quotactl_fd reboot request_key setns settimeofday swapoff swapon syslog umount2 unshare userfaultfd
    """,
    )
)


def verdict(program: bytes, audit: int, number: int, first: int = 0) -> int:
    """What the filter returns for a call: an interpreter of the few instructions that classic BPF needs here."""
    data = struct.pack("<IIQQ", number, audit, 0, first)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


def numbers(machine: str) -> dict[str, int]:
    path = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    found = re.findall(r"#define (?:__NR|__NR3264)_(\w+)\s+(\d+)", path.read_text())
    return {name: int(number) for name, number in found}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_exactly_the_named_calls_are_denied(machine: str) -> None:
    program, calls = seccomp.build(machine), numbers(machine)
    special = {"socket", "socketpair", "clone", "clone3"}
    denied = {
        name
        for name, number in calls.items()
        if name not in special and verdict(program, AUDIT[machine], number) == ERRNO | errno.EPERM
    }
    assert denied == DENIED & set(calls)
    allowed = {name for name in calls if name not in special} - denied
    assert {verdict(program, AUDIT[machine], calls[name]) for name in allowed} == {ALLOW}
    assert {"read", "execve", "openat", "futex", "pidfd_open", "seccomp"} <= allowed


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@given(family=st.integers(0, 2**32 - 1))
def test_only_four_socket_families_are_allowed(machine: str, family: int) -> None:
    program, calls = seccomp.build(machine), numbers(machine)
    expected = ALLOW if family in (1, 2, 10, 16) else ERRNO | errno.EAFNOSUPPORT
    for name in ("socket", "socketpair"):
        assert verdict(program, AUDIT[machine], calls[name], family) == expected


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_threads_and_processes_are_allowed_and_new_namespaces_are_not(machine: str) -> None:
    program, calls = seccomp.build(machine), numbers(machine)
    fork, thread = 0x01200011, 0x003D0F00
    for flags in (fork, thread):
        assert verdict(program, AUDIT[machine], calls["clone"], flags) == ALLOW
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, AUDIT[machine], calls["clone"], fork | namespace) == ERRNO | errno.EPERM
    assert verdict(program, AUDIT[machine], calls["clone3"]) == ERRNO | errno.ENOSYS


def test_foreign_architectures_are_killed_and_x32_is_not_there() -> None:
    assert verdict(seccomp.build("x86_64"), 0x40000003, 1) == KILL  # i386
    assert verdict(seccomp.build("x86_64"), AUDIT["aarch64"], 1) == KILL
    assert verdict(seccomp.build("aarch64"), AUDIT["x86_64"], 1) == KILL
    assert verdict(seccomp.build("x86_64"), AUDIT["x86_64"], 0x40000001) == ERRNO | errno.ENOSYS


def test_an_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp.build("riscv64")


def test_the_kernel_applies_it(lab) -> None:
    calls = numbers("x86_64")
    tried = ["unshare", "keyctl", "add_key", "bpf", "perf_event_open", "io_uring_setup", "ptrace", "mount", "setns"]
    program = f"""
import ctypes, errno, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
for name, number, *args in {[(name, calls[name], 0, 0, 0, 0, 0) for name in tried]!r}:
    ctypes.set_errno(0)
    print(name, libc.syscall(number, *args), errno.errorcode.get(ctypes.get_errno()))
print("clone", libc.syscall({calls["clone"]}, 0x10000011, 0, 0, 0, 0), errno.errorcode.get(ctypes.get_errno()))
print("clone3", libc.syscall({calls["clone3"]}, 0, 0), errno.errorcode.get(ctypes.get_errno()))
for family, kind in (40, 1), (38, 5), (17, 3), (1, 1), (2, 1), (10, 1), (16, 3):
    try:
        socket.socket(family, kind).close()
        print("family", family, "open")
    except OSError as error:
        print("family", family, errno.errorcode[error.errno])
thread = threading.Thread(target=print, args=("thread runs",))
thread.start()
thread.join()
"""
    exit, _ = lab.python(program)
    lines = exit.output.decode().splitlines()
    assert lines[: len(tried)] == [f"{name} -1 EPERM" for name in tried]
    assert lines[len(tried) :] == [
        "clone -1 EPERM",
        "clone3 -1 ENOSYS",
        *(f"family {family} EAFNOSUPPORT" for family in (40, 38, 17)),
        *(f"family {family} open" for family in (1, 2, 10, 16)),
        "thread runs",
    ]
