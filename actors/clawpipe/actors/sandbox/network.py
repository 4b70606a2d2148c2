"""A network namespace of its own for a sandbox, with one socket that listens in it on 127.0.0.1:port.

The socket keeps working from the host's processes: whoever holds it accepts what the sandbox connects, and
nothing else leads out. One listener per rollout is therefore an identity that nothing in the sandbox can forge.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from clawpipe.actors.sandbox import kernel
from clawpipe.pipeline.errors import SandboxError

BACKLOG = 128
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40

# An ordinary user needs a user namespace around the network namespace, which a process with threads cannot
# enter. A short-lived Python makes both and hands back: the listener, the network and the user namespace.
_MAKE_UNPRIVILEGED = """
import array, ctypes, fcntl, os, socket, struct, sys
channel, port, backlog = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
uid, gid = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000 | 0x40000000):
    sys.exit("unshare: " + os.strerror(ctypes.get_errno()))
for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
listener = socket.socket()
fcntl.ioctl(listener, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen(backlog)
spaces = [os.open("/proc/self/ns/" + kind, os.O_RDONLY) for kind in ("net", "user")]
socket.send_fds(channel, [b"x"], [listener.fileno(), *spaces])
"""


@dataclass(slots=True)
class Network:
    """A namespace and its listener. `user_fd` is set where an ordinary user made it."""

    listener: socket.socket
    net_fd: int
    user_fd: int | None = None

    def close(self) -> None:
        """Lets go of the namespace; it ends with the last process and socket in it."""
        self.listener.close()
        os.close(self.net_fd)
        if self.user_fd is not None:
            os.close(self.user_fd)


def create(port: int, home_fd: int) -> Network:
    """As root, in the forking thread, whose own network namespace is `home_fd`. OSError."""
    kernel.unshare(kernel.CLONE_NEWNET)
    try:
        _raise_loopback()
        listener = _listen(port)
        return Network(listener, kernel.namespace("net"))
    finally:
        kernel.setns(home_fd, kernel.CLONE_NEWNET)


@contextmanager
def entered(net_fd: int | None, home_fd: int) -> Iterator[None]:
    """The calling thread is in the namespace `net_fd` for the block, if there is one."""
    if net_fd is None:
        yield
        return
    kernel.setns(net_fd, kernel.CLONE_NEWNET)
    try:
        yield
    finally:
        kernel.setns(home_fd, kernel.CLONE_NEWNET)


def create_unprivileged(port: int) -> Network:
    """As an ordinary user: blocks for the start of a small Python. SandboxError when the kernel refuses."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-I", "-S", "-c", _MAKE_UNPRIVILEGED]
        argv += [str(theirs.fileno()), str(port), str(BACKLOG)]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"PATH": os.defpath},
            pass_fds=[theirs.fileno()],
        )
        if done.returncode:
            raise SandboxError(
                "sandbox: no network namespace as an ordinary user "
                f"({done.stderr.decode(errors='replace').strip()[-200:]}); allow user namespaces or run as root"
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 3)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return Network(listener, descriptors[1], descriptors[2])


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except Exception:
        listener.close()
        raise
    return listener
