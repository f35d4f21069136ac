"""Plain technical English, American spelling: in messages, docstrings, comments and pages.

The phrases that readers stumble over are listed here. Records of decisions (`docs/adr`) are history and stay as they are.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = re.compile(
    r"\b(is|are|was)\s+no\b(?!\s+longer)|\bof\s+(its|their)\s+own\b|does\s+not\s+stand|\b(no|some|any)body\b|\bbeside\b|\bwhatever\b"
    r"|\bwhoever\b|\bstranger",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"colour|behaviour|favour|honour|neighbour|artefact|catalogue|learnt|(?<![a-z])(centre|licence|grey|analyse)"
    r"|(model|label|cancel|travel|signal)l(ed|ing)\b"
    r"|(custom|factor|final|general|initial|material|maxim|minim|normal|optim|organ|parallel|penal|quant|random|real|recogn"
    r"|serial|special|summar|synchron|token|util|vector)is(e|ing|ation)",
    re.IGNORECASE,
)
ROOMS = sorted(str(source.relative_to(ROOT)) for place in ("packages", "apps") for source in ROOT.glob(f"{place}/*/src"))
PAGES = ["README.md", "CONTRIBUTING.md"] + sorted(
    str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md") if "adr" not in page.parts
)


@pytest.mark.parametrize("room", ROOMS)
def test_no_message_docstring_or_comment_has_a_banned_phrase(room: str) -> None:
    assert [
        f"{file.relative_to(ROOT)}:{line}: {match[0]!r}"
        for file in sorted((ROOT / room).rglob("*.py"))
        for line, text in [*_strings(file.read_text()), *_comments(file.read_text())]
        for match in BANNED.finditer(text)
    ] == []


@pytest.mark.parametrize("room", ROOMS)
def test_sources_are_spelled_as_in_american_english(room: str) -> None:
    """Names, too: no library that Forge calls has one that is spelled otherwise."""
    assert [fault for file in sorted((ROOT / room).rglob("*.py")) for fault in _lines_with(BRITISH, file)] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_banned_phrase_or_british_spelling(page: str) -> None:
    assert [*_lines_with(BANNED, ROOT / page), *_lines_with(BRITISH, ROOT / page)] == []


def _lines_with(words: re.Pattern[str], file: Path) -> list[str]:
    text = file.read_text()
    return [f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, at.start()) + 1}: {at[0]!r}" for at in words.finditer(text)]


def _strings(source: str) -> Iterator[tuple[int, str]]:
    for item in ast.walk(ast.parse(source)):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.lineno, item.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
