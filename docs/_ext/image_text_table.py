"""The table of docs/models/image-text.md, from the records of `forge_vlm/hf/image_text_classes.json`.

`python docs/_ext/image_text_table.py` writes it between the marks of the page; a test compares it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers_table import BEGIN, END, before, escaped

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "packages" / "forge-vlm" / "src" / "forge_vlm" / "hf" / "image_text_classes.json"
PAGE = ROOT / "docs" / "models" / "image-text.md"
COLUMNS = {
    "alone": "one process",
    "rows": "several rows",
    "recompute": "recompute",
    "frozen": "frozen tower",
    "dp": "dp",
    "folder": "written folder",
    "lora": "lora",
    "tp": "tp",
}
OFFERED = ("lora", "tp")
"""Columns of what a class that is trained may lack."""


def table(document: Mapping[str, Any]) -> str:
    """Returns the records as Markdown: the classes that are trained, and those that are refused."""
    kinds = document["kinds"]
    trained = {kind: one for kind, one in kinds.items() if all(one.get(key) is True for key in COLUMNS if key not in OFFERED)}
    lines = [
        f"Of {len(kinds)} model types of transformers {document['transformers']}, {len(trained)} are trained:",
        "",
        *before(document),
        f"| model_type | class | {' | '.join(COLUMNS.values())} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for kind, one in trained.items():
        cells = ["yes" if one.get(key) is True else "no" for key in COLUMNS]
        lines.append(f"| {escaped(kind)} | {escaped(one['class'])} | {' | '.join(cells)} |")
    lines += ["", "Refused:", "", "| model_type | class | |", "|---|---|---|"]
    for kind, one in kinds.items():
        if kind not in trained:
            why = next(str(one[key]) for key in COLUMNS if one.get(key) is not True)
            lines.append(f"| {escaped(kind)} | {escaped(one['class'])} | {escaped(why)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Returns the page with the table of the records."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table(json.loads(RECORDS.read_text()))}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
