"""Events, progress and status files: how a process tells the launcher and the user what it does.

Events are one line of JSON each on standard error (the launcher sends it to logs/<role>.log). Progress of a
long step is a small file <run_dir>/progress/<role>.json, replaced atomically; `clawpipe up` and `clawpipe
status` show it with the time left.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MIN_INTERVAL_S = 0.5


class Step(Struct, frozen=True, kw_only=True):
    """A long step of a role. `total` 0: not known. `left_s` None: too early to say."""

    role: str
    label: str
    done: float = 0.0
    total: float = 0.0
    detail: str = ""
    started_s: float = 0.0
    updated_s: float = 0.0
    left_s: float | None = None
    finished: bool = False


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return json.dumps(fields, default=str)


class EventLog:
    """Structured events of one role: `log.info("rollout closed", rollout=..., calls=14)`."""

    def __init__(self, role: str) -> None:
        self._logger = logging.getLogger(f"clawpipe.{role}")

    def info(self, event: str, **fields: Any) -> None:
        """One finished thing."""
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: Any) -> None:
        """Something that a user may want to change."""
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: Any) -> None:
        """Something failed for good."""
        self._logger.error(event, extra={"fields": fields})


def start_log(role: str, level: str = "info") -> EventLog:
    """Sets this process's logging up, once: `clawpipe run` does it for every role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger("clawpipe")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    return EventLog(role)


class Progress:
    """Reports one long step: `progress = Progress(run_dir, "coldstart", "training", total=200)`, then `at(step)`."""

    def __init__(self, run_dir: Path, role: str, label: str, total: float = 0.0) -> None:
        self._path = run_dir / "progress" / f"{role}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._step = Step(role=role, label=label, total=total, started_s=time.time())
        self._last = 0.0
        self._write()

    def at(self, done: float, detail: str = "", total: float | None = None) -> None:
        """Now at `done` of the total. Cheap: writes at most twice a second."""
        now = time.time()
        total = self._step.total if total is None else total
        spent = now - self._step.started_s
        left = spent / done * (total - done) if done > 0 and total > 0 else None
        self._step = msgspec.structs.replace(
            self._step, done=done, total=total, detail=detail, updated_s=now, left_s=left
        )
        if now - self._last >= MIN_INTERVAL_S:
            self._write()

    def finish(self, detail: str = "") -> None:
        """The step is over."""
        total = self._step.total or self._step.done
        self._step = msgspec.structs.replace(
            self._step, done=total, detail=detail, left_s=0.0, updated_s=time.time(), finished=True
        )
        self._write()

    def _write(self) -> None:
        self._last = time.time()
        write_json(self._path, self._step)


def steps(run_dir: Path) -> list[Step]:
    """The progress files of a run, unreadable ones left out."""
    found = []
    for path in sorted((run_dir / "progress").glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Step))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(value))
    temporary.replace(path)
