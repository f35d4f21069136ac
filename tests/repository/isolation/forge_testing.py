"""forge-testing alone: it needs forge-core and no torch, runs the checks of a plugin, and says which of Forge are missing."""

import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from forge_core.registry import Entry, Registry
from forge_testing import conforms, examine

siblings = {found.name for found in distributions() if found.name.startswith("forge-")}
assert siblings == {"forge-testing", "forge-core"}, siblings

PART = """
from dataclasses import dataclass

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Half(Component):
    '''Half of the learning rate.'''

    share: float = 0.5
    '''Factor of every step.'''

    def build(self, steps):
        return lambda step: self.share
"""
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "half.py"
    path.write_text(PART)
    try:
        conforms(f"{path}:Half", "forge.schedules")
    except AssertionError as error:
        assert "the checks of forge.schedules are not installed: pip install forge-train" in str(error), error
    else:
        raise AssertionError("checks that are not installed have passed")
    (Path(folder) / "half_checks.py").write_text("def check_half(component):\n    assert component.build(9)(0) == 0.5\n")
    sys.path.insert(0, folder)
    train = Entry("forge.commands", "run", "forge-train", "2.0.0", "half:Half")
    kit = Entry("forge.conformance", "forge.schedules", "forge-testing", "2.0.0", "half_checks")
    part = Entry("forge.schedules", "half", "mine", "1.0", "half:Half")
    assert examine(part, Registry([part, train, kit])).passed == ("check_half",)
assert "torch" not in sys.modules
