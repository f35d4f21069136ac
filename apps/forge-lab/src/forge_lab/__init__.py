"""Experiments of many runs: sweeps, scaling laws, and comparisons of runs.

    from pathlib import Path
    from forge_lab import Law, collect_results, read_sweep, write_comparison

    results = collect_results(read_sweep(Path("lr.toml")))
    results.settings[0].mean  # of the best setting, over its seeds
    write_comparison([Path("runs/small"), Path("runs/wide")], Path("compared.html"))
    law = Law(irreducible=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
    law.loss(70e9, 1.4e12)  # of 70e9 parameters after 1.4e12 tokens

Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_lab.comparison import differences as differences
    from forge_lab.comparison import write_comparison as write_comparison
    from forge_lab.scaling.law import Fit as Fit
    from forge_lab.scaling.law import Frontier as Frontier
    from forge_lab.scaling.law import Law as Law
    from forge_lab.scaling.law import ObservedLosses as ObservedLosses
    from forge_lab.scaling.law import PowerLaw as PowerLaw
    from forge_lab.scaling.law import fit as fit
    from forge_lab.scaling.law import fit_frontier as fit_frontier
    from forge_lab.scaling.runs import gather as gather
    from forge_lab.scaling.study import study as study
    from forge_lab.sweep.grid import Sweep as Sweep
    from forge_lab.sweep.grid import read_sweep as read_sweep
    from forge_lab.sweep.results import Results as Results
    from forge_lab.sweep.results import collect_results as collect_results

_NAMES = {
    "comparison": "differences write_comparison",
    "scaling.law": "Fit Frontier Law ObservedLosses PowerLaw fit fit_frontier",
    "scaling.runs": "gather",
    "scaling.study": "study",
    "sweep.grid": "Sweep read_sweep",
    "sweep.results": "Results collect_results",
}
__getattr__, __dir__ = lazy_exports(__name__, {name: module for module, names in _NAMES.items() for name in names.split()})
