"""Checks for plugins: a test of one line shows that the parts of a distribution conform to their groups.

    from forge_testing import conforms, run_with

    def test_my_plugin():
        conforms("forge-lionize")  # or a class in a file: conforms("./lion.py:Lion", "forge.optimizers")

    def test_my_hook():
        from forge_train.hooks import Norms  # yours

        trained = run_with(Norms(every=2))  # four steps of a tiny model on the CPU
        assert not trained.beyond  # what it used of the run besides the protocol

The checks of each group are a class of `forge_testing.checks`. They need the distribution that defines the group, such as
forge-parallel for optimizers, and `run_with` needs forge-train. Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_core.conformance import Problem, conforms, examine, problems
    from forge_testing.runs import Trained, run_alone, run_with, unstarted_run

__all__ = ["Problem", "Trained", "conforms", "examine", "problems", "run_alone", "run_with", "unstarted_run"]
__getattr__, __dir__ = lazy_exports(__name__)
