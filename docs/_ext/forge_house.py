"""A picture of the sources and a table of their rooms, made from the files when the pages are built.

In a page, `house` draws every package as a box with its folders inside, sized by their lines, and an arrow for every package
that another one imports. `rooms` with the name of a package lists its folders with the first sentence of what each says it is.
`python docs/_ext/forge_house.py FILE.svg` writes the picture to a file.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import ceil, sqrt
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = (
    ("forge_lab", "forge_interp", "forge_testing"),
    ("forge_train",),
    ("forge_vlm",),
    ("forge_parallel", "forge_models", "forge_data", "forge_ckpt"),
    ("forge_core",),
)
"""Packages from top to bottom; imports go down only."""
WIDTH, GAP, LINE = 1180, 14, 16
"""Pixels: of the picture, between boxes, and of a line of text."""


@dataclass(frozen=True)
class Room:
    """A folder of a package, or the files that lie at its root: what it says it is, how many files and lines it has."""

    name: str
    says: str
    files: int
    lines: int


def source(package: str) -> Path:
    """The folder of a package's sources."""
    return next(path for folder in ("packages", "apps") for path in (ROOT / folder).glob(f"*/src/{package}"))


def rooms(package: str) -> list[Room]:
    """The folders of a package by name, then its root."""
    top = source(package)
    found = []
    for folder in sorted(path for path in top.iterdir() if path.is_dir() and any(path.rglob("*.py"))):
        files = sorted(folder.rglob("*.py"))
        found.append(Room(folder.name, _first_sentence(folder / "__init__.py"), len(files), _lines(files)))
    files = sorted(top.glob("*.py"))
    return [*found, Room("", _first_sentence(top / "__init__.py"), len(files), _lines(files))]


def imported(package: str) -> set[str]:
    """The other packages that a package imports, lazily or for types only, too."""
    known = {name for floor in FLOORS for name in floor}
    found = set()
    for file in source(package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name.partition(".")[0] for name in names} & known
    return found - {package}


def picture() -> str:
    """The whole house as SVG. An arrow that others imply is left out."""
    boxes: dict[str, tuple[float, float, float, float]] = {}
    drawn: list[str] = []
    top = float(GAP)
    for floor in FLOORS:
        weights = {package: sqrt(sum(room.lines for room in rooms(package)) + 400) for package in floor}
        usable = WIDTH - GAP * (len(floor) + 1)
        left, height = float(GAP), 0.0
        for package in floor:
            width = usable * weights[package] / sum(weights.values()) if len(floor) > 1 else min(usable, 12 * weights[package])
            content, tall = _package(package, left, top, width)
            boxes[package] = (left, top, width, tall)
            drawn.append(content)
            left, height = left + width + GAP, max(height, tall)
        top += height + 3 * GAP
    reach = {package: imported(package) for package in boxes}
    direct = {upper: {to for to in lower if not any(to in reach[way] for way in lower)} for upper, lower in reach.items()}
    arrows = [_arrow(boxes[upper], boxes[lower]) for upper in boxes for lower in sorted(direct[upper])]
    style = (
        "text{font-family:system-ui,sans-serif;font-size:12px;fill:#222}.name{font-weight:600;font-size:14px}"
        ".package{fill:#f4f1ea;stroke:#8a8170}.room{fill:#fff;stroke:#b9b09c}.arrow{stroke:#8a5a2b;stroke-width:1.2;fill:none;opacity:.55}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img" aria-label="The packages of Forge">'
        f"<style>{style}</style>{''.join(arrows)}{''.join(drawn)}</svg>"
    )


def _package(package: str, left: float, top: float, width: float) -> tuple[str, float]:
    """A package with its rooms in rows, and its height."""
    x, y, tall = left + 8, top + 26, 2 * LINE + 6
    inside = []
    for room in sorted(rooms(package), key=lambda room: (not room.name, room.name)):
        wide = max(78.0, 7.2 * len(room.name or "(root)") + 16, 3.2 * sqrt(room.lines) + 16)
        wide = min(wide, width - 16)
        if x + wide > left + width - 8 and x > left + 8:
            x, y = left + 8, y + tall + 6
        inside.append(
            f"<g><title>{escape(room.says)}</title>"
            f'<rect class="room" x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{tall}" rx="3"/>'
            f'<text x="{x + 7:.0f}" y="{y + LINE:.0f}">{escape(room.name or "(root)")}</text>'
            f'<text x="{x + 7:.0f}" y="{y + 2 * LINE:.0f}" opacity=".6">{ceil(room.lines / 10) * 10:,} lines</text></g>'
        )
        x += wide + 6
    height = y + tall + 8 - top
    frame = f'<rect class="package" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6"/>'
    name = f'<text class="name" x="{left + 8:.0f}" y="{top + 18:.0f}">{package}</text>'
    return frame + name + "".join(inside), height


def _arrow(upper: tuple[float, float, float, float], lower: tuple[float, float, float, float]) -> str:
    x, y = upper[0] + upper[2] / 2, upper[1] + upper[3]
    to_x, to_y = lower[0] + lower[2] / 2, lower[1]
    bend = (to_y - y) / 2
    return (
        f'<path class="arrow" d="M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f} {to_x:.0f},{to_y:.0f}"/>'
    )


def table(package: str) -> Iterator[str]:
    """Lines of a Markdown table: a package's rooms, what each says it is, and its files."""
    yield from ("| room | what is in it | files |", "|---|---|---|")
    for room in rooms(package):
        if room.name:
            yield f"| `{room.name}/` | {room.says} | {room.files} |"


def _first_sentence(file: Path) -> str:
    if not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def _lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def setup(app: object) -> dict[str, bool]:
    """Registers the directives `house` and `rooms`."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class House(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return [nodes.raw("", picture(), format="html")]

    class Rooms(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes("\n".join(table(self.arguments[0])))

    app.add_directive("house", House)  # type: ignore[attr-defined]
    app.add_directive("rooms", Rooms)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
