"""Building blocks of a page: the document, tables, and heat maps as SVG."""

import json
from base64 import b64encode
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any


def document(title: str, parts: Iterable[str], *, styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """Returns a page of HTML parts; empty parts are left out.

    Its content security policy forbids the browser to fetch anything or to run scripts other than these, identified by hash.

    Args:
        title: title of the page.
        parts: HTML of the body.
        styles: further style sheets, as text.
        scripts: scripts to run in this order at the end of the page; must not contain `</script` or `<!--`.
    """
    runs = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = "default-src 'none'; style-src 'unsafe-inline'" + (f"; script-src {runs}" if runs else "")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            *(f"<style>\n{style}</style>" for style in (*styles, static("style.css"))),
            "</head>\n<body>",
            *(part for part in parts if part),
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def static(name: str) -> str:
    """Returns the text of a static file of this package."""
    return files("forge_train.report").joinpath("static", name).read_text(encoding="utf-8")


def embedded(name: str, value: Any) -> str:
    """Returns an element with JSON data, which scripts find by the id `name`; no text in the data can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def section(title: str, inner: str) -> str:
    """Returns a section with a title; empty without content."""
    return f"<section><h2>{escape(title)}</h2>\n{inner}</section>" if inner else ""


def rows(
    head: Sequence[str],
    body: Sequence[Sequence[Any]],
    *,
    numbers: Container[int] = (),
    code: Container[int] = (),
    runs: Sequence[int] = (),
) -> str:
    """Returns a table; columns in `numbers` are right-aligned, columns in `code` are monospaced. With `runs`, the first cell of
    each row has the color of that run."""

    def cells(tag: str, values: Sequence[Any], run: int | None = None) -> str:
        marks = ["" if run is None or number else swatch(run) for number in range(len(values))]
        return "".join(f"<{tag}{style(n)}>{marks[n]}{escape(_text(value))}</{tag}>" for n, value in enumerate(values))

    def style(number: int) -> str:
        return ' class="number"' if number in numbers else ' class="code"' if number in code else ""

    of = [*runs, *[None] * (len(body) - len(runs))]
    lines = [f"<tr>{cells('td', values, run)}</tr>" for values, run in zip(body, of, strict=True)]
    inner = f"<thead><tr>{cells('th', head)}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table>{inner}</table></div>'


def fields(caption: str, items: Mapping[str, Any]) -> str:
    """Returns a table of names and values."""
    lines = [f"<tr><th>{escape(str(name))}</th><td>{escape(_text(value))}</td></tr>" for name, value in items.items()]
    return f"<table><caption>{escape(caption)}</caption><tbody>{''.join(lines)}</tbody></table>"


def facts(items: Mapping[str, str]) -> str:
    """Returns a row of names and values, with large values."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items.items())
    return f'<dl class="facts">{inner}</dl>'


def swatch(run: int) -> str:
    """Returns a spot in the color of a run; the page has `PALETTE` colors."""
    return f'<i class="swatch s{run % PALETTE}"></i>'


PALETTE = 8


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


WIDTH, LEFT, TOP, ROW = 720, 90, 38, 16
FULL = 2.0
"""Load relative to the mean from which on a cell is fully colored."""
NAMED = 4096
"""Maximum number of cells for which each cell has a tooltip with its number; limits the size of the page."""


def table(title: str, note: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]) -> str:
    """Returns an SVG with a cell for each number, colored in proportion from 0 to 1; None has no cell."""
    side = min(ROW * 2, (WIDTH - LEFT - 16) / max(len(columns), 1))
    every = max(1, -(-len(columns) * ROW // (WIDTH - LEFT - 16)))  # shows only as many names as fit
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
    """Returns an SVG of `layers`, name -> values, where 1 is the mean; "" without layers."""
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
