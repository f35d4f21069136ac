"""Whole tensors from what ranks own, for comparisons. Not for large models: every rank gets everything."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.owner import owns


def gathered(model: ParallelModel, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Collective: global name -> whole tensor on the host, for every parameter of the model that some rank brings.

    `tensors` are this rank's parameters, or their gradients, by global name; all ranks enter. Each element comes from the
    one rank that owns it.

    Raises:
        PlanError: an element is owned by no rank, or by several.
    """
    whole: dict[str, torch.Tensor] = {}
    for name, shape in model.shapes.items():
        mine = tensors.get(name)
        value = torch.zeros(shape, dtype=torch.float64, device=model.topology.device)
        owned = torch.zeros_like(value, dtype=torch.int32)
        if mine is not None and owns(mine, model.topology):
            box = local_box(mine)
            box.within(value.view(box.shape)).copy_(box.local)  # a layout may see two dimensions in one
            box.within(owned.view(box.shape)).fill_(1)
        model.topology.all_reduce(owned)
        if owned.numel() and not owned.any():
            continue
        if not (owned == 1).all():
            raise PlanError(f"{name}: elements are owned by {int(owned.min())} to {int(owned.max())} ranks instead of one")
        whole[name] = model.topology.all_reduce(value).cpu()
    return whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: the whole of one tensor, detached and copied, on the host. Ranks of its mesh enter; cuts must be even."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone().cpu()
