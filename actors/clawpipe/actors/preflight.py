"""What the rollout side can say about a configuration before anything starts. Part of `clawpipe check`.

It also names the tasks: their ids are what the scheduler picks from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clawpipe.actors.harness.install import missing, short_of_memory
from clawpipe.actors.harness.load import make_harness
from clawpipe.actors.harness.mcp import problems as mcp_problems
from clawpipe.actors.round_trip import require_parsers, round_trip
from clawpipe.actors.sandbox.bubblewrap import find_programs
from clawpipe.actors.tasks.load import load_tasks
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.checks import Report
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    Config,
    FilingTasksConfig,
    InstalledHarnessConfig,
    ModelConfig,
    SandboxConfig,
)
from clawpipe.pipeline.errors import ClawpipeError, SandboxError, one_line

PYTHON = "usr/bin/python3"  # in a rootfs: runs agentloop and the graders


def check(config: Config, offline: bool) -> Report:
    """Problems that would end or spoil the rollouts, one line each, and the ids of all tasks.

    `offline` looks at the configuration alone: tasks that live in files are then neither read nor named.
    """
    tasks, problems = _tasks(config, offline)
    problems += [*_launches(config, tasks), *_memory(config)]
    if not offline:
        problems += [*_programs(config.sandbox), *_harness_programs(config, tasks), *_model(config.model)]
    return Report(problems=tuple(dict.fromkeys(problems)), task_ids=tuple(tasks))


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


def _launches(config: Config, tasks: dict[str, Task]) -> list[str]:
    """For each harness why it cannot be started, or the first task that it cannot be given."""
    problems = []
    for entry in config.harness:
        try:
            harness = make_harness(entry, config.model)
            for task in tasks.values():
                harness.launch(task)
        except ClawpipeError as err:
            problems.append(one_line(err))
    return problems


def _memory(config: Config) -> Iterator[str]:
    """Harnesses that cannot live in these sandboxes. The kernel would end them without a word of their own."""
    for entry in config.harness:
        if not isinstance(entry, AgentLoopConfig):
            problem = short_of_memory(_kind(entry), config.sandbox.memory_bytes)
            yield from () if problem is None else (f"[[harness]] {entry.name}: {problem}",)


def _kind(entry: InstalledHarnessConfig) -> str:
    return str(type(entry).__struct_config__.tag)


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
    """What harnesses need in the sandbox and is not there: npm's programs, files of ours, folders of MCP servers."""
    for entry in config.harness:
        try:
            if isinstance(entry, AgentLoopConfig):
                yield from _own_program(entry, config.model, tasks)
            else:
                yield from _installed_program(entry, config.sandbox)
        except ClawpipeError as err:
            yield one_line(err)


def _installed_program(entry: InstalledHarnessConfig, sandbox: SandboxConfig) -> Iterator[str]:
    if (problem := missing(_kind(entry), entry.version)) is not None:
        yield f"[[harness]] {entry.name}: {problem}"
    yield from mcp_problems(entry.mcp, sandbox.rootfs)


def _own_program(entry: AgentLoopConfig, model: ModelConfig, tasks: dict[str, Task]) -> Iterator[str]:
    for task in list(tasks.values())[:1]:
        for path in make_harness(entry, model).launch(task).binds.values():
            if not Path(path).exists():
                yield f"[[harness]] {entry.name}: its program {path} is missing; install clawpipe anew"


def _model(model: ModelConfig) -> list[str]:
    """A model folder's tokenizer, chat template and tool parser must carry a tool call there and back.

    Of the tiny model, which is built later and has its own tests, only the parsers' names can be wrong. A missing
    folder is the learner's to report.
    """
    try:
        if model.tiny is not None:
            require_parsers(model)
            return []
        return round_trip(model) if Path(model.path, "tokenizer.json").is_file() else []
    except ClawpipeError as err:
        return [one_line(err)]
