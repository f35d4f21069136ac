"""An HTML page in one file that fetches nothing, with the style that pages of Forge share."""

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any


def document(title: str, parts: Iterable[str], *, styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """A page of HTML parts; empty parts are left out.

    The browser itself refuses to fetch anything, and to run any script but those given, which it knows by their hashes.

    Args:
        styles: more style sheets, as text.
        scripts: run in this order at the end of the page; none has `</script` or `<!--` in it.
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
    """Text of a file that comes with the pages."""
    return files("forge_train.report").joinpath("static", name).read_text(encoding="utf-8")


def embedded(name: str, value: Any) -> str:
    """Plain data for scripts of the page, which find it by the id `name`. No text in it can end the element that holds it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def section(title: str, inner: str) -> str:
    """A titled part of a page; nothing without content."""
    return f"<section><h2>{escape(title)}</h2>\n{inner}</section>" if inner else ""
