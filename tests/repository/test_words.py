"""Messages and docstrings use plain technical English: the phrases that readers stumble over are listed here."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = re.compile(
    r"\b(is|are|was) no\b(?! longer)|\bof (its|their) own\b|does not stand|\b(no|some|any)body\b|\bbeside\b|\bwhatever\b"
    r"|\bwhoever\b|\bstranger|\bcolour|\bbehaviour|\btokenis|\bnormalis|\bminimis|\bsynchronis|\brealis",
    re.IGNORECASE,
)
ROOMS = ("packages/forge-core", "packages/forge-ckpt", "apps/forge-train")
LEFT = {"forge_core/features.py", "forge_core/protocols/model.py", "forge_core/batch.py", "forge_core/specs.py"}
"""Files that still have some."""


@pytest.mark.parametrize("room", ROOMS)
def test_no_message_or_docstring_has_a_banned_phrase(room: str) -> None:
    source = ROOT / room / "src"
    found = [
        f"{file.relative_to(source)}:{item.lineno}: {match[0]!r}"
        for file in sorted(source.rglob("*.py"))
        if str(file.relative_to(source)) not in LEFT
        for item in ast.walk(ast.parse(file.read_text()))
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
        for match in BANNED.finditer(item.value)
    ]
    assert found == []
