"""Claude Code's recorded conversations, sent to a proxy that answers as the recording says it was answered.

Whatever the program does to its history, the next prompt has to begin with the tokens of the one before, and
with what was sampled after them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_requests import recorded, recorded_block, recorded_body, scenarios

from clawpipe.actors.proxy.dialects.anthropic import Messages
from clawpipe.actors.proxy.messages import Speaker

NEXT = "<|im_start|>assistant\n"
# How a request stands to those before it: "kept" continues an answer, "dropped" a prompt whose answer the program
# did not keep, "same" repeats one, "new" begins another conversation. The rule is new, then kept.
UNUSUAL = {
    "claude-compact": "new kept kept dropped new kept kept",
    "claude-ctxerr": "new kept kept dropped new kept",
    "claude-delay_api15": "new kept same",
    "claude-drop": "new kept same same",
    "claude-drop1": "new kept same same",
    "claude-empty": "new kept dropped",
    "claude-emptytext": "new kept dropped",
    "claude-mcp": "new new kept",  # its tools change
    "claude-stall0": "new kept same",
    "claude-sub": "new kept new new kept kept kept kept kept",
    "claude-sub_cap1": "new new kept kept kept",
    "claude-sub_nobg": "new new new kept kept kept kept kept",
    **dict.fromkeys((f"claude-thr{n}" for n in ("34000", "40000", "50000", "52000", "56000")), "new kept dropped new"),
    "claude-thrA50000": "new kept dropped new",
}
SPOILT = {"claude-badjson"}  # answered with calls that this proxy never lets out


@pytest.fixture(scope="module")
def parser(make_parser):
    """A model that thinks."""
    return make_parser(reasoning_parser="qwen3")


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", [name for name in scenarios() if name not in SPOILT])
async def test_every_recorded_request_continues_the_tokens_before_it(make_proxy, sampler, scenario):
    lines = [line for line in recorded(scenario) if "http" not in line["response"]]
    ids: dict[str, str] = {}
    async with make_proxy(context_tokens=10**6, retry_window_s=60) as proxy:
        rollout = await proxy.rollout()
        async with rollout.client() as client:
            found = [await relation(client, sampler, line, ids) for line in lines]
    usual = " ".join(["new", *["kept"] * (len(lines) - 1)])
    assert " ".join(found) == UNUSUAL.get(scenario, usual)


async def relation(client: Any, sampler: Any, line: dict[str, Any], ids: dict[str, str]) -> str:
    """Sends a recorded request, has it answered as recorded, and says how its prompt stands to the earlier ones.

    `ids`: the recorded ids of tool calls, to those that were given here.
    """
    earlier = list(zip(sampler.prompts, sampler.said, strict=True))
    sampler.script = [spoken(line["response"]["blocks"])]
    asked = json.dumps({**recorded_body(line), "stream": False})
    for old, new in ids.items():
        asked = asked.replace(old, new)
    answer = (await client.post("/messages", content=asked.encode())).json()
    calls = [block["id"]["h"] for block in line["response"]["blocks"] if block["t"] == "tool"]
    given = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    ids.update(zip(calls, given, strict=True))
    if len(sampler.prompts) == len(earlier):
        return "same"
    opening = len(sampler.ids(NEXT))
    begun = [(before, out) for before, out in earlier if starts(sampler.prompts[-1], before[:-opening])]
    if not begun:
        return "new"
    before, out = max(begun, key=lambda call: len(call[0]))
    return "kept" if starts(sampler.prompts[-1], before + out.ids.tolist()) else "dropped"


def starts(tokens: list[int], prefix: list[int]) -> bool:
    return tokens[: len(prefix)] == prefix


def spoken(blocks: list[dict[str, Any]]) -> str:
    """The text that a model samples to say a recorded answer."""
    made = [recorded_block(block) for block in blocks]
    thinking = "\n".join(block["thinking"] for block in made if block["type"] == "thinking")
    words = "\n".join(block["text"] for block in made if block["type"] == "text")
    calls = [{"name": b["name"], "arguments": b["input"]} for b in made if b["type"] == "tool_use"]
    called = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return (f"<think>{thinking}</think>" if thinking else "") + words + called


@pytest.mark.parametrize("name", [*scenarios(), "openclaw-odd_anth"])
def test_every_recorded_request_can_be_read(name):
    for line in recorded(name):
        ask = Messages().read(recorded_body(line))
        assert (ask.max_tokens, ask.stream) == (line["max_tokens"], line["stream"])
        assert len(ask.tools) == len(line["tools"])
        results = sum(part["t"] == "tool_result" for m in line["messages"] for part in m["content"])
        assert sum(message.speaker is Speaker.TOOL for message in ask.messages) == results
