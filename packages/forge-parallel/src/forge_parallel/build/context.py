"""What a strategy may use when it is applied: the part's description, this rank's place, and number formats."""

from dataclasses import dataclass

import torch

from forge_core.specs import Specs
from forge_parallel.placement.topology import Topology


@dataclass(frozen=True)
class Context:
    """One part of the model on one rank.

    Attributes:
        specs: of the part; its names are global.
        topology: this rank's place.
        compute: dtype of parameters and activations in forward and backward.
        state: dtype of what the optimizer updates.
        whole: of the whole model, of which the part may be a pipeline's stage; None where it is all of it.
    """

    specs: Specs
    topology: Topology
    compute: torch.dtype
    state: torch.dtype
    whole: Specs | None = None
