"""The doctor's report on the disk: `doctor.json` after every step, `doctor.html` at the end."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_core.durable_files import replace_file
from forge_train.doctor.compare import regressions
from forge_train.doctor.page import page
from forge_train.doctor.step import Result
from forge_train.report.machine import machine, versions

DOCUMENT, PAGE = "doctor.json", "doctor.html"
SCHEMA = 1


class Report:
    """What is known so far; in `folder`, where there is one. It names neither the machine nor its addresses."""

    def __init__(self, recipe: str, folder: Path | None) -> None:
        self.folder = folder
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": recipe,
            "ended": False,
            "machine": machine(),
            "versions": versions(),
            "steps": [],
        }
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._save()

    def write(self, results: Sequence[Result]) -> None:
        """Puts everything found so far on the disk."""
        self.document["steps"] = [result.as_json() for result in results]
        self._save()

    def end(self, old: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compares with an earlier report, where there is one, and writes the page; returns the document."""
        self.document["ended"] = True
        if old is not None:
            self.document["regressions"] = [str(one) for one in regressions(old, self.document)]
        self._save()
        if self.folder is not None:
            replace_file(self.folder / PAGE, page(self.document).encode())
        return self.document

    def _save(self) -> None:
        if self.folder is not None:
            replace_file(self.folder / DOCUMENT, json.dumps(self.document, indent=1, ensure_ascii=False).encode())
