"""Capacity: the largest number of slots that one expert takes, counted over all slots of all tokens of a forward."""

import torch
from torch import Tensor


@torch.no_grad()
def limited(experts: Tensor, weights: Tensor, factor: float, count: int) -> Tensor:
    """`experts` with -1 where a slot is dropped (GShard, Lepikhin et al., 2020).

    An expert keeps its ceil(factor * slots / count) slots of the largest weight, the earlier one among equals. Slots that
    are -1 already, those of padding, neither count nor take a place. Nothing here waits for the device.

    Args:
        experts: (N, top_k) int64 expert of each slot, or -1.
        weights: (N, top_k) combine weights.
        factor: capacity factor; 1 is enough when the load is even.
        count: number of experts.
    """
    flat = experts.flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    keys, order = flat.where(flat >= 0, count)[by_weight].sort(stable=True)
    borders = torch.searchsorted(keys, torch.arange(count + 1, device=keys.device))
    most = (borders[count].double() * (factor / count)).ceil()
    place = torch.arange(len(keys), device=keys.device) - borders[keys]
    kept = torch.empty_like(flat, dtype=torch.bool).scatter_(0, by_weight[order], place < most)
    return experts.where(kept.view_as(experts), -1)
