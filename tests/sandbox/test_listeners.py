"""The listening socket in a sandbox's network namespace: it works from other processes, and it is an identity."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import trio

from clawpipe.actors.sandbox.supervisor import Supervisor

# Another process: receives the listener, answers each request with its own name.
PROXY = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
_, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
listener = socket.socket(fileno=descriptors[0])
listener.setblocking(True)
channel.send(b"ready")
while True:
    connection, _ = listener.accept()
    connection.recv(100)
    connection.sendall(b"from " + sys.argv[2].encode())
    connection.close()
"""
ASK = """
import socket, sys
for host in ("127.0.0.1", "localhost"):
    with socket.create_connection((host, 8080), 5) as connection:
        connection.sendall(b"hello")
        print(host, connection.recv(100).decode())
"""


def test_another_process_accepts_and_the_sandbox_reaches_it_by_address_and_by_name(lab) -> None:
    async def body(host: Supervisor) -> bytes:
        async with host.sandbox({}, name="listening", port=8080) as box:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                argv = [sys.executable, "-c", PROXY, str(theirs.fileno()), "proxy"]
                with subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as process:  # noqa: ASYNC220
                    socket.send_fds(ours, [b"take"], [box.listener.fileno()])
                    assert ours.recv(16) == b"ready"
                    box.listener.close()  # the other process's copy keeps it open
                    exit = await box.run(["python3", "-I", "-c", ASK], wall_clock_s=20)
                    process.kill()
            return exit.output

    assert lab.run(body) == b"127.0.0.1 from proxy\nlocalhost from proxy\n"


def test_sandboxes_on_the_same_port_each_reach_their_own_listener(lab) -> None:
    def answer(listener: socket.socket, name: bytes) -> None:
        listener.setblocking(True)
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(name)

    said = {}

    async def one(host: Supervisor, name: str) -> None:
        async with host.sandbox({}, name=name, port=8080) as box:
            thread = threading.Thread(target=answer, args=(box.listener, name.encode()))
            thread.start()
            said[name] = (await box.run(["python3", "-I", "-c", ASK], wall_clock_s=20)).output
            thread.join()

    async def body(host: Supervisor) -> None:
        async with trio.open_nursery() as nursery:
            for name in ("x", "y", "z"):
                nursery.start_soon(one, host, name)

    lab.run(body)
    assert said == {name: f"127.0.0.1 {name}\nlocalhost {name}\n".encode() for name in ("x", "y", "z")}


def test_a_connection_is_refused_once_every_copy_of_the_listener_is_closed(lab) -> None:
    async def body(host: Supervisor) -> bytes:
        async with host.sandbox({}, name="closed", port=8080) as box:
            box.listener.close()
            return (await box.run(["python3", "-I", "-c", ASK], wall_clock_s=20)).output

    assert b"ConnectionRefusedError" in lab.run(body)


def test_without_a_port_there_is_no_listener(lab) -> None:
    async def body(host: Supervisor):
        async with host.sandbox({}, name="none") as box:
            return box.listener

    assert lab.run(body) is None
