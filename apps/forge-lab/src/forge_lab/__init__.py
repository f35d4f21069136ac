r"""Experiments of many runs: sweeps, scaling laws, campaigns of measurements, and comparisons of runs.

    from pathlib import Path
    from forge_lab import Law, read_sweep

    Path("lr.toml").write_text('recipe = "debug"\n[vary]\noptimizer.lr = [1e-3, 3e-3, 1e-2]\n')
    sweep = read_sweep(Path("lr.toml"))
    assert len(sweep.points) == 3
    law = Law(irreducible=1.69, a=406.4, b=410.7, alpha=0.34, beta=0.28)
    law.loss(70e9, 1.4e12)  # of 70e9 parameters after 1.4e12 tokens

After `forge-train sweep lr.toml`, `collect_results(sweep)` returns the results. `write_comparison` writes a page that
compares runs. `read_campaign` reads a campaign of `forge-train bench`; `write_tables` writes its tables from the raw records.
Importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_lab.campaigns.campaign import Campaign, read_campaign
    from forge_lab.campaigns.tables import CampaignResults, write_tables
    from forge_lab.comparison import differences, write_comparison
    from forge_lab.scaling.law import Fit, Frontier, Law, ObservedLosses, PowerLaw, fit, fit_frontier
    from forge_lab.scaling.runs import gather
    from forge_lab.scaling.study import study
    from forge_lab.sweep.grid import Sweep, read_sweep
    from forge_lab.sweep.results import Results, collect_results

__all__ = [
    "Campaign",
    "CampaignResults",
    "Fit",
    "Frontier",
    "Law",
    "ObservedLosses",
    "PowerLaw",
    "Results",
    "Sweep",
    "collect_results",
    "differences",
    "fit",
    "fit_frontier",
    "gather",
    "read_campaign",
    "read_sweep",
    "study",
    "write_comparison",
    "write_tables",
]
__getattr__, __dir__ = lazy_exports(__name__)
