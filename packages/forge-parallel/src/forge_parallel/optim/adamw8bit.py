"""AdamW with 8-bit moments, quantized block by block (Dettmers et al., 2021, "8-bit Optimizers via Block-wise Quantization"),
with torchao's arithmetic.

Each row, the last dimension of a tensor, is split into blocks. A number is stored as a code, one of 256 numbers from -1 to 1,
times the largest magnitude of its block. Codes are sharded like the parameter, so a rank that holds whole rows, or whole blocks
of them, has the same codes as one process. Checkpoints contain codes and scales. Values would not suffice, because signed codes
range from -0.993 to 1, and a block whose largest magnitude is negative would get another scale.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from forge_core.errors import PlanError
from forge_core.protocols.model import TrainableModel
from forge_parallel import torchao_library
from forge_parallel.optim.elementwise import MOMENTS, ElementwiseOptimizer, UpdateRule, adamw_rule
from forge_parallel.optim.groups import GroupedOptimizer, ParameterSubset
from forge_parallel.placement.boxes import Box, local_box
from forge_parallel.torch_private import unset_fake_temporarily

KEY, EXTRA = "optimizer.name = 'adamw8bit'", "adamw8bit"


class Blocks:
    """Splits rows into blocks of at most `size` elements and quantizes blocks.

    Raises:
        ForgeError: torchao is not installed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._torchao: Any = torchao_library.require("torchao.optim.quant_utils", KEY, EXTRA)

    def numbers(self, sign: Literal["signed", "positive"], device: torch.device) -> Tensor:
        """Returns the numbers that the codes represent, ascending: (256,) fp32."""
        with unset_fake_temporarily():  # torchao reads tensors here, and fake tensors of a dry run have no values
            numbers = self._torchao.create_dynamic_map(signed=sign == "signed")
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    def width(self, row: int) -> int:
        """Returns the elements per block of a row of length `row`, or of a rank's part of one; the last block may be shorter."""
        return min(self.size, row)

    def codes(self, name: str, tensor: Tensor) -> Tensor:
        """Returns uint8 codes of zeros, sharded like `tensor`, whose global name is `name`.

        Raises:
            PlanError: this rank holds only a part of a block.
        """
        box = local_box(tensor)
        self._check(name, box)
        return _laid_out(torch.zeros(box.local.shape, dtype=torch.uint8, device=box.local.device), tensor, box.shape)

    def scales(self, tensor: Tensor) -> Tensor:
        """Returns scales of zeros in the dtype of `tensor` and sharded like it: (rows, blocks), where rows are all dimensions but
        the last."""
        box = local_box(tensor)
        width = self.width(box.shape[-1])
        here, whole = (-(-shape[-1] // width) for shape in (box.local.shape, box.shape))
        local = torch.zeros((*box.local.shape[:-1], here), dtype=box.local.dtype, device=box.local.device)
        return _laid_out(local, tensor, (*box.shape[:-1], whole))

    def decoded(self, codes: Tensor, scales: Tensor, numbers: Tensor, width: int) -> Tensor:
        """Returns the values of codes (..., columns) with scales (..., blocks) of `width` columns each."""
        columns = codes.shape[-1]
        values = self._torchao.dequant_with_qmap(_filled(codes, width), numbers, scales.reshape(-1))
        return values[..., :columns]

    def coded(self, values: Tensor, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Returns codes (..., columns) and scales (..., blocks) of values; each value is rounded to the nearest number."""
        columns = values.shape[-1]
        filled = _filled(values, width)
        scaled, scales = self._torchao.scale_tensor(filled, width)
        codes = self._torchao.quantize_8bit_with_qmap(scaled, numbers)
        return codes[..., :columns], scales.view(*values.shape[:-1], filled.shape[-1] // width)

    def _check(self, name: str, box: Box) -> None:
        width, first, columns, row = self.width(box.shape[-1]), box.offset[-1], box.local.shape[-1], box.shape[-1]
        last = first + columns
        if box.local.numel() and (first % width or (last % width and last != row)):
            raise PlanError(
                f"optimizer.block = {self.size}: a rank holds columns {first} to {last - 1} of {row} of {name}, so a block would "
                f"be split over ranks; use a block size that divides {columns}, or another layout"
            )


def _filled(values: Tensor, width: int) -> Tensor:
    """Pads each row with zeros to a multiple of `width`."""
    short = -values.shape[-1] % width
    return pad(values, (0, short)) if short else values.contiguous()


def _laid_out(local: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Wraps a rank's part as a tensor of global shape `shape`, sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


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
    """Returns the optimizer for `model.trainable()`.

    Args:
        model: its parameters are updated; they must be fp32 or fp64.
        lr: peak learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decay of the parameters in decayed groups.
        block: elements of a row that share a scale.
        smallest: parameters with fewer elements in total, and vectors, keep exact moments, the same in all layouts.

    Raises:
        ForgeError: torchao is not installed.
        PlanError: parameters have another dtype, or the layout splits a block.
    """
    named = list(model.trainable())
    if low := {tensor.dtype for _, tensor, _ in named} - {torch.float32, torch.float64}:
        raise PlanError(f"adamw8bit needs parameters in fp32 or fp64, not {', '.join(map(str, low))}; use adamw")
    coded = [name for name, tensor, _ in named if tensor.dim() > 1 and tensor.numel() >= smallest]
    exact = [name for name, _, _ in named if name not in set(coded)]
    arithmetic = adamw_rule(betas, eps)
    in_blocks = _InBlocks(Blocks(block))
    quantized = ElementwiseOptimizer(
        ParameterSubset(model, coded), arithmetic._replace(states=MOMENTS + SCALES), lr, weight_decay, in_blocks
    )
    return GroupedOptimizer(
        [(1.0, quantized), (1.0, ElementwiseOptimizer(ParameterSubset(model, exact), arithmetic, lr, weight_decay))]
    )


class _InBlocks:
    """Stores moments as codes and scales; implements `elementwise.Kept`."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def zeros(self, state: str, name: str, tensor: Tensor) -> Tensor:
        return self._blocks.codes(name, tensor) if state in MOMENTS else self._blocks.scales(tensor)

    def kernel(self, rule: UpdateRule, device: torch.device) -> Callable[..., None]:
        blocks = self._blocks
        kinds = (blocks.numbers("signed", device), blocks.numbers("positive", device))

        def update(
            values: Sequence[Tensor],
            grad: Tensor,
            numbers: Sequence[Tensor],
            place: Tensor,  # noqa: ARG001 (only used for rounding noise)
            keys: Tensor,  # noqa: ARG001
            step: Tensor,  # noqa: ARG001
            taken: Tensor,
        ) -> None:
            weight, *states = values
            codes, scales = states[:2], states[2:]
            width = blocks.width(weight.shape[-1])
            moments = [blocks.decoded(*state, width) for state in zip(codes, scales, kinds, strict=True)]
            updated, *moments = rule.update(weight, moments, grad.to(weight.dtype), numbers)
            coded = [blocks.coded(moment, kind, width) for moment, kind in zip(moments, kinds, strict=True)]
            new = [updated, *(code for code, _ in coded), *(scale for _, scale in coded)]
            for value, new_value in zip(values, new, strict=True):
                value.copy_(torch.where(taken, new_value, value))

        return update
