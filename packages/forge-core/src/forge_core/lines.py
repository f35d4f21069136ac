"""Lines of text that users wrote."""

import re

_END = re.compile(r"\r?\n")


def lines_of(text: str) -> list[str]:
    """The lines of a text, without their ends; a line ends with a line feed, or with a carriage return and one.

    `str.splitlines` cuts at ten other characters, too, which texts hold: a form feed, U+0085, U+2028, U+001C. An end of line at
    the end of the text begins no further line.
    """
    lines = _END.split(text)
    return lines if lines[-1] else lines[:-1]
