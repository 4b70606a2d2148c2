"""The role `demos`: scripted demonstrations of the filing tasks, for the tokenizer and the cold start.

A demonstration is what a harness and a competent model say to each other. The model's side is scripted, as the raw
text that it should sample. The harness's side is its own: that of agentloop comes from agentloop's own functions,
whose tools run for real on a temporary workspace; the others are run as they are, a few times, and recorded
(`recording`). A share of them is flawed on purpose, so that reinforcement learning has something to unlearn: half of
these drop the folder of the path, half leave out a closing brace of the call.

The written file has one JSON object per line. {"kind": "conversation", "tools": [OpenAI tool objects], "messages":
[...], "flawed": bool, "held_out": bool}: an assistant message's `content` is the raw text, and the conversation ends
with one. {"kind": "recording", "name", "harness", "pieces": [{"text", "sampled"}], "blanks": [...]} and later
{"kind": "filled", "of": its name, "words": [what takes the places of the blanks], "flawed", "held_out"}. Held-out
demonstrations are clean, and none of them is among the others.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from clawpipe.actors.harness import agentloop_program as program
from clawpipe.actors.harness.steps import CALL_CLOSES, CALL_OPENS
from clawpipe.actors.recording.rolls import Roll, fillings, make_rolls
from clawpipe.actors.recording.takes import Flaw, Shape, Take, script, shapes, takes
from clawpipe.actors.tasks.filing import Errand, errands
from clawpipe.pipeline.config import AgentLoopConfig, Config, FilingTasksConfig, HarnessConfig, TinyModelConfig
from clawpipe.pipeline.errors import ClawpipeError, TaskError
from clawpipe.pipeline.models import recorded_harnesses
from clawpipe.pipeline.processes import until_stopped
from clawpipe.pipeline.runtime import Runtime

NUM_CLEAN = 3000
NUM_FLAWED = 1000
NUM_HELD_OUT = 256
SHARED_MEMORY = Path("/dev/shm")

Message = dict[str, Any]


def main(config: Config, runtime: Runtime) -> None:
    """Writes `runtime.demos_path`. The same configuration gives the same file, but for what harnesses say of time."""
    target = Path(runtime.demos_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in _rows(config, runtime):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _rows(config: Config, runtime: Runtime) -> Iterator[dict[str, Any]]:
    recorded = recorded_harnesses(config)
    if len(recorded) < len(config.harness):
        yield from demonstrations(config)
    if recorded:
        yield from _recorded(config, runtime, recorded)


def _recorded(config: Config, runtime: Runtime, harnesses: Sequence[HarnessConfig]) -> Iterator[dict[str, Any]]:
    sources, dice = _sources(config), _dice(config, "recordings")
    # Drawn first: a family that is too small is said before minutes of recording.
    picked = list(_distinct_errands(sources, _dice(config, "recorded demonstrations")))
    wanted = [take for entry in harnesses for take in takes(entry, shapes(sources), dice)]
    rolls = anyio.run(_record, config, runtime, wanted)
    yield from (roll.line() for roll in rolls.values())
    yield from fillings(rolls, picked, dice)


async def _record(config: Config, runtime: Runtime, wanted: Sequence[Take]) -> Mapping[tuple[str, Shape], Roll]:
    """Ends in order when it is told to stop: what is recorded by then must not lie about."""
    async with until_stopped():
        return await make_rolls(config, runtime, wanted)
    raise ClawpipeError("stopped before all demonstrations were recorded; start again")


def demonstrations(config: Config) -> Iterator[dict[str, Any]]:
    """The rows of the file. Their tasks come from the run's filing sources.

    A run on other tasks, which have no scripts, gets the default family: its model then knows how to call
    tools, and nothing of the tasks.
    """
    sources = _sources(config)
    loops = [entry for entry in config.harness if isinstance(entry, AgentLoopConfig)] or [AgentLoopConfig()]
    dice = _dice(config, "demonstrations")
    with tempfile.TemporaryDirectory(prefix="clawpipe-demos-", dir=_in_memory()) as folder:
        picked = _distinct_errands(sources, dice)
        for number, (errand, held_out, flaw) in enumerate(picked):
            harness = loops[number % len(loops)]
            workspace = Path(folder, str(number))
            messages = demonstrate(errand, flaw, harness, workspace)
            yield {
                "kind": "conversation",
                "tools": program.TOOLS,
                "messages": messages,
                "flawed": flaw is not None,
                "held_out": held_out,
            }


def demonstrate(errand: Errand, flaw: Flaw | None, harness: AgentLoopConfig, workspace: Path) -> list[Message]:
    """The conversation about one errand; `workspace` is made here and is left as the tools leave it."""
    for path, text in errand.files.items():
        target = workspace / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    tools = program.Tools(str(workspace))
    messages = program.opening(harness.system, errand.prompt)
    for turn in script(errand, flaw, harness):
        messages.append({"role": "assistant", "content": turn})
        answers, finished = program.answer(as_message(turn), tools)
        if finished:
            break
        messages += [{"role": answer["role"], "content": answer["content"]} for answer in answers]
    return messages


def as_message(turn: str) -> Message:
    """The turn as agentloop gets it from the proxy: a call that cannot be parsed arrives as text."""
    try:
        call = json.loads(turn.removeprefix(CALL_OPENS).removesuffix(CALL_CLOSES))
    except ValueError:
        return {"role": "assistant", "content": turn}
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def _sources(config: Config) -> list[FilingTasksConfig]:
    return [source for source in config.tasks if isinstance(source, FilingTasksConfig)] or [FilingTasksConfig()]


def _dice(config: Config, use: str) -> random.Random:
    """The seed is the model's: it is cached across runs."""
    return random.Random(f"{use}-{(config.model.tiny or TinyModelConfig()).seed}")


def _in_memory() -> str | None:
    """A folder in memory, if there is one: thousands of small workspaces are slow on a disk."""
    return str(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None


def _distinct_errands(
    sources: list[FilingTasksConfig], dice: random.Random
) -> Iterator[tuple[Errand, bool, Flaw | None]]:
    """(errand, held out, flaw): first the held-out ones, then others than these, clean and flawed mixed."""
    held_out = list(_draw(sources, dice, NUM_HELD_OUT))
    yield from ((errand, True, None) for errand in held_out)
    taken = {(errand.prompt, errand.content) for errand in held_out}
    flaws: list[Flaw | None] = [None] * NUM_CLEAN + [*Flaw] * (NUM_FLAWED // 2)
    dice.shuffle(flaws)
    others = (e for e in _draw(sources, dice, 2 * len(flaws)) if (e.prompt, e.content) not in taken)
    for flaw in flaws:
        errand = next(others, None)
        if errand is None:
            raise TaskError(
                f"[[tasks]] {sources[0].name}: the family is too small for {len(flaws)} demonstrations beside "
                f"{NUM_HELD_OUT} held-out ones; raise its folders, stems or rows"
            )
        yield errand, False, flaw


def _draw(sources: list[FilingTasksConfig], dice: random.Random, count: int) -> Iterator[Errand]:
    """`count` errands, the sources in turn."""
    drawn = [errands(source, dice, count) for source in sources]
    for number in range(count):
        yield next(drawn[number % len(drawn)])
