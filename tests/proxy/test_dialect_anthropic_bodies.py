"""Whatever a body of Anthropic Messages holds, it is answered or refused with its fault; the server never fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_requests import EXEC, USER, body, text, user
from hypothesis import given, settings
from hypothesis import strategies as st

from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.dialects.anthropic_request import read_count
from clawpipe.actors.proxy.messages import CallError, Fault

json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KINDS = (
    "text", "image", "document", "search_result", "tool_result", "tool_use", "thinking", "redacted_thinking",
    "tool_reference", "other",
)  # fmt: skip
KEYS = (
    "text", "source", "title", "content", "tool_use_id", "is_error", "id", "name", "input", "thinking", "signature",
    "data", "tool_name",
)  # fmt: skip
FIELDS = ("system", "tool_choice", "stop_sequences", "stream", "metadata", "thinking", "mcp_servers", "output_config")
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["a.org"]}
SEARCH = {"type": "tool", "name": "web_search"}  # Claude Code's own call for its tool WebSearch has these two
words = st.text(max_size=4)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)}, optional=dict.fromkeys(KEYS, words | json_values)
) | st.fixed_dictionaries({"type": st.just("text"), "text": words})
contents = st.one_of(words, st.lists(blocks, max_size=3), json_values)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"])}, optional={"content": contents}
)
tools = st.fixed_dictionaries({"name": st.just("a"), "input_schema": json_values})
sound = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": words | st.lists(blocks, min_size=1, max_size=2)}
)
broken = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(turns, max_size=3) | json_values,
        "tools": st.lists(tools, max_size=2),
        "model": st.just("policy"),
        "max_tokens": st.just(5) | json_values,
        **dict.fromkeys(FIELDS, json_values),
    },
)
likely = st.fixed_dictionaries(
    {
        "model": st.just("policy"),
        "max_tokens": st.integers(1, 2**70),
        "messages": st.lists(sound, min_size=1, max_size=3),
    },
    optional={"tools": st.lists(tools, max_size=2), "metadata": json_values, "thinking": json_values},
)
bodies = broken | likely


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "The body is not valid JSON"),
        (b'{"model": "m", "max_tokens": 5}', "messages: Field required"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}', "model: Field required"),
        (json.dumps(body(max_tokens=0)).encode(), "max_tokens: "),
        (json.dumps({"model": "m", "messages": [USER]}).encode(), "max_tokens: Field required"),
        (json.dumps({**body(), "messages": []}).encode(), "messages: "),
        (json.dumps(body(user(text(" ")))).encode(), "messages: text content blocks must contain"),
        (json.dumps(body({"role": "wizard", "content": "x"})).encode(), "messages.0.role: "),
        (json.dumps(body(USER, user(text("a"), {"type": "text"}))).encode(), "messages.1.content.1.text: Field"),
        (json.dumps(body(user({"type": "server_tool_use"}))).encode(), "messages.0.content.0.type: "),
        (json.dumps(body(user({"type": "tool_use", "id": "a"}))).encode(), "messages.0.content.0.type: "),
        (json.dumps(body(USER, {"role": "assistant", "content": "I"})).encode(), "messages.1.role: "),
        (json.dumps(body(tools=[WEB_SEARCH], tool_choice=SEARCH)).encode(), "tools.0.type: "),
        (json.dumps(body(tools=[EXEC, {"type": "bash_20250124", "name": "bash"}])).encode(), "tools.1.type: "),
        (json.dumps(body(tools=[{"name": "w", "type": "w" * 10**6}])).encode(), "tools.0.type: "),
        (json.dumps(body(tools=[{"name": "w"}])).encode(), "tools.0.input_schema: Field required"),
        (json.dumps(body(tools=[EXEC, {**EXEC, "name": "a b"}])).encode(), "tools.1.name: "),
        (json.dumps(body(tool_choice={"type": "must"})).encode(), "tool_choice.type: "),
        (json.dumps(body(stop_sequences=["a", " "])).encode(), "stop_sequences.1: "),
        (json.dumps(body(mcp_servers=[{}])).encode(), "mcp_servers: "),
        (json.dumps(body(system=[{"type": "image"}])).encode(), "system.0.type: "),
    ],
)
@pytest.mark.anyio
async def test_a_bad_body_is_refused_with_the_path_of_the_fault(make_proxy, content, message):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            response = await client.post("/messages", content=content)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["error"]["message"].startswith(message), error
    assert len(response.content) < 5000


@pytest.mark.anyio
async def test_unknown_paths_are_refused_in_the_form_that_the_client_speaks(make_proxy):
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            below = await client.post("/messages/batches", json={})
            headed = await client.post("/files", json={}, headers={"anthropic-version": "2023-06-01"})
            other = await client.post("/files", json={})
    for response in (below, headed):
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert other.json()["error"]["code"] == "not_found"


@settings(max_examples=500, deadline=None)
@given(bodies)
def test_any_body_is_read_or_refused(asked):
    for read in (Messages().read, read_count):
        if (refusal := refused(read, asked)) is None:
            assert read(asked).messages
            assert read(asked).digest()
        else:
            assert (refusal.fault, bool(refusal.message)) == (Fault.INVALID, True)


def refused(read: Any, asked: dict[str, Any]) -> CallError | None:
    try:
        read(asked)
    except CallError as err:
        return err
    return None


@pytest.mark.anyio
async def test_no_body_makes_the_server_fail(make_proxy, sampler):
    asked = examples(bodies, 150)
    sampler.script = ["Yes."] * len(asked)
    statuses = []
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for one in asked:
                for path in ("/messages", "/messages/count_tokens"):
                    response = await client.post(path, content=json.dumps(one).encode())
                    statuses.append(response.status_code)
                    assert response.status_code in (200, 400), (path, one, response.text)
    assert set(statuses) == {200, 400}


def examples(strategy: st.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=number, deadline=None, database=None)
    @given(strategy)
    def take(example: Any) -> None:
        found.append(example)

    take()
    return found
