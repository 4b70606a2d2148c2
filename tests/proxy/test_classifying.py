"""A hostile agent's requests meet the classifiers: whatever they hold, the proxy lives on."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from conversation import USER, conversation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.dialects.chat import Chat
from clawpipe.actors.proxy.dialects.dialect import Dialect, read_body
from clawpipe.actors.proxy.dialects.responses import Responses
from clawpipe.actors.proxy.identity import Session
from clawpipe.actors.proxy.messages import Answer, CallError
from clawpipe.pipeline.config import (
    ClaudeCodeConfig,
    CodexConfig,
    ModelConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
    TinyModelConfig,
)
from clawpipe.pipeline.records import Role

pytestmark = pytest.mark.anyio

KINDS = (OpenClawConfig, ClaudeCodeConfig, CodexConfig, OpenCodeConfig, QwenCodeConfig)
MODEL = ModelConfig(tiny=TinyModelConfig(), context_tokens=65536)


async def test_a_call_that_its_classifier_falls_over_is_of_no_known_role(renderer, parser, sampler, caplog):
    sampler.script = ["one", "two"]
    caplog.set_level("WARNING", "clawpipe")

    def fall_over(wire: Any) -> Role:
        raise KeyError(wire.body["model"])

    async with conversation(renderer, parser, sampler) as talk:
        talk.session = Session("r", 1, "oddclaw", fall_over)
        await talk.ask(USER)
        await talk.ask(USER, USER)
    assert [record.role for record in talk.stream.records] == [Role.UNKNOWN] * 2
    [warning] = [record.fields for record in caplog.records]
    assert warning == {"harness": "oddclaw", "error": "KeyError('m')"}


CACHED = {"cache_control": {"type": "ephemeral"}}
HEADERS = ("x-claude-code-agent-id", "x-codex-turn-metadata", "x-parent-session-id", "x-openai-subagent", "traceparent")
TOOL = {"name": "Bash", "description": "d", "input_schema": {"type": "object", "properties": {}, "required": []}}
FUNCTION = {"type": "function", "function": {"name": "exec", "parameters": {"type": "object"}}}
BODIES = {
    "/messages": {
        "model": "policy",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", **CACHED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", **CACHED}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "b", **CACHED}]},
            {"role": "system", "content": "note"},
        ],
        "tools": [{**TOOL, **CACHED}],
    },
    "/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "tools": [FUNCTION],
    },
    "/responses": {
        "model": "policy",
        "instructions": "i",
        "input": [
            {"role": "developer", "content": "s"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "exec", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "exec", "parameters": {"type": "object"}}],
    },
}
HALF, DEEP = "\ud83d", json.loads("[" * 300 + "]" * 300)
DIALECTS: dict[str, Dialect] = {"/messages": Messages(), "/chat/completions": Chat(), "/responses": Responses()}
crafted = st.dictionaries(
    st.sampled_from(HEADERS), st.text(max_size=8) | st.sampled_from(["[]", '{"thread_source": []}'])
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=5) | st.just(HALF),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "type", "name"]), inner),
    max_leaves=5,
) | st.just(DEEP)


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a few of its values, at any depth, replaced or gone."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        inside: Any = body
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(inside[key], dict | list) or draw(st.integers(0, 3)) == 0:
                if draw(st.booleans()):
                    inside[key] = copy.deepcopy(draw(values))
                else:
                    del inside[key]
                break
            inside = inside[key]
    return body


@pytest.mark.parametrize("path", list(BODIES))
async def test_no_body_and_no_header_of_any_protocol_raises_what_is_no_answer_to_a_client(
    renderer, parser, sampler, path
):
    classifiers = [make_harness(config(), MODEL).classify for config in KINDS]
    roles: list[Role] = []

    def classify_by_all(wire: ModelCall) -> Role:
        roles.extend(classify(wire) for classify in classifiers)
        return roles[-1]

    answered = 0
    async with conversation(renderer, parser, sampler) as talk:
        for body, headers in [(BODIES[path], {}), *examples(st.tuples(changed(BODIES[path]), crafted), 150)]:
            session = Session("r", 1, "any", classify_by_all)
            sampler.script = ["yes"]
            try:
                read = read_body(json.dumps(body).encode())
                ask = DIALECTS[path].read(read)
                wire = ModelCall(path=f"/v1{path}", headers=headers, body=read)
                call = await talk.calls.start(session, ask, wire)
            except (CallError, RecursionError):
                continue
            await call.done.wait()
            assert isinstance(call.outcome, Answer)
            assert DIALECTS[path].whole(ask, call.outcome)
            answered += 1
    assert answered > 10
    assert len(roles) > 10


def examples(strategy: st.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def take(example: Any) -> None:
        found.append(example)

    take()
    return found
