"""AdamW whose moments have eight bits: about two bytes an element instead of eight. Parameters stay as they are.

The update is that of exact moments; what is kept of them for the next step is rounded. Dettmers et al. (2021) find the losses of
exact ones.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forge_core.errors import PlanError
from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.adamw_bf16 import MOMENTS, adamw_rule
from forge_parallel.optim.elementwise import ElementwiseOptimizer, UpdateRule
from forge_parallel.optim.grouped import GroupedOptimizer, ParameterSubset
from forge_parallel.optim.low_bits.blocks import Blocks

SCALES = tuple(f"{moment}_scale" for moment in MOMENTS)


def adamw8bit(
    model: TrainableModel,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    block: int,
    smallest: int,
) -> GroupedOptimizer:
    """The optimizer, for `model.trainable()`.

    Args:
        model: whose parameters are updated, of fp32 or fp64.
        lr: the peak rate.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: of what is decayed.
        block: elements of a row with one scale.
        smallest: parameters of fewer elements, and vectors, keep exact moments. The whole tensor counts, so all layouts agree.

    Raises:
        ForgeError: torchao is not installed.
        PlanError: parameters have another format, or the layout cuts a block.
    """
    named = list(model.trainable())
    if low := {tensor.dtype for _, tensor, _ in named} - {torch.float32, torch.float64}:
        raise PlanError(f"AdamW8bit updates parameters of fp32 and fp64, not {', '.join(map(str, low))}; use adamw")
    coded = [name for name, tensor, _ in named if tensor.dim() > 1 and tensor.numel() >= smallest]
    exact = [name for name, _, _ in named if name not in set(coded)]
    arithmetic = adamw_rule(betas, eps)
    in_blocks = _InBlocks(Blocks(block))
    many = ElementwiseOptimizer(
        ParameterSubset(model, coded), arithmetic._replace(states=MOMENTS + SCALES), lr, weight_decay, in_blocks
    )
    return GroupedOptimizer(
        [(1.0, many), (1.0, ElementwiseOptimizer(ParameterSubset(model, exact), arithmetic, lr, weight_decay))]
    )


class _InBlocks:
    """Moments as codes and scales; implements `elementwise.Kept`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def zeros(self, state: str, name: str, tensor: Tensor) -> Tensor:
        return self._blocks.codes(name, tensor) if state in MOMENTS else self._blocks.scales(tensor)

    def kernel(self, rule: UpdateRule, device: torch.device) -> Callable[..., None]:
        blocks = self._blocks
        kinds = (blocks.numbers("signed", device), blocks.numbers("positive", device))

        def update(
            values: Sequence[Tensor],
            slope: Tensor,
            numbers: Sequence[Tensor],
            place: Tensor,  # noqa: ARG001 (of noise, which nothing here has)
            keys: Tensor,  # noqa: ARG001
            step: Tensor,  # noqa: ARG001
            taken: Tensor,
        ) -> None:
            weight, *kept = values
            codes, scales = kept[:2], kept[2:]
            width = blocks.width(weight.shape[-1])
            moments = [blocks.decoded(*each, width) for each in zip(codes, scales, kinds, strict=True)]
            moved, *moments = rule.update(weight, moments, slope.to(weight.dtype), numbers)
            found = [blocks.coded(moment, kind, width) for moment, kind in zip(moments, kinds, strict=True)]
            new = [moved, *(code for code, _ in found), *(scale for _, scale in found)]
            for held, value in zip(values, new, strict=True):
                held.copy_(torch.where(taken, value, held))

        return update
