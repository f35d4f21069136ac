"""Draws heat maps of a matrix with named rows and columns, as SVG text, PNG bytes, or a file."""

from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from forge_core.errors import ForgeError
from forge_core.files import replace_file

CELL, LABEL, TITLE = 34, 190, 40
"""Pixels: side of a cell, room for names, room for the title."""
LIGHT, DARK = (247, 251, 255), (8, 48, 107)


def heat_map(title: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> str:
    """Returns an SVG with one cell per number, which shows the value, also in a tooltip. Colors clamp to 0 and 1."""
    width, height = LABEL + CELL * len(columns) + 10, TITLE + CELL * len(rows) + LABEL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(title)}">',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for at, (name, line) in enumerate(zip(rows, values, strict=True)):
        top = TITLE + CELL * at
        parts.append(f'<text x="{LABEL - 6}" y="{top + CELL / 2 + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        for place, (column, value) in enumerate(zip(columns, line, strict=True)):
            left, share = LABEL + CELL * place, min(max(value, 0.0), 1.0)
            color = ",".join(f"{a + (b - a) * share:.0f}" for a, b in zip(LIGHT, DARK, strict=True))
            middle = f'x="{left + CELL / 2:.0f}" y="{top + CELL / 2 + 4:.0f}" text-anchor="middle"'
            ink = "white" if share > 0.5 else "black"
            parts.append(
                f"<g><title>{escape(name)}, {escape(column)}: {value:.4f}</title>"
                f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" fill="rgb({color})"/>'
                f'<text {middle} fill="{ink}">{value:.2f}</text></g>'
            )
    for place, column in enumerate(columns):
        left, top = LABEL + CELL * place + CELL / 2 + 4, TITLE + CELL * len(rows) + 6
        parts.append(f'<text transform="translate({left:.0f},{top}) rotate(-90)" text-anchor="end">{escape(column)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def heat_map_png(title: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> bytes:
    """Returns the same heat map as a PNG.

    Raises:
        ForgeError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ForgeError("PNG pictures need matplotlib: pip install 'forge-interp[pictures]', or choose .svg") from cause

    if [len(line) for line in values] != [len(columns)] * len(rows):
        raise ValueError("a heat map has a number for each row and column")
    figure = Figure(figsize=((LABEL + CELL * len(columns)) / 80, (LABEL + CELL * len(rows)) / 80), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = [tuple(value / 255 for value in color) for color in (LIGHT, DARK)]
    axes.imshow(values, cmap=LinearSegmentedColormap.from_list("", ends), vmin=0, vmax=1)
    axes.set_title(title)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    for at, line in enumerate(values):
        for place, value in enumerate(line):
            axes.text(place, at, f"{value:.2f}", ha="center", va="center", size=7, color="white" if value > 0.5 else "black")
    written = BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


PICTURES = (".svg", ".png")


def check_picture(path: Path | None) -> None:
    """Checks before any computation that the output file is a picture; raises `ForgeError` otherwise."""
    if path is not None and path.suffix not in PICTURES:
        raise ForgeError(f"--output {path}: heat maps are {' and '.join(PICTURES)} files; --json prints the numbers")


def write_heat_map(
    path: Path, title: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]
) -> None:
    """Writes a heat map in the format of the file's suffix.

    Raises:
        ForgeError: the suffix is not supported, a library is missing, or the file cannot be written.
    """
    check_picture(path)
    drawn = (
        heat_map_png(title, values, rows, columns) if path.suffix == ".png" else heat_map(title, values, rows, columns).encode()
    )
    try:
        replace_file(path, drawn)
    except OSError as cause:
        raise ForgeError(f"{path} cannot be written: {cause.strerror}; choose another --output") from cause
