"""Two reports of one machine: what became slower. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.errors import DataError

TOLERANCE = 0.03
"""Share by which a number may be worse than before."""


@dataclass(frozen=True)
class Regression:
    """A number that became worse by `share` (0.1 is a tenth), or a verdict that became worse (then `share` is None)."""

    step: str
    check: str
    before: float | str
    now: float | str
    unit: str
    share: float | None

    def __str__(self) -> str:
        if self.share is None:
            return f"{self.step}: {self.check}: {self.before}, now {self.now}"
        numbers = f"{self.before:.4g}, now {self.now:.4g} {self.unit}".rstrip()
        return f"{self.step}: {self.check}: {numbers} ({self.share:.1%} worse)"


def read(path: Path) -> dict[str, Any]:
    """A report.

    Raises:
        DataError: the file is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _verdicts(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise DataError(f"{path} is not a report of forge-train doctor ({cause}); give its doctor.json") from cause
    return document


def regressions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Regression]:
    """Checks of both reports that are worse now; those that only one of them has are not compared."""
    before, found = _verdicts(old), []
    for (step, name), now in _verdicts(new).items():
        was = before.get((step, name))
        if was is None:
            continue
        share = _worse(was, now)
        if share is not None and share > TOLERANCE:
            found.append(Regression(step, name, was["measured"], now["measured"], now["unit"], share))
        elif (was["verdict"], now["verdict"]) in (("PASS", "SLOW"), ("PASS", "FAIL"), ("SLOW", "FAIL")):
            found.append(Regression(step, name, was["verdict"], now["verdict"], "", None))
    return found


def _verdicts(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(step["name"], check["name"]): check for step in document["steps"] for check in step["checks"]}


def _worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """The share by which `now` is worse, negative where it is better; None unless both are numbers of one unit."""
    pair = was["measured"], now["measured"]
    if not now["better"] or was["unit"] != now["unit"] or any(isinstance(value, str) or value <= 0 for value in pair):
        return None
    ratio = pair[1] / pair[0]
    return 1 - ratio if now["better"] == "higher" else ratio - 1
