"""Splits text of users into lines."""

import re

_END = re.compile(r"\r?\n")


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text without their ends; a line ends with a line feed, or with carriage return and line feed.

    `str.splitlines` also splits at ten other characters that texts contain, such as a form feed, U+0085, U+2028 and U+001C. A
    line end at the end of the text does not begin another line.
    """
    lines = _END.split(text)
    return lines if lines[-1] else lines[:-1]
