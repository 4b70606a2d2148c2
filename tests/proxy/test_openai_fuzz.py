"""Whatever a body of OpenAI's protocols holds, it is answered or refused; the server never fails over it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_requests import CHAT_EXEC, EXEC, call, output

from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.messages import Answer, Ask, CallError, Fault, Head, ToolCall, Turn

MADE = {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"cmd": "ls"}'}}
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}]
CHAT_BODY = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [MADE]},
        {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    ],
    "tools": [CHAT_EXEC],
    "tool_choice": {"type": "function", "function": {"name": "exec"}},
    "max_tokens": 9,
    "stop": ["x"],
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
}
SPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [EXEC]}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
RESPONSES_BODY = {
    "model": "policy",
    "instructions": "i",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [CUSTOM]},
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": PARTS},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "reasoning", "encrypted_content": "Y2xhd3BpcGU6/w=="},
        {"type": "function_call", "call_id": "c", "name": "exec", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "tool_search_call", "call_id": "e", "arguments": {"query": "q"}},
        {"type": "local_shell_call", "call_id": "f", "action": {"type": "exec", "command": ["ls"]}},
        output("c", "r"),
        {"type": "custom_tool_call_output", "call_id": "d", "output": PARTS},
        {"type": "tool_search_output", "call_id": "e", "tools": [SPACE]},
        {"type": "local_shell_call_output", "id": "f", "output": "r"},
        {"type": "agent_message", "content": [{"type": "input_text", "text": "t"}]},
    ],
    "tools": [EXEC, SPACE, CUSTOM, SEARCH, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "stream": True,
    "reasoning": {"effort": "high"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
}
ABSENT = object()
json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TURNS = [
    Turn(text="a", thinking="b", calls=(ToolCall("call_1", "n__exec", '{"a": 1}'), ToolCall("call_2", "patch", "{}"))),
    Turn(calls=(ToolCall("call_1", "patch", '{"input": "x"}'), ToolCall("call_2", "tool_search", '{"query": "x"}'))),
    Turn(truncated=True),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def changed(draw: st.DrawFn, sound: dict[str, Any]) -> dict[str, Any]:
    """A sound body with up to three places taken out, or changed into anything or into something from elsewhere."""
    body = copy.deepcopy(sound)
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(sorted(places(body), key=repr)))
        inside: Any = body
        for key in path:
            inside = inside[key]
        elsewhere = st.sampled_from([body.get("input"), body.get("tools"), "", "exec"])
        value = draw(st.just(ABSENT) | json_values | elsewhere)
        if value is not ABSENT:
            inside[last] = copy.deepcopy(value)
        else:
            del inside[last]
    return body


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changed(CHAT_BODY))
def test_any_chat_body_is_read_and_answered_or_refused(body):
    read_and_answer(Chat(), body)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changed(RESPONSES_BODY))
def test_any_responses_body_is_read_and_answered_or_refused(body):
    read_and_answer(Responses(), body)


def read_and_answer(dialect: Chat | Responses, body: dict[str, Any]) -> None:
    ask = read(dialect, body)
    if isinstance(ask, CallError):
        status, said = dialect.error(ask)
        assert (ask.fault, status, bool(json.loads(said)["error"]["message"])) == (Fault.INVALID, 400, True)
        return
    assert ask.digest()
    for turn in TURNS:
        answer = Answer(head=Head(id="a", prompt_tokens=1, created_s=0.0), turn=turn, completion_tokens=1)
        json.loads(dialect.whole(ask, answer))
        events = dialect.opening(ask, answer.head) + b"".join(dialect.events(ask, answer))
        assert events.endswith(b"\n\n")


def read(dialect: Chat | Responses, body: dict[str, Any]) -> Ask | CallError:
    try:
        return dialect.read(body)
    except CallError as err:
        return err


@pytest.mark.anyio
async def test_no_body_makes_the_server_fail(make_proxy, sampler):
    asked = [("/chat/completions", body) for body in examples(changed(CHAT_BODY), 100)]
    asked += [("/responses", body) for body in examples(changed(RESPONSES_BODY), 100)]
    sampler.script = [call("exec", cmd="ls")] * len(asked)
    statuses = []
    async with make_proxy() as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            for path, body in asked:
                response = await client.post(path, content=json.dumps(body).encode())
                statuses.append(response.status_code)
                assert response.status_code in (200, 400, 404), (path, body, response.text)  # 404: another model's name
                assert '"error":{' not in response.text or response.status_code != 200, (path, body, response.text)
    assert {200, 400} <= set(statuses)


def examples(strategy: st.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategy)
    def take(example: Any) -> None:
        found.append(example)

    take()
    return found
