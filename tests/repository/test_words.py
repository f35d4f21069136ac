"""American spelling in sources and pages. Records of decisions (`docs/adr`) are history and stay as they are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BRITISH = re.compile(
    r"colour|behaviour|favour|honour|neighbour|artefact|catalogue|learnt|(?<![a-z])(centre|licence|grey|analyse)"
    r"|(model|label|cancel|travel|signal)l(ed|ing)\b"
    r"|(custom|factor|final|general|initial|material|maxim|minim|normal|optim|organ|parallel|penal|quant|random|real|recogn"
    r"|serial|special|summar|synchron|token|util|vector)is(e|ing|ation)",
    re.IGNORECASE,
)
ROOMS = sorted(str(source.relative_to(ROOT)) for place in ("packages", "apps") for source in ROOT.glob(f"{place}/*/src"))
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md"] + sorted(
    str(page.relative_to(ROOT))
    for place in ("docs/**/*.md", "skills/*/*.md")
    for page in ROOT.glob(place)
    if "adr" not in page.parts
)


@pytest.mark.parametrize("room", ROOMS)
def test_sources_are_spelled_as_in_american_english(room: str) -> None:
    """Names, too: no library that Forge calls has one that is spelled otherwise."""
    assert [fault for file in sorted((ROOT / room).rglob("*.py")) for fault in _lines_with(BRITISH, file)] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_spelled_as_in_american_english(page: str) -> None:
    assert _lines_with(BRITISH, ROOT / page) == []


def _lines_with(words: re.Pattern[str], file: Path) -> list[str]:
    text = file.read_text()
    return [f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, at.start()) + 1}: {at[0]!r}" for at in words.finditer(text)]
