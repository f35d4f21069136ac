"""HTML tables of plain values."""

from collections.abc import Container, Mapping, Sequence
from html import escape
from typing import Any


def rows(
    head: Sequence[str],
    body: Sequence[Sequence[Any]],
    *,
    numbers: Container[int] = (),
    code: Container[int] = (),
    runs: Sequence[int] = (),
) -> str:
    """A table; columns in `numbers` are aligned to the right, those in `code` have a fixed width. With `runs`, the first cell of
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
    """A table of names and values."""
    lines = [f"<tr><th>{escape(str(name))}</th><td>{escape(_text(value))}</td></tr>" for name, value in items.items()]
    return f"<table><caption>{escape(caption)}</caption><tbody>{''.join(lines)}</tbody></table>"


def facts(items: Mapping[str, str]) -> str:
    """A row of names and values, the values large."""
    inner = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in items.items())
    return f'<dl class="facts">{inner}</dl>'


def swatch(run: int) -> str:
    """A spot in the color of a run; the page has `PALETTE` colors."""
    return f'<i class="swatch s{run % PALETTE}"></i>'


PALETTE = 8


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
