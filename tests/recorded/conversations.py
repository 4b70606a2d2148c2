"""The text-free recordings of real harnesses as call records: one token for every block of a request or an answer.

A prompt is the instructions, the tools as a whole, and the blocks of the messages; a completion is the blocks that
the scripted server answered and a mark for the end of the turn. Two blocks are one token when they are equal: who
said it, the text's bytes, or the tool, its parsed arguments and the call's id without punctuation. A text of nothing
but white space is no block. Nothing is given back for a turn that the harness wrote anew, as the proxy's grafting
would: what the tree makes of a history that differs is what the tests look at.

A request that the server refused was never sampled and has no record. An answer that it broke off was sampled whole,
since the proxy has an answer's record before it sends the first word, and was not delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from clawpipe.actors.proxy.prefixes import PrefixIndex
from clawpipe.pipeline.packing import Branch
from clawpipe.pipeline.records import (
    CallRecord,
    FinishReason,
    IntArray,
    Role,
    VersionSpan,
    float_bytes,
    int_bytes,
)
from clawpipe.pipeline.segments import Selection, select
from clawpipe.pipeline.tree import PrefixTree, build, resolve
from harness.recordings import Recorded, recorded, scenarios
from harness.test_classify_claude_code import expected as claude_role
from harness.test_classify_codex import expected as codex_role
from harness.test_classify_openclaw import expected as openclaw_role
from harness.test_classify_opencode import expected as opencode_role
from harness.test_classify_qwen_code import COMPACTIONS as QWEN_COMPACTIONS

ALL = 10**9
END = ("end of turn",)
HARNESSES = ("claude", "codex", "openclaw", "opencode", "qwen")
INSTRUCTIONS = ("system", "developer")
ASSISTANT = ("assistant", "reasoning", "function_call", "custom_tool_call")
MAX_BLOCKS = 64  # of a completion; none has that many
Block = tuple[Any, ...]


@dataclass(frozen=True)
class Sampled:
    """A call that was sampled."""

    number: int  # its line in the recording
    role: Role
    prompt: tuple[Block, ...]
    completion: tuple[Block, ...]
    delivered: bool


def conversation(harness: str, scenario: str) -> list[Sampled]:
    """The sampled calls of a scenario in order of arrival. Skips the test where there are no recordings."""
    lines = recorded(harness, scenario)
    return [
        Sampled(
            number=one.number,
            role=role(harness, scenario, one, lines[0]),
            prompt=tuple(prompt(one.line)),
            completion=tuple(completion(one.line)),
            delivered=one.line["ended"] is None,
        )
        for one in lines
        if "http" not in one.line["response"]
    ]


def role(harness: str, scenario: str, one: Recorded, first: Recorded) -> Role:
    """What the call was for, as the tests of the classifiers know it."""
    match harness:
        case "claude":
            return claude_role(scenario, one)
        case "codex":
            return codex_role(scenario, one, first.call.headers["thread-id"])
        case "opencode":
            return opencode_role(one, first.call.headers["x-session-id"])
        case "openclaw":
            return openclaw_role(scenario, one.number)
    return Role.COMPACTION if one.number in QWEN_COMPACTIONS.get(scenario, ()) else Role.MAIN


def prompt(line: dict[str, Any]) -> Iterator[Block]:
    """The blocks of a request."""
    messages = line["messages"]
    opening = next((at for at, one in enumerate(messages) if one["role"] not in INSTRUCTIONS), len(messages))
    yield from (text("system", block) for block in line["system"])
    yield from blocks_of(messages[:opening])
    if line["tools_h"] is not None:
        yield "tools", line["tools_h"]
    yield from blocks_of(messages[opening:])


def blocks_of(messages: Iterable[dict[str, Any]]) -> Iterator[Block]:
    """The blocks of messages; after what the assistant said in one go comes the end of its turn."""
    for assistant, said in groupby(messages, lambda message: message["role"] in ASSISTANT):
        yield from (block for message in said for block in of_message(message))
        if assistant:
            yield END


def of_message(message: dict[str, Any]) -> Iterator[Block]:
    """The blocks of one message or item."""
    who = message["role"]
    for key in ("reasoning_content", "reasoning"):
        if key in message:
            yield "thinking", message[key]["h"]
    for block in message.get("content") or ():
        yield from of_block(who, block)
    for call in message.get("tool_calls", ()):
        yield tool_call(call)
    if who in ("function_call", "custom_tool_call"):
        yield tool_call(message)
    if "out" in message:
        yield "result", message["id"]["hs"], message["out"]["h"]


def of_block(who: str, block: dict[str, Any]) -> Iterator[Block]:
    """The block, if it says anything."""
    match block["t"]:
        case "thinking" | "reasoning_text" | "summary_text":
            yield "thinking", block["h"]
        case "tool_use" | "tool":
            yield tool_call(block)
        case "tool_result":
            yield "result", block["id"]["hs"], *(part["h"] for part in block["content"])
        case _ if block["n"] > block["ws"][0]:
            yield text(who, block)


def text(who: str, block: dict[str, Any]) -> Block:
    """A text and who said it."""
    return who, block["h"]


def tool_call(call: dict[str, Any]) -> Block:
    """A call of a tool. What cannot be parsed counts as it stands."""
    arguments = call["args"]
    return "call", call["tool"], call["id"]["hs"], arguments["canon"] or arguments["raw"]["h"]


def completion(line: dict[str, Any]) -> Iterator[Block]:
    """The blocks of the scripted answer, and the end of the turn unless the token limit came first."""
    response = line["response"]
    for block in response["blocks"]:
        yield from of_block("assistant", block)
    if response.get("stop") not in ("max_tokens", "length"):
        yield END


def records(calls: Sequence[Sampled], *, hints: bool) -> list[CallRecord]:
    """The calls as the proxy records them: with what it knows to share a prefix, or with every prompt in full."""
    table: dict[Block, int] = {}
    index = PrefixIndex()
    made = []
    for place, call in enumerate(calls):
        prompt_ids, sampled_ids = ids(call.prompt, table), ids(call.completion, table)
        parent, shared = index.longest(prompt_ids) if hints else (None, 0)
        index.insert(np.concatenate([prompt_ids, sampled_ids]), place)
        made.append(record(call, calls[parent].number if parent is not None else None, shared, prompt_ids, sampled_ids))
    return made


def ids(blocks: Iterable[Block], table: dict[Block, int]) -> IntArray:
    """The blocks' numbers, by order of first appearance."""
    return np.array([table.setdefault(block, len(table)) for block in blocks], np.int32)


def record(call: Sampled, parent: int | None, shared: int, prompt_ids: IntArray, sampled_ids: IntArray) -> CallRecord:
    """The record of a call; `parent` is the number of the call that it shares `shared` tokens with."""
    return CallRecord(
        rollout_id="r-000000-0",
        attempt=1,
        call_id=call_id(call.number),
        index=call.number,
        parent=None if parent is None else call_id(parent),
        parent_tokens=shared,
        prompt_delta=int_bytes(prompt_ids[shared:]),
        prompt_tokens=len(prompt_ids),
        completion_ids=int_bytes(sampled_ids),
        logprobs=float_bytes([logprob(call.number, place) for place in range(len(sampled_ids))]),
        versions=(VersionSpan(version=0, start=0, end=len(sampled_ids)),) if len(sampled_ids) else (),
        finish_reason=FinishReason.STOP if call.completion[-1:] == (END,) else FinishReason.LENGTH,
        role=call.role,
        harness="recorded",
        digest="",
    )


def call_id(number: int) -> str:
    """As the proxy names a call."""
    return f"r-000000-0.a1.c{number}"


def logprob(number: int, place: int) -> float:
    """Of a sampled block: says which it is."""
    assert place < MAX_BLOCKS
    return -(number * MAX_BLOCKS + place + 1) / 4096


def sampled_as(value: float) -> tuple[int, int]:
    """(call number, place in its completion) of the block with this logprob."""
    return divmod(round(-4096 * value) - 1, MAX_BLOCKS)


def tree_of(calls: Sequence[Sampled], *, hints: bool = True) -> PrefixTree:
    """The tree of the calls' records."""
    return build(resolve(records(calls, hints=hints)))


def selection(calls: Sequence[Sampled], *, auxiliary: bool = False, leaf_cap: int = ALL) -> Selection:
    """What is trained of the calls, with `[replay] auxiliary = "own_group"` or without."""
    delivered = {call_id(call.number) for call in calls if call.delivered}
    return select(tree_of(calls), leaf_cap=leaf_cap, delivered=delivered, auxiliary=auxiliary)


def trained(branches: Iterable[Branch]) -> list[dict[int, int]]:
    """By branch: call number -> how many of its blocks are trained there."""
    return [dict(Counter(sampled_as(value)[0] for value in branch.logprobs.tolist())) for branch in branches]


def every_recording() -> list[tuple[str, str]]:
    """(harness, scenario) of all recordings that are there."""
    return [(harness, scenario) for harness in HARNESSES for scenario in scenarios(harness)]
