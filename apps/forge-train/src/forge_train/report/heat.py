"""Heat maps as SVG text: loads of experts by layer, and tables of what is between 0 and 1."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, TOP, ROW = 720, 90, 38, 16
FULL = 2.0
"""The load, in units of the mean, from which on a cell is fully colored."""
NAMED = 4096
"""Cells up to which each shows its number under the pointer; more would only make the page large."""


def table(title: str, note: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]) -> str:
    """SVG with a cell for each number, the more colored the nearer it is to 1; a number that is not there has none."""
    side = min(ROW * 2, (WIDTH - LEFT - 16) / max(len(columns), 1))
    every = max(1, -(-len(columns) * ROW // (WIDTH - LEFT - 16)))  # as many names as have room below each other
    height = TOP + side * len(rows) + LEFT
    inner = [
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}<tspan class="axis" dx="8">{escape(note)}</tspan></text>',
    ]
    for number, (name, line) in enumerate(zip(rows, values, strict=True)):
        top = TOP + side * number
        if number % every == 0:
            at = f'x="{LEFT - 8}" y="{top + side / 2 + 4:.1f}" text-anchor="end"'
            inner.append(f'<text class="tick" {at}>{escape(name)}</text>')
        for place, (column, value) in enumerate(zip(columns, line, strict=True)):
            if value is None:
                continue
            box = f'x="{LEFT + side * place:.1f}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}"'
            told = f"<title>{escape(name)}, {escape(column)}: {value:.3f}</title>" if len(rows) * len(columns) <= NAMED else ""
            inner.append(f'<rect class="heat" {box} fill-opacity="{min(max(value, 0.0), 1.0):.2f}">{told}</rect>')
    for place, column in enumerate(columns):
        if place % every == 0:
            left, top = LEFT + side * (place + 0.5) + 4, TOP + side * len(rows) + 8
            turned = f'transform="translate({left:.1f},{top:.1f}) rotate(-90)" text-anchor="end"'
            inner.append(f'<text class="tick" {turned}>{escape(column)}</text>')
    return "\n".join([*inner, "</svg>"])


def heat(title: str, note: str, layers: Mapping[str, Sequence[float]]) -> str:
    """SVG of `layers`, name -> values, 1 = even; "" without any."""
    if not layers:
        return ""
    height = TOP + ROW * len(layers) + 12
    named = sum(len(values) for values in layers.values()) <= NAMED
    inner = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}<tspan class="axis" dx="8">{escape(note)}</tspan></text>',
    ]
    for number, (name, values) in enumerate(layers.items()):
        top, width = TOP + ROW * number, (WIDTH - LEFT - 16) / max(len(values), 1)
        inner.append(f'<text class="tick" x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
        for expert, value in enumerate(values):
            place = f'x="{LEFT + width * expert:.1f}" y="{top}" width="{width * 0.94:.1f}" height="{ROW - 2}"'
            shade = f'fill-opacity="{min(max(value / FULL, 0.0), 1.0):.2f}"'
            told = f"<title>{escape(name)}, expert {expert}: {value:.2f}</title>" if named else ""
            inner.append(f'<rect class="heat" {place} {shade}>{told}</rect>')
    return "\n".join([*inner, "</svg>"])
