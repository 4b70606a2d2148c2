"""`clawpipe replay RUN_DIR`: the run's stored records through `rebuild`, and what the user sees of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.batches import Built
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.ledger_file import LedgerReader, reading
from clawpipe.pipeline.rebuild import Findings, Rebuild, Tally
from clawpipe.pipeline.runtime import Runtime
from clawpipe.pipeline.stored_stream import stored_entries, stored_stream


def replay(run_dir: Path, *, goes_on: bool, batches_dir: Path | None = None) -> Findings:
    """Rebuilds what the stored records still hold. `batches_dir` takes the bodies as <batch_id>.msgpack.

    ClawpipeError when the run goes on, when the folder holds no run, or its records cannot be read.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such folder; give the folder of a run")
    if goes_on:
        raise ConfigError(f"{run_dir}: the run goes on, and its records change; replay it when it has ended")
    config, runtime = configuration.restore(run_dir / "config.json"), runtimes.load(run_dir)
    keep = _writer(batches_dir) if batches_dir is not None else _forget
    with reading(run_dir / "ledger.sqlite") as ledger:
        return anyio.run(_rebuild, config, runtime, ledger, keep)


async def _rebuild(config: Config, runtime: Runtime, ledger: LedgerReader, keep: Callable[[Built], None]) -> Findings:
    rebuilding = Rebuild(config, ledger.read(), ledger.calls, keep)
    async with stored_stream(runtime, config.nats) as broker:
        last = await broker.last_records_sequence()
        async with aclosing(stored_entries(broker, last)) as entries:
            async for entry in entries:
                rebuilding.take(entry)
    return rebuilding.end(last)


def lines(found: Findings) -> list[str]:
    """The findings as a person reads them."""
    gone = found.rollouts.gone + found.batches.gone
    return [
        f"records: {found.records} read, the oldest that is kept has sequence {found.first_sequence}"
        if found.records
        else "records: none are kept",
        *(
            _line(name, tally)
            for name, tally in (("rollouts", found.rollouts), ("trees", found.trees), ("batches", found.batches))
        ),
        *(["not all records are there; [nats] keep_records_bytes says how many are kept"] if gone else []),
        _verdict(found),
    ]


def _verdict(found: Findings) -> str:
    if found.first is not None:
        return f"{found.first}; the records, the ledger or config.json are not what the run had"
    return "all that could be rebuilt is equal" if found.rollouts.equal else "nothing could be rebuilt"


def _line(name: str, tally: Tally) -> str:
    return f"{name}: {tally.equal} rebuilt equal, {tally.different} different, {tally.gone} cannot be rebuilt"


def _writer(folder: Path) -> Callable[[Built], None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"--batches {folder}: cannot be made ({err.strerror}); give another folder") from err
    return partial(_write, folder)


def _write(folder: Path, built: Built) -> None:
    path = folder / f"{built.batch_id}.msgpack"
    try:
        path.write_bytes(built.body)
    except OSError as err:
        raise ConfigError(f"--batches: {path} cannot be written ({err.strerror}); give another folder") from err


def _forget(_: Built) -> None:
    """Nobody wants the body."""
