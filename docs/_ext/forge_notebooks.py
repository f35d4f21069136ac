"""Renders the notebooks of `examples/` with their output: copies them to `docs/notebooks`, where myst-nb runs them.

Stored notebooks have no output, so what a page shows is what the code of this commit printed.
"""

from pathlib import Path
from shutil import copyfile
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "notebooks"


def copy_notebooks(*_: Any) -> None:
    """Copies changed notebooks, and removes those that do not exist any more."""
    PAGES.mkdir(exist_ok=True)
    sources = {path.name: path for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    for page in PAGES.glob("*.ipynb"):
        if page.name not in sources:
            page.unlink()
    for name, path in sources.items():
        page = PAGES / name
        if not page.exists() or page.read_bytes() != path.read_bytes():
            copyfile(path, page)


def setup(app: Any) -> dict[str, Any]:
    """Registers the extension with Sphinx."""
    app.connect("config-inited", copy_notebooks)
    return {"parallel_read_safe": True}
