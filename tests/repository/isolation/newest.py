"""The torch that is installed is the newest that the packages admit: so their upper bound is one that a test has seen."""

import re
from importlib.metadata import distributions, version

bounds = {
    bound.group(1)
    for package in distributions()
    if package.metadata["Name"].startswith("forge-")
    for line in package.requires or ()
    if (bound := re.fullmatch(r"torch[^;]*<(\d+\.\d+)[^;]*", line))
}
assert len(bounds) == 1, f"the packages admit torch up to {sorted(bounds)}; give all of them one bound"
major, minor = map(int, bounds.pop().split("."))
installed = version("torch")
assert installed.startswith(f"{major}.{minor - 1}."), f"the packages admit torch below {major}.{minor}, and pip took {installed}"
print(f"installed: torch {installed}")
