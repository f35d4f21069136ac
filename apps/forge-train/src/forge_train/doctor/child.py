"""One step in this process: `python -m forge_train.doctor.child module:function FOLDER`. Ends with its parent."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from forge_train.doctor.step import Check, Settings, Skip

SETTINGS, FOUND = "settings.json", "found.json"


def work(target: str, folder: Path) -> None:
    """Runs a step's function; every check is on the disk as soon as it is known, so that what ends the process later costs
    nothing that was found before."""
    given: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    settings = Settings(**{**given, "overrides": tuple(given["overrides"])})
    module, _, function = target.partition(":")
    found: list[Check] = []
    try:
        steps: Iterable[Check] = getattr(import_module(module), function)(settings)
        for check in steps:
            found.append(check)
            _write(folder, found, ended=False)
    except Skip as reason:
        found.append(Check("runs here", "SKIPPED", str(reason), remedy=reason.remedy))
    _write(folder, found, ended=True)


def _write(folder: Path, found: list[Check], ended: bool) -> None:
    new = folder / f"{FOUND}.new"
    new.write_text(json.dumps({"ended": ended, "checks": [asdict(check) for check in found]}), encoding="utf-8")
    new.replace(folder / FOUND)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 0
    try:
        work(sys.argv[1], Path(sys.argv[2]))
    except BaseException:  # noqa: BLE001 (the parent reads the log)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait, and those of libraries, may abort an ordinary exit
