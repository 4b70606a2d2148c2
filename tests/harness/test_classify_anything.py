"""A request may be anything, since the agent can write it: no classifier falls over it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawpipe.actors.harness.base import ModelCall
from clawpipe.actors.harness.codex import TURN_HEADER
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.harness.request import objects, tool_names
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    ClaudeCodeConfig,
    CodexConfig,
    HarnessConfig,
    ModelConfig,
    OpenClawConfig,
    OpenCodeConfig,
    QwenCodeConfig,
)
from clawpipe.pipeline.records import Role

ENTRIES = [AgentLoopConfig(), ClaudeCodeConfig(), CodexConfig(), OpenClawConfig(), OpenCodeConfig(), QwenCodeConfig()]
PATHS = ("/v1/messages", "/v1/responses", "/v1/chat/completions", "")
WORDS = ("role", "content", "type", "text", "name", "function", "cache_control", "user", "assistant", "custom")
ODD = (None, True, 1, 0.5, "user", [], {}, [None], [1], ["a"], [[]], [{}], {"a": 1}, [{"role": []}], [{"function": 1}])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=12,
)
KEYS = ("messages", "input", "tools", "system", "instructions")
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON))


def classify(entry: HarnessConfig, call: ModelCall) -> Role:
    return make_harness(entry, ModelConfig(path="/model")).classify(call)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.name))
@settings(deadline=None)
@given(path=st.sampled_from(PATHS), body=BODIES, header=st.text())
def test_every_request_has_a_role(entry: HarnessConfig, path: str, body: dict[str, object], header: str) -> None:
    assert classify(entry, ModelCall(path=path, headers={TURN_HEADER: header}, body=body)) in Role


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.name))
def test_any_kind_of_value_may_stand_where_history_and_tools_are_looked_for(entry: HarnessConfig) -> None:
    for path, history, tools in itertools.product(PATHS, ODD, ODD):
        body = {"messages": history, "input": history, "system": history, "tools": tools}
        assert classify(entry, ModelCall(path=path, headers={}, body=body)) in Role


def test_only_a_list_holds_objects_and_only_those_are_taken() -> None:
    assert objects([1, {"a": 1}, None, [{}]]) == [{"a": 1}]
    assert objects({"a": {}}) == objects("text") == objects(None) == []


def test_tools_have_names_in_every_protocol() -> None:
    assert tool_names({"tools": [{"type": "function", "function": {"name": "a"}}, {"name": "b"}, 1]}) == {"a", "b"}
