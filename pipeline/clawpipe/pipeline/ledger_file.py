"""The ledger on disk: <run_dir>/ledger.sqlite. Written in batches by a worker thread, read at a restart.

Every write is one transaction, so the file is always the books as of some moment. Blocking; one thread at a
time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from clawpipe.pipeline.books import BatchRow, Changes, Row, Standing, UpdateRow
from clawpipe.pipeline.errors import ClawpipeError

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY, group_id TEXT, harness TEXT, state TEXT, reason TEXT, outcome TEXT, reward REAL,
    last_sequence INTEGER, row BLOB
);
CREATE TABLE IF NOT EXISTS calls (
    call_id TEXT PRIMARY KEY, rollout_id TEXT, role TEXT, sampled INTEGER, kept INTEGER, dropped TEXT
);
CREATE INDEX IF NOT EXISTS calls_of_rollout ON calls (rollout_id);
CREATE TABLE IF NOT EXISTS batches (batch_id TEXT PRIMARY KEY, row BLOB);
CREATE TABLE IF NOT EXISTS updates (updates INTEGER PRIMARY KEY, row BLOB);
CREATE TABLE IF NOT EXISTS standing (only INTEGER PRIMARY KEY CHECK (only = 1), row BLOB);
"""

_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Stored:
    """What an earlier process left."""

    rows: tuple[Row, ...]
    batches: tuple[BatchRow, ...]
    updates: tuple[UpdateRow, ...]
    standing: Standing | None

    @property
    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.rows and self.standing is None


class LedgerFile:
    """See the module. ClawpipeError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except sqlite3.Error as err:
            raise self._error(err) from err

    def read(self) -> Stored:
        """Everything but the calls."""
        try:
            return Stored(
                rows=self._rows("SELECT row FROM rollouts ORDER BY rowid", Row),
                batches=self._rows("SELECT row FROM batches ORDER BY rowid", BatchRow),
                updates=self._rows("SELECT row FROM updates ORDER BY updates", UpdateRow),
                standing=next(iter(self._rows("SELECT row FROM standing", Standing)), None),
            )
        except (sqlite3.Error, msgspec.MsgspecError) as err:
            raise self._error(err) from err

    def write(self, changes: Changes) -> None:
        """Stores the changes, all or none."""
        try:
            with self._db:
                self._write(changes)
        except sqlite3.Error as err:
            raise self._error(err) from err

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def _write(self, changes: Changes) -> None:
        run = self._db.executemany
        run("DELETE FROM rollouts WHERE rollout_id = ?", _keys(changes.removed_rows))
        run("DELETE FROM calls WHERE rollout_id = ?", _keys(changes.removed_rows))
        run("DELETE FROM batches WHERE batch_id = ?", _keys(changes.removed_batches))
        if changes.removed_updates_above is not None:
            self._db.execute("DELETE FROM updates WHERE updates > ?", (changes.removed_updates_above,))
        run("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_rollout, changes.rows))
        run(
            "INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?)",
            (
                (c.call_id, c.rollout_id, c.role, c.sampled, c.kept, _json.encode(c.dropped).decode())
                for c in changes.calls
            ),
        )
        run(
            "INSERT OR REPLACE INTO batches VALUES (?, ?)",
            ((row.batch_id, _json.encode(row)) for row in changes.batches),
        )
        run(
            "INSERT OR REPLACE INTO updates VALUES (?, ?)",
            ((row.updates, _json.encode(row)) for row in changes.updates),
        )
        if changes.standing is not None:
            self._db.execute("INSERT OR REPLACE INTO standing VALUES (1, ?)", (_json.encode(changes.standing),))

    def _rows(self, query: str, kind: type[T]) -> tuple[T, ...]:
        decode = msgspec.json.Decoder(kind).decode
        return tuple(decode(row) for (row,) in self._db.execute(query))

    def _error(self, err: Exception) -> ClawpipeError:
        return ClawpipeError(
            f"{self._path}: the ledger cannot be read or written ({err}); check the disk, or move the file away: "
            "the run goes on from the record stream without its history"
        )


def _keys(keys: Iterable[str]) -> list[tuple[str]]:
    return [(key,) for key in keys]


def _rollout(row: Row) -> tuple[object, ...]:
    return (
        row.rollout_id,
        row.group_id,
        row.harness,
        row.state.value,
        row.reason,
        row.outcome,
        row.reward,
        row.last_sequence,
        _json.encode(row),
    )
