"""The system-call filter of every sandbox, as classic BPF for `bwrap --seccomp FD`. Pure.

What a network namespace, a user namespace and a read-only root leave open: sockets of kinds that no namespace
covers (AF_VSOCK, AF_ALG, AF_PACKET), kernel key rings, BPF, performance counters, io_uring, tracing, mounts
and new namespaces. Everything else is allowed: harnesses are ordinary programs.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from clawpipe.pipeline.errors import SandboxError

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_NUMBER = 0  # offsets in struct seccomp_data
_ARCH = 4
_FIRST_ARGUMENT = 16  # its low half: both machines are little-endian

_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

_CLONE3 = 435
_SAME_EVERYWHERE = (
    425,  # io_uring_setup
    426,  # io_uring_enter
    427,  # io_uring_register
    428,  # open_tree
    429,  # move_mount
    430,  # fsopen
    431,  # fsconfig
    432,  # fsmount
    433,  # fspick
    438,  # pidfd_getfd
    440,  # process_madvise
    442,  # mount_setattr
    443,  # quotactl_fd
)


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int  # AUDIT_ARCH_*
    socket: int
    socketpair: int
    clone: int
    has_x32: bool
    denied: dict[str, int]


_X86_64 = _Machine(
    audit=0xC000003E,
    socket=41,
    socketpair=53,
    clone=56,
    has_x32=True,
    denied={
        "ptrace": 101,
        "syslog": 103,
        "pivot_root": 155,
        "adjtimex": 159,
        "chroot": 161,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "iopl": 172,
        "ioperm": 173,
        "init_module": 175,
        "delete_module": 176,
        "quotactl": 179,
        "clock_settime": 227,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
)

_AARCH64 = _Machine(
    audit=0xC00000B7,
    socket=198,
    socketpair=199,
    clone=220,
    has_x32=False,
    denied={
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "chroot": 51,
        "quotactl": 60,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "ptrace": 117,
        "reboot": 142,
        "settimeofday": 170,
        "adjtimex": 171,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
)


def build(machine: str | None = None) -> bytes:
    """The filter for `machine` (default: this one). SandboxError where no table exists for it.

    Denied calls fail with EPERM, socket families with EAFNOSUPPORT. clone3 hides its flags in memory, so it
    fails with ENOSYS and the C library falls back to clone. Foreign architectures are killed.
    """
    table = _table(machine or platform.machine())
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, table.audit, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    if table.has_x32:
        program += _when(_JUMP_GREATER_EQUAL, _X32_BIT, errno.ENOSYS)
    for number in (table.socket, table.socketpair):
        program += _only_families(number)
    program += _no_new_namespaces(table.clone)
    program += _when(_JUMP_EQUAL, _CLONE3, errno.ENOSYS)
    for number in sorted((*table.denied.values(), *_SAME_EVERYWHERE)):
        program += _when(_JUMP_EQUAL, number, errno.EPERM)
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _table(machine: str) -> _Machine:
    tables = {"x86_64": _X86_64, "aarch64": _AARCH64}
    if machine not in tables:
        raise SandboxError(f"sandbox: no system-call filter for {machine}; run the actors on x86_64 or aarch64")
    return tables[machine]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(jump: int, value: int, error: int) -> list[bytes]:
    return [_instruction(jump, value, 0, 1), _instruction(_RETURN, _ERRNO | error)]


def _only_families(number: int) -> list[bytes]:
    """If the call is `number`, its first argument decides; else on to what follows."""
    tests = [_instruction(_JUMP_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
    body = [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *tests,
        _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return [_instruction(_JUMP_EQUAL, number, 0, len(body)), *body]


def _no_new_namespaces(clone: int) -> list[bytes]:
    body = [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return [_instruction(_JUMP_EQUAL, clone, 0, len(body)), *body]
