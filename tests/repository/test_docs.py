"""Documentation that cannot rot in silence: links that lead somewhere, code that parses, commands that exist."""

import ast
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from harness.fronts import DISTRIBUTIONS, FRONTS

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "packages/*/*.md", "apps/*/*.md", "docs/**/*.md", "examples/**/*.md", "skills/*/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
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
def test_images_are_small_files_that_are_described(page):
    for text, target in IMAGE.findall(FENCE.sub("", page.read_text())):
        assert len(text.split()) >= 3, f"{page.name} does not say what {target} shows"
        assert (page.parent / target).stat().st_size < 150_000, target


SCREEN = 40
"""Lines of a page that a reader sees first."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(ROOT / "docs")], ids=lambda page: page.stem)
def test_the_first_screen_has_something_to_run(page):
    """Records of decisions are history, and have nothing to run."""
    screen = "\n".join(page.read_text().splitlines()[:SCREEN])
    assert "adr" in page.parts or re.search(r"^```(bash|console|python)\n", screen, re.MULTILINE)


def test_the_landing_page_shows_a_report():
    """The numbers of the picture are those of its curves: the loss that it names is the last point of the first one."""
    text = (ROOT / "docs/index.md").read_text()
    assert [target for _, target in IMAGE.findall(text)] == ["report.svg"]
    picture = (ROOT / "docs/report.svg").read_text()
    shown = dict(re.findall(r'<text class="dim"[^>]*>([^<]+)</text>\n<text class="fact"[^>]*>([^<]+)</text>', picture))
    loss, _ = (chart for chart in re.findall(r"<svg x=.*?</svg>", picture, re.DOTALL))
    ticks = {
        float(value): float(y) - 4 for y, value in re.findall(r'<text class="tick" x="48" y="([\d.]+)"[^>]*>([\d.]+)<', loss)
    }
    low, high = min(ticks), max(ticks)
    last = float(re.findall(r'class="line c0" points="([^"]+)"', loss)[0].split(",")[-1])
    value = low + (ticks[low] - last) / (ticks[low] - ticks[high]) * (high - low)
    assert value == pytest.approx(float(shown["loss"]), abs=0.02)
    assert int(shown["steps"]) > 100 and "finished" in picture


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
    package_graph = import_module("package_graph")
    assert package_graph.PICTURE.read_text() == package_graph.picture(), "run `python docs/_ext/package_graph.py`"


def test_the_page_on_the_architecture_names_existing_folders():
    rows = re.findall(r"^\| (`forge_\w+`)? ?\| (`[^|]+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    package, missing = "", []
    for name, folders in rows:
        package = name.strip("`") or package
        (source,) = (path for path in ROOT.glob(f"*/*/src/{package}") if path.is_dir())
        missing += [f"{package}/{folder}" for folder in re.findall(r"`(\w+)`", folders) if not (source / folder).is_dir()]
    assert len(rows) > 15 and missing == []


PROJECTS = sorted(path.parent for place in ("packages", "apps") for path in ROOT.glob(f"{place}/*/pyproject.toml"))


def test_every_package_has_a_page_of_its_api() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    assert set(pages) == {folder.name.replace("-", "_") for folder in PROJECTS}
    assert all(f":::{{package}} {name}\n" in text for name, text in pages.items())


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_readme_names_requirements_and_extras_and_has_a_short_example(folder: Path) -> None:
    project, text = tomllib.loads((folder / "pyproject.toml").read_text())["project"], (folder / "README.md").read_text()
    assert project["readme"] == "README.md" and text.startswith(f"# {folder.name}\n")
    (code,) = (code for language, code in FENCE.findall(text) if language == "python")
    assert f"from {folder.name.replace('-', '_')} import" in code and len(code.splitlines()) <= 22
    requires, _, extras = text[text.index("\nRequires ") :].partition("Extras:")
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    assert set(re.findall(r"[\w-]+", requires.partition(" ")[2])) - {"and", "Requires"} == set(names)
    for extra, lines in project.get("optional-dependencies", {}).items():
        (item,) = re.findall(rf"`{extra}`: ([^`]*)", extras)
        assert [name for line in lines if (name := re.split(r"[^\w-]", line)[0]) not in item] == [], extra


EXAMPLES = sorted(file for kind in ("py", "ipynb") for file in (ROOT / "examples").rglob(f"*.{kind}"))


def python_of(file: Path) -> Iterator[str]:
    """Yields the Python code of a page, a notebook or a script; in a notebook without lines for its shell."""
    if file.suffix == ".md":
        blocks = re.findall(r"^( *)```python\n(.*?)^\1```$", file.read_text(), re.MULTILINE | re.DOTALL)
        yield from (textwrap.dedent(code) for _, code in blocks)
    elif file.suffix == ".ipynb":
        cells = json.loads(file.read_text())["cells"]
        yield from (re.sub(r"(?m)^ *[%!].*$", "", "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
    else:
        yield file.read_text()


def imports_past_fronts(code: str) -> list[str]:
    """Imports of Forge's modules that are no fronts, and of names that a front does not export."""
    packages = {name.replace("-", "_") for name in DISTRIBUTIONS}
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in packages:
            exported = import_module(str(node.module)).__all__ if node.module in FRONTS else ()
            found += [f"from {node.module} import {alias.name}" for alias in node.names if alias.name not in exported]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in packages]
            found += [f"import {name}" for name in names if name not in FRONTS]
    return found


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES], ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_and_examples_import_from_fronts(file: Path) -> None:
    """A name that is missing belongs into `__all__` of the front of its package."""
    assert [line for code in python_of(file) for line in imports_past_fronts(code)] == []


def test_an_import_past_a_front_is_found() -> None:
    assert imports_past_fronts("from forge_parallel import Step\nfrom forge_lionize.lion import Lion") == []
    deep = "from forge_parallel.step.step import Step"
    assert imports_past_fronts(f"def f():\n    {deep}") == [deep]
    assert imports_past_fronts("from forge_parallel import Step, refresh") == ["from forge_parallel import refresh"]
    assert imports_past_fronts("import forge_core.errors, forge_core") == ["import forge_core.errors"]
