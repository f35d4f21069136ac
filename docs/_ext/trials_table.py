"""The table of docs/comparison.md, from the stored results of benchmarks/trials.

`python docs/_ext/trials_table.py` writes it between the marks of the page; a test compares it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "trials-2026-11-27.json"
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- trials -->\n", "<!-- end of trials -->\n"
SHOWN = {"wrong": "**wrong**"}


def table(results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Returns the outcomes as Markdown, a row for each trial, and below what was seen."""
    versions = results["versions"]
    names = list(next(iter(results["trials"].values())))
    lines = [f"| what must hold | {' | '.join(f'{name} {versions[name]}' for name in names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for trial, row in results["trials"].items():
        outcomes = [SHOWN.get(result["outcome"], result["outcome"]) for result in row.values()]
        lines.append(f"| {titles[trial]} | {' | '.join(outcomes)} |")
    lines += ["", f"What was seen, with torch {versions['torch']}:", "", "| trial | framework | |", "|---|---|---|"]
    for trial, row in results["trials"].items():
        lines += [f"| `{trial}` | {name} | {escaped(result['seen'])} |" for name, result in row.items()]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Returns text for a cell of a Markdown table."""
    return text.rstrip(":").replace("|", "\\|").replace("_", "\\_").replace("[", "\\[").replace("<", "&lt;")


def page(titles: Mapping[str, str]) -> str:
    """Returns the page with the table of the stored results."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table(json.loads(RESULTS.read_text()), titles)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks" / "trials"))
    from trials import TRIALS

    PAGE.write_text(page(TRIALS), encoding="utf-8")
