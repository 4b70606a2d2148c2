"""From the [[tasks]] entries of the configuration to the tasks themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clawpipe.actors.tasks import clawgym, filing
from clawpipe.actors.tasks.task import Task
from clawpipe.pipeline.config import ClawGymTasksConfig, TasksConfig
from clawpipe.pipeline.errors import TaskError


def load_tasks(configs: Sequence[TasksConfig]) -> dict[str, Task]:
    """All tasks of all sources by id, in order. TaskError names the source, the row and what to do."""
    tasks: dict[str, Task] = {}
    for config in configs:
        before = len(tasks)
        for task in _read(config):
            if task.task_id in tasks:
                raise TaskError(
                    f"[[tasks]] {config.name}: the task id {task.task_id!r} is there twice; give every row its own id"
                )
            tasks[task.task_id] = task
        if len(tasks) == before:
            raise TaskError(f"[[tasks]] {config.name}: no task is left; check its file, `ids` and `limit`")
    return tasks


def _read(config: TasksConfig) -> Iterator[Task]:
    return clawgym.read_tasks(config) if isinstance(config, ClawGymTasksConfig) else filing.read_tasks(config)
