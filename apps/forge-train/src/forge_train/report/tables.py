"""HTML tables of plain values."""

from collections.abc import Container, Mapping, Sequence
from html import escape
from typing import Any


def rows(head: Sequence[str], body: Sequence[Sequence[Any]], *, numbers: Container[int] = (), code: Container[int] = ()) -> str:
    """A table; columns in `numbers` are aligned to the right, those in `code` have a fixed width."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "".join(f"<{tag}{_style(number)}>{escape(_text(value))}</{tag}>" for number, value in enumerate(values))

    def _style(number: int) -> str:
        return ' class="number"' if number in numbers else ' class="code"' if number in code else ""

    lines = [f"<tr>{cells('td', values)}</tr>" for values in body]
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def fields(caption: str, items: Mapping[str, Any]) -> str:
    """A table of names and values."""
    lines = [f"<tr><th>{escape(str(name))}</th><td>{escape(_text(value))}</td></tr>" for name, value in items.items()]
    return f"<table><caption>{escape(caption)}</caption><tbody>{''.join(lines)}</tbody></table>"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
