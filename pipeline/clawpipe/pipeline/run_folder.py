"""The folder of a run before anything is started: whose it is, and what is written into it.

One launcher works in a folder at a time, which the lock says. Beside it lies what the engines fetch: the staged
weights, in a folder of their own under [push] dir.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.models import model_folders
from clawpipe.pipeline.processes import free_port
from clawpipe.pipeline.runtime import Runtime

RUN_DIR_NOTE = "run_dir"  # beside staged weights: whose they are


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes the folder ours for as long as the process lives. ConfigError when it cannot be, or is another's."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"{run_dir}: cannot be made ({err.strerror}); give another --run-dir") from err
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise ConfigError(
                f"{run_dir}: another clawpipe runs in this folder; drain it first, or give another --run-dir"
            ) from err
        yield


def is_running(run_dir: Path) -> bool:
    """Whether a launcher works in the folder."""
    if not (run_dir / "lock").exists():
        return False
    try:
        with locked(run_dir):
            return False
    except ConfigError:
        return True


def remove_abandoned(push_root: Path) -> None:
    """Removes staged weights of runs that were killed: a resumed run stages its own again."""
    for note in push_root.glob(f"clawpipe-cp-*/{RUN_DIR_NOTE}"):
        if not is_running(Path(note.read_text())):
            shutil.rmtree(note.parent, ignore_errors=True)


def prepare(config: Config, run_dir: Path, task_ids: tuple[str, ...], *, resume: bool) -> Runtime:
    """Writes config.json, tasks.json and runtime.json. ConfigError when the run to resume trains another model."""
    earlier = runtimes.load(run_dir) if resume else None
    if earlier is not None and configuration.restore(run_dir / "config.json").model != config.model:
        raise ConfigError(f"{run_dir}: [model] is not what this run trains; resume with the configuration that it had")
    run_id = earlier.run_id if earlier else f"cp-{uuid.uuid4().hex[:12]}"
    folders = model_folders(config)
    runtime = Runtime(
        run_id=run_id,
        run_dir=str(run_dir),
        nats_url=config.nats.url,
        nats_token=earlier.nats_token if earlier else "",
        engine_urls=_engine_urls(config),
        init_model_dir=str(folders.init),
        start_model_dir=str(folders.start),
        demos_path=str(folders.demos or ""),
        push_dir=_push_dir(config, run_id, run_dir),
        resume=resume,
    )
    for folder in ("logs", "progress"):
        (run_dir / folder).mkdir(exist_ok=True)
    for stale in ("status.json", "summary.json"):
        (run_dir / stale).unlink(missing_ok=True)
    (run_dir / "config.json").write_bytes(configuration.dump(config))
    (run_dir / "tasks.json").write_text(json.dumps(task_ids))
    runtimes.save(runtime)
    return runtime


def _engine_urls(config: Config) -> tuple[str, ...]:
    """Of external engines, or of ours on the configured ports or free ones."""
    engines = config.engines
    return engines.urls or tuple(
        f"http://127.0.0.1:{engines.port + index if engines.port else free_port()}" for index in range(engines.count)
    )


def _push_dir(config: Config, run_id: str, run_dir: Path) -> str:
    """An empty place for staged weights that says whose it is."""
    remove_abandoned(Path(config.push.dir))
    folder = Path(config.push.dir, f"clawpipe-{run_id}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_DIR_NOTE).write_text(str(run_dir))
    return str(folder)
