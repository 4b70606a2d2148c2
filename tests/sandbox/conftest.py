"""Real sandboxes: a root file system built once per session, and a supervisor per test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

import sandbox_items
from clawpipe.actors.sandbox import rootfs
from clawpipe.actors.sandbox.collect import Snapshot
from clawpipe.actors.sandbox.process import Exit
from clawpipe.actors.sandbox.supervisor import Supervisor
from clawpipe.pipeline.config import SandboxConfig

FIRST_UID = 310_000
MIB = 1024**2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sandbox_items.mark(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def root_folder() -> Iterator[Path]:
    """The prepared root, in a folder that an ordinary user may enter too."""
    folder = Path(tempfile.mkdtemp(prefix="clawpipe-tests-"))
    folder.chmod(0o755)
    yield rootfs.prepare(folder)
    shutil.rmtree(folder)


@pytest.fixture
def config(root_folder: Path) -> SandboxConfig:
    return SandboxConfig(
        rootfs=str(root_folder), first_uid=FIRST_UID, memory_bytes=256 * MIB, workspace_bytes=16 * MIB, cpus=2
    )


@dataclass(frozen=True)
class Lab:
    """Runs an async test body with a supervisor on a fresh work folder."""

    config: SandboxConfig
    work_dir: Path

    def run(self, body: Callable[[Supervisor], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with Supervisor.open(self.config, "test", self.work_dir) as host:
                return await body(host)

        return trio.run(main)

    def one(
        self, *argv: str, files: Any = None, wall_clock_s: float = 30.0, env: Any = None, **options: Any
    ) -> tuple[Exit, Snapshot]:
        """One program in one sandbox: how it ended, and what it left."""

        async def body(host: Supervisor) -> tuple[Exit, Snapshot]:
            async with host.sandbox(files or {}, name="one", **options) as box:
                exit = await box.run(argv, env, wall_clock_s=wall_clock_s)
                return exit, await box.collect()

        result: tuple[Exit, Snapshot] = self.run(body)
        return result

    def python(self, program: str, **options: Any) -> tuple[Exit, Snapshot]:
        """The same for a Python program."""
        return self.one("python3", "-I", "-S", "-c", program, **options)


@pytest.fixture
def lab(config: SandboxConfig, tmp_path: Path) -> Lab:
    return Lab(config, tmp_path / "sandboxes")
