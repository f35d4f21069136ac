"""What exists today, as tables of README.md: made from the registry, from the families of weights, and from `refused.toml`.

`python docs/_ext/forge_today.py` writes them into README.md, between the two comments that name this file.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge_core.registry import GROUPS, Registry

DOCS = Path(__file__).parents[1]
README = DOCS.parent / "README.md"
BEGIN = "<!-- made by docs/_ext/forge_today.py from what is registered and from docs/refused.toml -->"
END = "<!-- end of what docs/_ext/forge_today.py made -->"
HIDDEN = ("forge.presets", "forge.commands", "forge.checks", "forge.proofs", "forge.conformance")
"""Groups that have a page of their own."""


def refused() -> list[dict[str, Any]]:
    """Every refusal: `what`, `overrides`, what the refusal `says`, and the `recipe` (debug) and `world` (1) that show it."""
    return tomllib.loads((DOCS / "refused.toml").read_text(encoding="utf-8"))["refused"]


def tables() -> str:
    """The text between the two comments."""
    from forge_models.hf.families import FAMILIES

    registry = Registry()
    ours = {folder.name for parent in ("packages", "apps") for folder in (README.parent / parent).iterdir()}
    found = {group: [e.name for e in registry.of(group.name) if e.distribution in ours] for group in GROUPS.values()}
    shown = {group: names for group, names in found.items() if names and group.name not in HIDDEN}
    rows = [
        ("", "chosen by", "on offer"),
        ("---", "---", "---"),
        *((group.kind, f"`{group.chosen_by}`", _code(names)) for group, names in shown.items()),
        ("Hugging Face family", "`from_hf`, `convert`", _code(FAMILIES)),
    ]
    offered = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    absent = "\n".join(f"- {entry['what']} (`{' '.join(entry['overrides'])}`)" for entry in refused())
    return f"{offered}\n\nRefused, never ignored:\n\n{absent}\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(readme: str) -> str:
    """README.md with the tables of today."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
