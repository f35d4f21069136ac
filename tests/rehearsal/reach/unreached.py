"""The list of lines that depend on the device and that no rehearsal runs: `unreached.txt`."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from rehearsal.reach.scope import Line

LIST = Path(__file__).parent / "unreached.txt"
HEAD = """\
# Lines that depend on the device and that no rehearsal runs. `nox -s rehearsal` writes this file, and fails where it changes:
# look at what came in, and commit it, or rehearse it.
"""


def reached(directory: Path) -> set[str]:
    """What the processes of a rehearsal wrote."""
    return {line for file in directory.iterdir() for line in file.read_text().splitlines()}


def written(lines: Iterable[Line], reached: set[str]) -> str:
    """The list: the lines by function, in the order in which they are written."""
    missing = [line for line in lines if str(line) not in reached]
    parts = [HEAD]
    for (module, function), found in groupby(missing, key=lambda line: (line.module, line.function)):
        parts.append(f"\n{module}:{function}\n" + "".join(f"    {line.text}\n" for line in found))
    return "".join(parts)


def listed(text: str) -> list[Line]:
    """What a list says."""
    found, place = [], ""
    for line in text.splitlines():
        if line.startswith("    "):
            module, _, function = place.partition(":")
            found.append(Line(module, function, line.strip()))
        elif not line.startswith("#"):
            place = line
    return found
