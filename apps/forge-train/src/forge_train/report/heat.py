"""A heat map as SVG text: one row per layer, one cell per expert."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, LEFT, TOP, ROW = 720, 90, 38, 16
FULL = 2.0
"""The load, in units of the mean, from which on a cell is fully colored."""
NAMED = 4096
"""Cells up to which each shows its number under the pointer; more would only make the page large."""


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
