"""A table of numbers from 0 to 1 as colors, in SVG text that needs no style of a page."""

from collections.abc import Sequence
from html import escape

CELL, LABEL, TITLE = 34, 190, 40
"""Pixels: side of a cell, room for names, room for the title."""
LIGHT, DARK = (247, 251, 255), (8, 48, 107)


def heat_map(title: str, values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> str:
    """SVG with a cell for each number, its value inside and in a tooltip; below 0 counts as 0 for the color, above 1 as 1."""
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
