"""Removes secrets from what is shown or kept: reports, trackers, checkpoints."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.errors import CheckpointError

HIDDEN = "(hidden)"

_SECRET = re.compile(r"(?i)token(?!izer)|key|secret|passw|credential")
_ASSIGNED = re.compile(r"""(?P<key>[\w.-]*|"[^"]*"|'[^']*')(?P<is>\s*[=:]\s*)(?P<value>"(?:\\.|[^"\\])*"|'[^']*')""")
_ADDRESS = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^\s/@'\"]+@")
_QUERY = re.compile(r"(?P<key>[?&][\w.-]+=)[^\s&'\"]+")


def secret(key: str) -> bool:
    """Whether the value of `key` may be a secret. Only text is hidden; a number under `max_tokens` is not a secret."""
    return bool(_SECRET.search(key))


def redacted(value: Any, key: str = "") -> Any:
    """A copy of plain data without secrets: text below a secret key, and credentials inside addresses."""
    if isinstance(value, Mapping):
        return {name: redacted(item, name if secret(str(name)) else key) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        return HIDDEN if secret(key) and value else redacted_text(value)
    return value


def refuse_redacted(tables: Mapping[str, Any], origin: str) -> None:
    """Raises a CheckpointError that names the keys of `tables`, read from `origin`, whose secrets were left out."""
    if names := ", ".join(_hidden(tables)):
        raise CheckpointError(
            f"{origin} does not keep secrets: {names} is hidden. Give the recipe, such as the run's config.toml; "
            "to encode text only, give --tokenizer"
        )


def _hidden(value: Any, *path: str) -> Iterator[str]:
    if isinstance(value, str) and HIDDEN in value:
        yield ".".join(path)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _hidden(item, *path, str(name))
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _hidden(item, *path, str(index))


def redacted_text(text: str) -> str:
    """Text such as TOML without secrets: quoted values of secret keys, and credentials inside addresses.

    Strings of an array that goes over several lines, and of a table with a secret header, are hidden as well.
    """
    lines = []
    secret_table = open_array = False
    for line in text.splitlines(keepends=True):
        if header := re.match(r"\s*\[+([^\]\[=\"',]+)\]+\s*(#.*)?$", line):
            secret_table, open_array = secret(header[1]), False
            lines.append(line)
            continue
        if array := re.match(r"\s*([\w.\"'-]+)\s*=\s*\[", line):
            open_array = secret(array[1])
        lines.append(_all_strings(line) if secret_table or open_array else _secret_strings(line))
        if line.rstrip().endswith("]"):
            open_array = False
    return "".join(lines)


def _all_strings(line: str) -> str:
    return re.sub(r"""("(?:\\.|[^"\\])*"|'[^']*')""", f'"{HIDDEN}"', line)


def _secret_strings(line: str) -> str:
    line = _ADDRESS.sub(lambda found: found["scheme"] + HIDDEN + "@", line)
    line = _QUERY.sub(lambda found: found["key"] + HIDDEN if secret(found["key"]) else found[0], line)
    return _ASSIGNED.sub(lambda found: found["key"] + found["is"] + f'"{HIDDEN}"' if secret(found["key"]) else found[0], line)
