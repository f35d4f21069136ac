"""AdamW with moments of eight bits, quantized block by block (Dettmers et al., 2021, "8-bit Optimizers via Block-wise
Quantization"), in torchao's arithmetic.

A row, the last dimension of a tensor, is cut into blocks. A number is stored as a code, one of 256 numbers from -1 to 1, times
the largest magnitude of its block. Codes are laid out like the parameter, so a rank that holds whole rows, or whole blocks of
them, has the codes of one process. Codes and scales are saved; values could not restore them, because signed codes end at 1
and at -0.993, and a block whose largest magnitude is negative gets another scale.
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
    """How rows are cut into blocks of at most `size` elements, and the numbers of a block become codes.

    Raises:
        ForgeError: torchao is not installed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._torchao: Any = torchao_library.require("torchao.optim.quant_utils", KEY, EXTRA)

    def numbers(self, sign: Literal["signed", "positive"], device: torch.device) -> Tensor:
        """What codes stand for, ascending: (256,) fp32."""
        with unset_fake_temporarily():  # torchao reads tensors on the way, which a dry run's do not answer
            numbers = self._torchao.create_dynamic_map(signed=sign == "signed")
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    def width(self, row: int) -> int:
        """Elements of a block in a row of this length, or in the part of one that a rank holds; the last block may have fewer."""
        return min(self.size, row)

    def codes(self, name: str, tensor: Tensor) -> Tensor:
        """Of zeros, uint8, laid out as `tensor`, whose global name is `name`.

        Raises:
            PlanError: this rank holds a part of a block.
        """
        box = local_box(tensor)
        self._check(name, box)
        return _laid_out(torch.zeros(box.local.shape, dtype=torch.uint8, device=box.local.device), tensor, box.shape)

    def scales(self, tensor: Tensor) -> Tensor:
        """Of zeros, in the format of `tensor` and laid out as it is: (rows, blocks), where rows stand for all dimensions but the
        last."""
        box = local_box(tensor)
        width = self.width(box.shape[-1])
        here, whole = (-(-shape[-1] // width) for shape in (box.local.shape, box.shape))
        local = torch.zeros((*box.local.shape[:-1], here), dtype=box.local.dtype, device=box.local.device)
        return _laid_out(local, tensor, (*box.shape[:-1], whole))

    def decoded(self, codes: Tensor, scales: Tensor, numbers: Tensor, width: int) -> Tensor:
        """The values of codes (..., columns) with scales (..., blocks) of `width` columns each."""
        columns = codes.shape[-1]
        values = self._torchao.dequant_with_qmap(_filled(codes, width), numbers, scales.reshape(-1))
        return values[..., :columns]

    def coded(self, values: Tensor, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Codes (..., columns) and scales (..., blocks) of values: each gets the number next to it."""
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
                f"optimizer.block = {self.size}: a rank holds columns {first} to {last - 1} of {row} of {name}, which cuts a "
                f"block; use a block that divides {columns}, or another layout"
            )


def _filled(values: Tensor, width: int) -> Tensor:
    """With zeros behind each row, so that its last block has the width of the others."""
    short = -values.shape[-1] % width
    return pad(values, (0, short)) if short else values.contiguous()


def _laid_out(local: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a rank holds as part of a tensor of this shape, cut over ranks as `tensor` is."""
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
