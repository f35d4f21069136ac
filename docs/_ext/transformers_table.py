"""The table of docs/models/transformers.md, from the records of `forge_models/hf/causal_lm_classes.json`.

`python docs/_ext/transformers_table.py` writes it between the marks of the page; a test compares it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "packages" / "forge-models" / "src" / "forge_models" / "hf" / "causal_lm_classes.json"
PAGE = ROOT / "docs" / "models" / "transformers.md"
BEGIN, END = "<!-- classes -->\n", "<!-- end of classes -->\n"
COLUMNS = {
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "ep": "ep",
    "packed": "packed rows",
    "folder": "written folder",
    "loss": "loss in parts",
}


def table(document: Mapping[str, Any]) -> str:
    """Returns the records as Markdown: the classes that can be trained, reasons, and the classes that are refused."""
    classes = document["classes"]
    trained = {name: record for name, record in classes.items() if record["alone"] is True}
    lines = [
        f"Of {len(classes)} classes of transformers {document['transformers']}, {len(trained)} equal it in one process:",
        "",
        *before(document),
        f"| class | {' | '.join(COLUMNS.values())} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, record in trained.items():
        lines.append(f"| {name} | {' | '.join('yes' if record[key] is True else '' for key in COLUMNS)} |")
    lines += ["", "Why a column is empty:", "", "| class | | |", "|---|---|---|"]
    for name, record in trained.items():
        why = {title: record[key] for key, title in COLUMNS.items() if key != "ep" and record[key] is not True}
        lines += [f"| {name} | {title} | {escaped(text)} |" for title, text in why.items()]
    lines += ["", "Refused in any layout:", "", "| class | |", "|---|---|"]
    lines += [f"| {name} | {escaped(record['alone'])} |" for name, record in classes.items() if name not in trained]
    return "\n".join(lines) + "\n"


def before(document: Mapping[str, Any]) -> list[str]:
    """Returns the lines that name the records that ran under an earlier version of transformers."""
    lines = []
    for version, names in document.get("earlier", {}).items():
        late = f"Compared with transformers {version}, and not yet with {document['transformers']}"
        lines += [f"{late}: {', '.join(map(escaped, names))}.", ""]
    return lines


def escaped(text: str) -> str:
    """Returns text for a cell of a Markdown table."""
    for letter in ("\\", "|", "_", "[", "*", "`"):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("<", "&lt;")


def page() -> str:
    """Returns the page with the table of the records."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{table(json.loads(RECORDS.read_text()))}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
