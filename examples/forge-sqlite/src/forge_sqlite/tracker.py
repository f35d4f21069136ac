"""Table `metrics` with the columns run, step, name and value; NaN is NULL."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

TABLE = "CREATE TABLE IF NOT EXISTS metrics (run TEXT, step INTEGER, name TEXT, value REAL, PRIMARY KEY (run, step, name))"
WAIT = 30.0
"""Seconds to wait for another run that writes into the same database."""


class SqliteTracker:
    """Implements `forge_core.protocols.Tracker`."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        self._database: sqlite3.Connection | None = None

    def rewind(self, step: int) -> None:
        """Deletes the rows of later steps, which the run trains again."""
        self._database = sqlite3.connect(self._path, timeout=WAIT)
        with self._database as transaction:
            transaction.execute(TABLE)
            transaction.execute("DELETE FROM metrics WHERE run = ? AND step > ?", (self._run, step))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        assert self._database is not None, "rewind comes before the first write"
        rows = [(self._run, step, name, float(value)) for name, value in values.items()]
        with self._database as transaction:
            transaction.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
