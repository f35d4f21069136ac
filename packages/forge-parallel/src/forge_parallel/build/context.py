"""What a strategy may use when it is applied: the part's description, this rank's place, and number formats."""

from dataclasses import dataclass

import torch

from forge_core.specs import Specs
from forge_parallel.placement.topology import Topology


@dataclass(frozen=True)
class Context:
    """One part of the model on one rank, as `forge_core.protocols.topology.Context` describes it."""

    specs: Specs
    topology: Topology
    compute: torch.dtype
    state: torch.dtype
    whole: Specs | None = None
    average: bool = False
