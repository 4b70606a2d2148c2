"""The ledger on disk: <run_dir>/ledger.sqlite. Written in batches by a worker thread, read at a restart.

Every write is one transaction, so the file is always the books as of some moment; `LedgerReader` sees one such
moment while the run writes on. Blocking; one thread at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from clawpipe.pipeline.books import BatchRow, CallRow, Changes, Row, Standing, UpdateRow
from clawpipe.pipeline.errors import ClawpipeError

T = TypeVar("T")

LOCK_TIMEOUT_S = 60.0  # how long another program may keep us from writing
FORM = 2  # of the tables and rows; a file of another form is refused, since its numbers would be read wrongly

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

_NO_ROOM = "SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"  # the latter is of the index beside the write-ahead log
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


class NoRoomError(ClawpipeError):
    """The disk is full: what was to be written can be written when there is room."""


class LedgerFile:
    """See the module. ClawpipeError when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            _check_form(self._db, path)
            self._db.executescript(f"{_TABLES}PRAGMA user_version={FORM};")
        except sqlite3.Error as err:
            raise _unusable(path, err) from err

    def read(self) -> Stored:
        """Everything but the calls."""
        try:
            return _stored(self._db)
        except (sqlite3.Error, msgspec.MsgspecError) as err:
            raise _unusable(self._path, err) from err

    def write(self, changes: Changes) -> None:
        """Stores the changes, all or none. NoRoomError when the disk is full."""
        try:
            with self._db:
                self._write(changes)
        except sqlite3.Error as err:
            if err.sqlite_errorname in _NO_ROOM:
                raise NoRoomError(f"{self._path}: the disk is full; make room on it") from err
            raise _unusable(self._path, err) from err

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


class LedgerReader:
    """The books as of the moment at which they were opened, for those who only read. Made by `reading`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read(self) -> Stored:
        """Everything but the calls."""
        return _stored(self._db)

    def calls(self, rollout_id: str | None = None) -> Iterator[CallRow]:
        """All calls, or those of one rollout, in the order of their ids."""
        columns = "SELECT call_id, rollout_id, role, sampled, kept, dropped FROM calls"
        if rollout_id is None:
            found = self._db.execute(f"{columns} ORDER BY call_id")
        else:
            found = self._db.execute(f"{columns} WHERE rollout_id = ? ORDER BY call_id", (rollout_id,))
        return map(_call, found)


@contextmanager
def reading(path: Path) -> Iterator[LedgerReader]:
    """Opens a ledger that may still be written to; changes nothing in it.

    ClawpipeError when there is none, when it is no ledger, or one of another clawpipe.
    """
    if not path.is_file():
        raise ClawpipeError(f"{path}: there is no ledger; give the folder of a run that has begun")
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            db.execute("BEGIN")
            _check_form(db, path)
            yield LedgerReader(db)
        finally:
            db.close()
    except (sqlite3.Error, msgspec.MsgspecError) as err:
        raise ClawpipeError(f"{path}: not a ledger that can be read ({err}); is it the file of a run?") from err


def _check_form(db: sqlite3.Connection, path: Path) -> None:
    """ClawpipeError for a file with tables of another form. A file without tables is new."""
    num_tables = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    form = db.execute("PRAGMA user_version").fetchone()[0]
    if num_tables and form != FORM:
        raise ClawpipeError(
            f"{path}: was written by another version of clawpipe (form {form}, this one reads form {FORM}); "
            "use the version that wrote it"
        )


def _stored(db: sqlite3.Connection) -> Stored:
    return Stored(
        rows=_rows(db, "SELECT row FROM rollouts ORDER BY rowid", Row),
        batches=_rows(db, "SELECT row FROM batches ORDER BY rowid", BatchRow),
        updates=_rows(db, "SELECT row FROM updates ORDER BY updates", UpdateRow),
        standing=next(iter(_rows(db, "SELECT row FROM standing", Standing)), None),
    )


def _rows(db: sqlite3.Connection, query: str, kind: type[T]) -> tuple[T, ...]:
    decode = msgspec.json.Decoder(kind).decode
    return tuple(decode(row) for (row,) in db.execute(query))


def _call(columns: tuple[object, ...]) -> CallRow:
    call_id, rollout_id, role, sampled, kept, dropped = columns
    fields = {
        "call_id": call_id,
        "rollout_id": rollout_id,
        "role": role,
        "sampled": sampled,
        "kept": kept,
        "dropped": msgspec.json.decode(str(dropped)),
    }
    return msgspec.convert(fields, CallRow)  # SQLite keeps whatever was put into a column


def _unusable(path: Path, err: Exception) -> ClawpipeError:
    return ClawpipeError(
        f"{path}: the ledger cannot be read or written ({err}); check the disk, and that no other program has the "
        "file locked. If it is damaged, move it away: the run goes on from the record stream without its history"
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
