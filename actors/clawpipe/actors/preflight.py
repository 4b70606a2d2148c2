"""What the rollout side can say about a configuration before anything starts. Part of `clawpipe check`.

It also names the tasks: their ids are what the scheduler picks from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.sandbox.bubblewrap import find_programs
from clawpipe.actors.tasks.load import load_tasks
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.checks import Report
from clawpipe.pipeline.config import Config, FilingTasksConfig, ModelConfig, SandboxConfig
from clawpipe.pipeline.errors import ClawpipeError, SandboxError, one_line

PYTHON = "usr/bin/python3"  # in a rootfs: runs agentloop and the graders
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Writes a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}
_PROBE_ARGUMENTS = {"path": "docs/a b.txt", "content": 'He said: "1 < 2"\n\té{}'}


def check(config: Config, offline: bool) -> Report:
    """Problems that would end or spoil the rollouts, one line each, and the ids of all tasks.

    `offline` looks at the configuration alone: tasks that live in files are then neither read nor named.
    """
    tasks, problems = _tasks(config, offline)
    problems += _prompts(config, tasks)
    if not offline:
        problems += [*_programs(config.sandbox), *_harness_programs(config, tasks), *_model(config.model)]
    return Report(problems=tuple(problems), task_ids=tuple(tasks))


def _tasks(config: Config, offline: bool) -> tuple[dict[str, Task], list[str]]:
    tasks: dict[str, Task] = {}
    problems = []
    for source in config.tasks:
        if offline and not isinstance(source, FilingTasksConfig):
            continue
        try:
            tasks |= load_tasks([source])
        except ClawpipeError as err:
            problems.append(one_line(err))
    return tasks, problems


def _prompts(config: Config, tasks: dict[str, Task]) -> list[str]:
    """For each harness the first task that it cannot be given."""
    problems = []
    for entry in config.harness:
        harness = make_harness(entry, config.model)
        for task in tasks.values():
            try:
                harness.launch(task)
            except ClawpipeError as err:
                problems.append(one_line(err))
                break
    return problems


def _programs(sandbox: SandboxConfig) -> Iterator[str]:
    """Programs that start sandboxes, and the one that runs in them. A rootfs that is prepared here has it."""
    try:
        find_programs()
    except SandboxError as err:
        yield one_line(err)
    python = Path(sandbox.rootfs, PYTHON)
    if sandbox.rootfs and not python.exists():
        yield f"[sandbox] rootfs: {python} is missing, and agentloop and graders need it; install it there"


def _harness_programs(config: Config, tasks: dict[str, Task]) -> Iterator[str]:
    """Files that a harness brings into the sandbox and that are not there."""
    for entry in config.harness:
        for task in list(tasks.values())[:1]:
            for path in make_harness(entry, config.model).launch(task).binds.values():
                if not Path(path).is_file():
                    yield f"[[harness]] {entry.name}: its program {path} is missing; install clawpipe anew"


def _model(model: ModelConfig) -> list[str]:
    """A model folder's tokenizer, chat template and tool parser must carry a tool call there and back.

    The tiny model is built later and has its own tests; a missing folder is the learner's to report.
    """
    if not model.path or not Path(model.path, "tokenizer.json").is_file():
        return []
    try:
        return _round_trip(model)
    except ClawpipeError as err:
        return [one_line(err)]


def _round_trip(model: ModelConfig) -> list[str]:
    """What is lost when a call goes through template, tokenizer and parser. Imports vLLM: some ten seconds."""
    from clawpipe.actors.proxy.parse import TurnParser
    from clawpipe.actors.proxy.render import Renderer

    renderer = Renderer(Path(model.path))
    parser = TurnParser(renderer.tokenizer, model.tool_parser, model.reasoning_parser, renderer.generation_prompt)
    said = _said(renderer.tokenizer, renderer.end_of_turn)
    ids = renderer.tokenizer.encode(said, add_special_tokens=False)
    turn = parser.parse(renderer.tokenizer.decode(ids), [_PROBE_TOOL], "probe", truncated=False)
    calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
    if calls == [("write_file", _PROBE_ARGUMENTS)]:
        return []
    return [
        f"[model] path = {model.path}: a tool call does not survive chat template, tokenizer and tool_parser = "
        f"{model.tool_parser!r} (the template writes {said!r}, the parser finds {calls}); choose the tool_parser "
        "and reasoning_parser of this model"
    ]


def _said(tokenizer: Any, end_of_turn: str) -> str:
    """The text of an assistant turn that calls the probe tool, as the model's template writes it."""
    function = {"name": "write_file", "arguments": _PROBE_ARGUMENTS}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Write."}]
    answered: list[dict[str, Any]] = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=[_PROBE_TOOL], tokenize=False, add_generation_prompt=prompt
        )
        return text

    turn = render(answered, False).removeprefix(render(asked, False))
    opening = render(asked, True).removeprefix(render(asked, False))
    return turn.removeprefix(opening).rpartition(end_of_turn)[0]
