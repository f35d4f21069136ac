"""Documentation that cannot rot in silence: links that lead somewhere, code that parses, commands that exist."""

import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "packages/*/*.md", "apps/*/*.md", "docs/**/*.md", "examples/**/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings as code hosts make them."""
    titles = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_parse(page):
    text = page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, "a code block is not closed"
    for language, code in FENCE.findall(text):
        if language == "python":
            ast.parse(code)
        elif language == "toml":
            tomllib.loads(code)
        elif language in ("bash", "sh", "console"):
            for line in code.replace("\\\n", " ").splitlines():
                shlex.split(line, comments=True)


def test_the_picture_of_the_packages_has_the_imports_of_the_sources(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    package_graph = importlib.import_module("package_graph")
    assert package_graph.PICTURE.read_text() == package_graph.picture(), "run `python docs/_ext/package_graph.py`"


def test_the_page_on_the_architecture_names_existing_folders():
    rows = re.findall(r"^\| (`forge_\w+`)? ?\| (`[^|]+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    package, missing = "", []
    for name, folders in rows:
        package = name.strip("`") or package
        (source,) = (path for path in ROOT.glob(f"*/*/src/{package}") if path.is_dir())
        missing += [f"{package}/{folder}" for folder in re.findall(r"`(\w+)`", folders) if not (source / folder).is_dir()]
    assert len(rows) > 15 and missing == []
