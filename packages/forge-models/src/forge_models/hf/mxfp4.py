"""Matrices of experts in MXFP4 (Rouhani et al., 2023), as gpt-oss is published, read as bf16.

32 neighboring inputs of an output have one scale, a power of two with exponent byte - 127, and 16 bytes of two numbers each, the
first in the low four bits: a sign, two bits of exponent and one of fraction. A checkpoint has them as `NAME_blocks` (experts,
outputs, inputs / 32, 16) and `NAME_scales` (experts, outputs, inputs / 32), in uint8, instead of NAME (experts, inputs, outputs).
"""

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING, Any

from forge_models.hf.config import Keys, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

QUANTIZATION, METHOD = "quantization_config", "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Number of neighboring inputs that share a scale."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each four bits."""
BIAS, NOT_A_NUMBER = 127, 255
"""What the byte of a scale has more than its exponent, and the byte that stands for NaN."""


def read_quantization(keys: Keys) -> None:
    """Reads the table of the quantization, which may say MXFP4 and which modules are not quantized."""
    table = keys.values.get(QUANTIZATION)
    if not isinstance(table, dict) or table.get("quant_method") != METHOD:
        return  # refused as in every family, unless it is null
    keys.given(QUANTIZATION)
    for name in sorted(set(table) - {"quant_method", "modules_to_not_convert", "dequantize"}):
        keys.fault(f"{QUANTIZATION}.{name}", "is not implemented")


class PackedMatrices:
    """One tensor in MXFP4, with the interface of a slice of safetensors: bf16, (experts, inputs, outputs)."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        """`blocks` and `scales` are slices of safetensors.

        Raises:
            Unsupported: their shapes or dtypes do not fit.
        """
        self._blocks, self._scales = blocks, scales
        shape, of_scales = tuple(blocks.get_shape()), tuple(scales.get_shape())
        if len(shape) != 4 or shape[-1] * 2 != GROUP or shape[:-1] != of_scales:
            raise Unsupported(
                f"tensors in MXFP4: blocks have shape {shape}, and scales {of_scales}; blocks need {GROUP // 2} bytes"
            )
        if {str(part.get_dtype()) for part in (blocks, scales)} != {"U8"}:
            raise Unsupported(f"tensors in MXFP4 are uint8, but these are {blocks.get_dtype()} and {scales.get_dtype()}")
        self._shape = [shape[0], shape[2] * GROUP, shape[1]]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, box: tuple[slice, ...]) -> "Tensor":
        """Returns a box; only the blocks that overlap it are read."""
        expert, (first, last, _), output = box[0], box[1].indices(self._shape[1]), box[2]
        begin, end = first // GROUP, max(-(-last // GROUP), first // GROUP)
        found = unpacked(self._blocks[expert, output, begin:end], self._scales[expert, output, begin:end])
        return found[..., first - begin * GROUP : max(last, first) - begin * GROUP].transpose(-1, -2)


def unpacked(blocks: "Tensor", scales: "Tensor") -> "Tensor":
    """(..., n, 16) and (..., n) uint8 -> (..., 32 n) bf16."""
    import torch

    table = torch.tensor(NUMBERS)
    numbers = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1).flatten(-2)
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS).masked_fill(scales == NOT_A_NUMBER, nan)
    return (numbers * factors.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)


def packed_matrices(names: Mapping[str, str], part: Any) -> dict[str, PackedMatrices]:
    """Returns the tensors in MXFP4 by the name that they have in bf16; `part(name)` returns a slice of safetensors."""
    pairs = [name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in names]
    return {name: PackedMatrices(part(name + BLOCKS), part(name + SCALES)) for name in pairs}
