"""The torch that pip chose is a release that Forge supports, and the packages admit none after the last of these.

Its arguments are the supported releases, in order: those of `matrix` in the noxfile.
"""

import re
import sys
from importlib.metadata import distributions, version

supported = sys.argv[1:]
bounds = {
    bound.group(1)
    for package in distributions()
    if package.metadata["Name"].startswith("forge-")
    for line in package.requires or ()
    if (bound := re.fullmatch(r"torch[^;]*<(\d+\.\d+)[^;]*", line))
}
major, minor = map(int, supported[-1].split("."))
assert bounds == {f"{major}.{minor + 1}"}, f"the packages admit torch below {sorted(bounds)}, but {supported[-1]} is the last"
installed = version("torch")
assert any(installed.startswith(f"{release}.") for release in supported), f"pip took {installed}, which is none of {supported}"
print(f"installed: torch {installed}")
