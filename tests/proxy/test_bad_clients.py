"""Clients that are slow, many, rude or confused: they get their protocol's error, and other rollouts notice nothing."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from contextlib import contextmanager, suppress

import anyio
import httpx
import pytest
from chat_requests import USER, body
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy.intake import MAX_BODY_BYTES, MAX_OPENINGS, Intake
from clawpipe.actors.proxy.messages import CallError, Fault

pytestmark = pytest.mark.anyio

CHAT = "/chat/completions"
JSON = {"content-type": "application/json"}


@contextmanager
def raw(rollout):
    """A socket to a rollout's listener, for what no HTTP client does."""
    with socket.create_connection(("127.0.0.1", rollout.listener.getsockname()[1]), timeout=10) as sock:
        yield sock


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"content-length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def is_served(rollout, sampler, text: str = "fine") -> bool:
    """Whether a rollout gets an answer."""
    sampler.script.append(text)
    async with rollout.client() as client:
        answer = await client.post(CHAT, json=body({"role": "user", "content": text}))
    return answer.json()["choices"][0]["message"]["content"] == text


async def test_more_calls_at_a_time_than_allowed_are_told_to_try_again(make_proxy, sampler):
    sampler.script = ["one", "two", "three"]
    sampler.hold = anyio.Event()
    async with make_proxy(max_parallel_calls=2) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client, anyio.create_task_group() as group:
            answers = []

            async def ask(text):
                answers.append(await client.post(CHAT, json=body({"role": "user", "content": text})))

            group.start_soon(ask, "a")
            group.start_soon(ask, "b")
            await anyio.sleep(0.3)
            refused = await client.post(CHAT, json=body({"role": "user", "content": "c"}))
            claude = {"anthropic-version": "2023-06-01"}
            asked = {"model": "policy", "max_tokens": 9, "messages": [USER]}
            other = await client.post("/messages", json=asked, headers=claude)
            sampler.hold.set()
        async with rollout.client() as client:
            later = await client.post(CHAT, json=body({"role": "user", "content": "c"}))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert (other.status_code, other.json()["error"]["type"]) == (429, "rate_limit_error")
    assert [answer.status_code for answer in answers] == [200, 200]
    assert later.status_code == 200


async def test_connections_over_the_limit_are_closed_and_the_other_rollout_is_served(make_proxy, sampler):
    async with make_proxy(max_connections=100) as proxy:
        rude, other = await proxy.rollout("r-1"), await proxy.rollout("r-2")
        address = ("127.0.0.1", rude.listener.getsockname()[1])
        held = [socket.create_connection(address, timeout=5) for _ in range(100)]
        await anyio.sleep(0.3)
        more = [socket.create_connection(address, timeout=5) for _ in range(20)]
        assert await is_served(other, sampler)
        await anyio.sleep(0.3)
        for sock in more:
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()
        held.pop().close()
        await anyio.sleep(0.2)
        assert await is_served(rude, sampler, "again")
        for sock in held:
            sock.close()


async def test_a_hundred_calls_at_a_time_from_one_sandbox_leave_the_others_alone(make_proxy, sampler):
    sampler.script = [f"answer {n}" for n in range(32)]
    sampler.hold = anyio.Event()
    async with make_proxy() as proxy:
        rude, other = await proxy.rollout("r-1"), await proxy.rollout("r-2")
        async with rude.client(limits=httpx.Limits(max_connections=None)) as client, anyio.create_task_group() as group:
            found = []

            async def ask(n):
                found.append((await client.post(CHAT, json=body({"role": "user", "content": str(n)}))).status_code)

            for n in range(100):
                group.start_soon(ask, n)
            await anyio.sleep(0.5)
            sampler.hold.set()
            assert await is_served(other, sampler)
    assert (found.count(200), found.count(429)) == (32, 68)


async def test_a_client_that_reads_nothing_holds_up_nobody(make_proxy, sampler):
    long = "word " * 400_000
    sampler.script = [long]
    async with make_proxy(settle_timeout_s=1.0, context_tokens=10**7, max_completion_tokens=10**7) as proxy:
        deaf, other = await proxy.rollout("r-1"), await proxy.rollout("r-2")
        asked = json.dumps(body(stream=True)).encode()
        deaf.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        deaf.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with raw(deaf) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head(len(asked)) + asked)
            await anyio.sleep(1.0)
            assert await is_served(other, sampler)
            with anyio.fail_after(10):
                settled = await deaf.settle()
        await deaf.close()
        manifest = await proxy.manifest()
    assert settled.num_calls == 1
    assert [(call.delivered, call.cut) for call in manifest.calls] == [(False, False)]


async def test_clients_that_leave_in_the_middle_of_anything_leave_the_proxy_alive(make_proxy, sampler):
    sampler.script = ["late"]
    sampler.hold = anyio.Event()
    asked = json.dumps(body(stream=True)).encode()
    beginnings = [b"", b"GE", b"\0\xff\r\n\r\n", b"GET / HTTP/9\r\n\r\n", head(10), head(500) + asked[:20]]
    async with make_proxy() as proxy:
        rude, other = await proxy.rollout("r-1"), await proxy.rollout("r-2")
        for beginning in beginnings:
            with raw(rude) as sock:
                sock.sendall(beginning)
        with raw(rude) as sock:
            sock.sendall(head(len(asked)) + asked)
            await anyio.sleep(0.3)
        sampler.hold.set()
        assert await is_served(other, sampler)
        assert await is_served(rude, sampler, "here again")


@pytest.mark.parametrize(
    ("headers", "data", "status", "words"),
    [
        ({"content-type": "text/plain;charset=UTF-8"}, b"{}", 415, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, b"a=b", 415, "application/json"),
        ({**JSON, "content-encoding": "zstd"}, b"{}", 415, "zstd"),
        ({**JSON, "content-encoding": "gzip"}, b"{}", 400, "gzip"),
        ({**JSON, "content-encoding": "gzip"}, gzip.compress(b"{}")[:-4], 400, "ends early"),
        ({**JSON, "content-encoding": "gzip"}, gzip.compress(b" " * (MAX_BODY_BYTES + 1)), 413, "bytes"),
        (JSON, b" " * (MAX_BODY_BYTES + 1), 413, "bytes"),
        (JSON, b"[" * (MAX_OPENINGS + 1), 413, "lists and objects"),
        (JSON, json.dumps(body(*[USER] * 5000)).encode(), 400, "5000 messages"),
        (JSON, json.dumps({**body(), "model": "gpt"}).encode(), 404, "'gpt' does not exist"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bodies_that_are_not_taken_get_the_protocols_error(make_proxy, sampler, headers, data, status, words):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post(CHAT, content=data, headers=headers)
        assert await is_served(rollout, sampler)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


async def test_an_unknown_model_has_the_code_that_clients_look_for(make_proxy):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            openai = await client.post(CHAT, json={**body(), "model": "gpt"})
            anthropic = await client.post("/messages", json={"model": "x", "max_tokens": 1, "messages": [USER]})
    assert (openai.json()["error"]["code"], openai.json()["error"]["param"]) == ("model_not_found", "model")
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    "headers", [{}, JSON, {"content-type": "application/problem+json; charset=utf-8"}, {"content-type": ""}], ids=str
)
async def test_json_is_read_whatever_it_is_called(make_proxy, sampler, headers):
    sampler.script = ["yes"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post(CHAT, content=json.dumps(body()).encode(), headers=headers)
    assert response.status_code == 200


async def test_a_packed_body_is_unpacked(make_proxy, sampler):
    sampler.script = ["yes"]
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        packed = gzip.compress(json.dumps(body()).encode())
        async with rollout.client() as client:
            response = await client.post(CHAT, content=packed, headers={**JSON, "content-encoding": "GZIP"})
    assert response.status_code == 200


async def test_a_body_that_comes_too_slowly_is_given_up():
    async def trickle():
        await anyio.sleep(0.05)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with anyio.fail_after(5), pytest.raises(CallError, match=r"within 0\.2 s") as refused:
        await Intake(timeout_s=0.2).take({}, trickle, anyio.Event())
    assert refused.value.fault is Fault.SLOW


async def test_a_body_without_end_is_not_read_for_ever():
    taken = []

    async def flood():
        taken.append(1)
        return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

    with pytest.raises(CallError, match="bytes"):
        await Intake().take({}, flood, anyio.Event())
    assert len(taken) == 65


async def test_large_bodies_are_read_beside_the_event_loop():
    free = threading.Event()

    async def others() -> None:
        free.set()

    def reader(data: bytes) -> bool:
        return free.wait(5)

    async with anyio.create_task_group() as group:
        group.start_soon(others)
        assert await Intake().read(b" " * 2**20, reader)


anything = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"", b"{}", b"[]", b'{"model": "policy"}', b'{"messages": []}', b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}"]
    ),
)
paths = st.sampled_from(
    ["/chat/completions", "/messages", "/messages/count_tokens", "/responses", "/models", "/x", "/%00"]
)
kinds = st.sampled_from([None, "application/json", "text/html", "application/json; charset=utf-16", "\u00e9"])


async def test_whatever_bytes_come_the_answer_is_no_fault_of_ours(make_proxy, sampler):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        with httpx.Client(
            base_url=f"http://127.0.0.1:{rollout.listener.getsockname()[1]}/v1", trust_env=False
        ) as client:

            @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
            @given(
                data=anything,
                path=paths,
                kind=kinds,
                method=st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "HEAD"]),
            )
            def refused(data, path, kind, method):
                headers = {} if kind is None else {"content-type": kind.encode("latin-1")}
                response = client.request(method, path, content=data, headers=headers)
                assert response.status_code < 500, (method, path, data)
                if response.status_code != 200 and method != "HEAD":
                    assert response.json()["error"]["message"]

            await anyio.to_thread.run_sync(refused)
        assert await is_served(rollout, sampler)
