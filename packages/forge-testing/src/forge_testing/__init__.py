"""Checks for plugins: a test of one line shows that the parts of a distribution conform to their groups.

    from forge_testing import conforms, run_with

    def test_my_plugin():
        conforms("forge-lionize")  # or a class in a file: conforms("./lion.py:Lion", "forge.optimizers")

    def test_my_hook():
        trained = run_with(MyHook(every=2))  # four steps of a tiny model on the CPU
        assert trained.state == {"seen": 2}

The checks of each group are a class of `forge_testing.checks`. They need the distribution that defines the group, such as
forge-parallel for optimizers, and `run_with` needs forge-train. Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.conformance import Problem as Problem
from forge_core.conformance import conforms as conforms
from forge_core.conformance import examine as examine
from forge_core.conformance import problems as problems
from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_testing.runs import Trained as Trained
    from forge_testing.runs import run_alone as run_alone
    from forge_testing.runs import run_with as run_with

__getattr__, _names = lazy_exports(__name__, {"Trained": "runs", "run_alone": "runs", "run_with": "runs"})


def __dir__() -> list[str]:
    return sorted((*_names(), "Problem", "conforms", "examine", "problems"))
