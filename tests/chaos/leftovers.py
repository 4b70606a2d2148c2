"""What a run may not leave behind: processes, mounts, control groups, folders of sandboxes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from chaos.run_folder import UIDS
from chaos.scene import Scene

GRACE_S = 5.0  # the kernel takes a moment to end what lived in a killed namespace


def left_behind(scene: Scene) -> Iterator[str]:
    """One line for each thing that is still there."""
    deadline_s = time.monotonic() + GRACE_S
    while (left := {*scene.processes(), *_of_users(scene)}) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        yield f"a process is left: {pid}"
    run_id = scene.runtime.run_id
    for folder, _, _ in os.walk("/sys/fs/cgroup"):
        if run_id in Path(folder).name:
            yield f"a control group is left: {folder}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if run_id in line or str(scene.folder) in line:
            yield f"a mount is left: {line}"
    for path in scene.runtime.path("sandboxes").glob("host-*"):
        yield f"a folder of sandboxes is left: {path}"


def _of_users(scene: Scene) -> list[int]:
    """Processes of the sandboxes' users: a network namespace lives no longer than they."""
    first_uid = scene.config.sandbox.first_uid
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has just ended
            if first_uid <= Path(f"/proc/{pid}").stat().st_uid < first_uid + UIDS:
                found.append(pid)
    return found
