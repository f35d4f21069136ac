"""Nothing is installed here but what one distribution requires, directly or through others: `closure.py NAME`.

`isolation` starts each environment from a copy of one that already has torch, which saves minutes; this shows that the
copy holds nothing that the wheel itself would not have brought.
"""

import re
import sys
from importlib.metadata import distribution, distributions


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


installed = {normal(found.name) for found in distributions()} - {"pip", "setuptools", "wheel"}
reached, waiting = set(), [normal(sys.argv[1])]
while waiting:
    name = waiting.pop()
    if name in installed - reached:  # others are extras, or for another platform
        reached.add(name)
        waiting += [normal(re.split(r"[^\w.-]", line.strip())[0]) for line in distribution(name).requires or ()]
assert installed == reached, f"installed without being required by {sys.argv[1]}: {sorted(installed - reached)}"
