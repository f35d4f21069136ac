"""forge-vlm alone: it stands on core, models and data, and on nothing else of Forge."""

from importlib.metadata import distributions

import forge_vlm

siblings = {found.name for found in distributions() if found.name.startswith("forge-")}
assert siblings == {"forge-vlm", "forge-core", "forge-models", "forge-data"}, siblings
assert forge_vlm.__doc__
