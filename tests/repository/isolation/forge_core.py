"""forge-core alone: registry, layout and configuration in an environment that has no torch at all."""

import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from forge_core import Component, Layout, LayoutError, Registry, trust_file
from forge_core.config.layers import load_layers
from forge_core.config.validation import walk
from forge_core.errors import UntrustedCode

PLUGIN = '''
from dataclasses import dataclass
from forge_core import Component

@dataclass(frozen=True, kw_only=True)
class Constant(Component):
    """The same rate all the time."""
    factor: float = 1.0
    """Of the rate."""
    def build(self, steps):
        return lambda step: self.factor
'''


@dataclass(frozen=True, kw_only=True)
class Train:
    """A section."""

    max_steps: int = 10
    """How long."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small recipe."""

    train: Train = field(default_factory=Train)
    """What is done."""


assert find_spec("torch") is None
assert find_spec("numpy") is None
siblings = {found.name for found in distributions() if found.name.startswith("forge-")}
assert siblings == {"forge-core"}, siblings

layout = Layout.of({"dp_shard": -1, "ep": 4}, 8)
assert (layout.dp_shard, layout.efsdp, layout.world) == (8, 2, 8)
try:
    Layout.of({"tp": 3}, 8)
except LayoutError as refusal:
    assert "tp 3" in str(refusal), refusal
else:
    raise AssertionError("three ranks do not divide eight")

with tempfile.TemporaryDirectory() as directory:
    plugin = Path(directory) / "mine.py"
    plugin.write_text(PLUGIN)
    try:
        Registry().load("forge.schedules", f"{plugin}:Constant")
    except UntrustedCode as refusal:
        assert "--trust-code" in str(refusal), refusal
    else:
        raise AssertionError("a file that the user did not name ran")
    trust_file(plugin)
    constant = Registry().load("forge.schedules", f"{plugin}:Constant")
    assert issubclass(constant, Component)
    assert constant(factor=0.5).build(10)(3) == 0.5

    recipe = Path(directory) / "recipe.toml"
    recipe.write_text("[train]\nmax_steps = 20\n")
    layered = load_layers(recipe, ["--train.max_steps=30"], Job, Registry())
    assert walk(Job, layered.tree, Registry()).value == Job(train=Train(max_steps=30))
    recipe.write_text("[train]\nmax_steps = 'many'\nmax_step = 3\n")
    layered = load_layers(recipe, [], Job, Registry())
    faults = [*layered.faults, *walk(Job, layered.tree, Registry()).faults]
    assert {fault.key for fault in faults} == {"train.max_steps", "train.max_step"}, faults

assert "torch" not in sys.modules
