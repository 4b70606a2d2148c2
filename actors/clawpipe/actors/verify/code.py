"""The code verifier: a task's hidden grader runs in a sandbox of its own, on a copy of what the agent left.

The agent is dead by then, and its sandbox gone. The grader's folder is /grader, read-only and outside the
workspace; there is no network; what the grader changes is thrown away with the copy.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from clawpipe.actors.sandbox.bubblewrap import WORKSPACE
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.process import Exit, Reason
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.actors.tasks.task import Task
from clawpipe.actors.verify.grade_program import TOKEN_FILE
from clawpipe.actors.verify.score import Graded, score, zero
from clawpipe.pipeline.config import VerifyConfig
from clawpipe.pipeline.errors import SandboxError, one_line

GRADER_FOLDER = "/grader"
PYTHON = "/usr/bin/python3"
PROGRAM = Path(__file__).with_name("grade_program.py")


class GradeFailed(Struct, frozen=True, kw_only=True):
    """There is no verdict, and the agent is not to blame: the workspace can be graded again."""

    message: str


async def grade(host: Supervisor, task: Task, snapshot: Snapshot, config: VerifyConfig) -> Graded | GradeFailed:
    """The verdict on `snapshot`, the workspace that the agent left.

    A grader that crashes, floods its output or prints no verdict on the agent's files is the agent's zero:
    whoever could turn such a run into "no verdict" could have bad rollouts left out of training. A grader that
    does not end in time is the agent's zero too if it ends on the untouched workspace (it may be waiting for a
    script of the agent's); if it hangs there as well, it is the grader's fault. Runs under trio.
    """
    try:
        verdict = await _run(host, task, snapshot, config)
        if verdict is None and await _run(host, task, task.files, config) is not None:
            return zero("grader_timed_out", f"task {task.task_id}: no end after {config.timeout_s:g} s on these files")
    except (SandboxError, OSError) as err:
        return GradeFailed(message=f"task {task.task_id}: the grader's sandbox failed: {one_line(err)}")
    if verdict is None:
        return GradeFailed(
            message=f"task {task.task_id}: the grader hangs: no end after {config.timeout_s:g} s, not even on the "
            "untouched workspace; correct the grader, leave the task out, or raise [verify] timeout_s"
        )
    return verdict


async def _run(
    host: Supervisor, task: Task, contents: Snapshot | Mapping[str, bytes], config: VerifyConfig
) -> Graded | None:
    """One run of the grader; None when it did not end in time."""
    token = secrets.token_hex(16)
    async with host.sandbox(
        contents,
        name=f"grade-{task.task_id}",
        binds={GRADER_FOLDER: await host.folder(task.grader)},
        home_files={TOKEN_FILE: token.encode()},
        memory_bytes=config.memory_bytes,
        max_processes=config.max_processes,
    ) as box:
        ended = await box.run(
            [PYTHON, "-I", "-c", PROGRAM.read_text(), f"{GRADER_FOLDER}/{task.grader_entry}", WORKSPACE],
            wall_clock_s=config.timeout_s,
            keep_errors_apart=True,
        )
    return None if ended.reason is Reason.WALL_CLOCK else _verdict(ended, token)


def _verdict(ended: Exit, token: str) -> Graded:
    errors = ended.errors.decode("utf-8", "replace").strip()
    if ended.reason is Reason.OUTPUT:
        return zero("grader_flooded", f"wrote more than {ended.output_bytes} bytes")
    if ended.code != 0:
        return zero("grader_crashed", f"ended with {ended.code}: {errors[-500:]}")
    framed = ended.output.decode("utf-8", "replace").split(token)
    if len(framed) != 3:
        return zero("grader_printed_no_json", f"ended without a verdict of its own: {errors[-500:]}")
    return score(framed[1])
