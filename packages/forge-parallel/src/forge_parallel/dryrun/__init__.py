"""Estimates the memory and traffic of a layout without its ranks: runs the real code on fake tensors in a simulated world.

    import torch
    from forge_parallel import Layout
    from forge_parallel.dryrun import Traffic, axis_of

    with Traffic(Layout()) as traffic:  # around a step, on every rank
        torch.ones(3).sum()
    assert traffic.flows() == []
    assert axis_of([0, 1], Layout.parse("dp2tp2")) == "tp"

`dry_run` estimates the memory and traffic of a `Workload` under a `forge_parallel.Plan`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.dryrun.estimate import Estimate, Workload, dry_run
    from forge_parallel.dryrun.fake_world import expert_probability
    from forge_parallel.dryrun.sharding import Recommendation, recommend
    from forge_parallel.dryrun.traffic import Flow, Traffic, axis_of

__all__ = ["Estimate", "Flow", "Recommendation", "Traffic", "Workload", "axis_of", "dry_run", "expert_probability", "recommend"]
__getattr__, __dir__ = lazy_exports(__name__)
