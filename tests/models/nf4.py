"""A reference of the formats of a quantized base: one row or block after the other, from the formulas of the papers."""

from statistics import NormalDist

import torch
from torch import Tensor


def levels() -> list[float]:
    """The 16 levels of NF4 (QLoRA, section 3): seven quantiles of a normal distribution below zero, zero, and eight above,
    divided by the largest."""
    # The offset of the paper: the mean of 1 - 1/(2 * 15) and 1 - 1/(2 * 16).
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = [NormalDist().inv_cdf(offset + (0.5 - offset) * step / 8) for step in range(8)]
    below = [-NormalDist().inv_cdf(offset + (0.5 - offset) * step / 7) for step in range(7)]
    found = sorted([*below, 0.0, *above])
    return [value / found[-1] for value in found]


def rounded(matrix: Tensor, kind: str) -> Tensor:
    """The values that codes of a matrix (outputs, inputs) stand for, in fp32."""
    if kind == "int8":
        return torch.stack([_int8_row(row) for row in matrix.float()])
    blocks = matrix.float().reshape(-1, 64)
    return torch.stack([_nf4_block(block) for block in blocks]).reshape(matrix.shape)


def _int8_row(row: Tensor) -> Tensor:
    scale = row.abs().max() / 127
    return (row * (1 / scale)).round() * scale


def _nf4_block(block: Tensor) -> Tensor:
    known = torch.tensor(PUBLISHED)
    scale = block.abs().max()
    nearest = (block.double()[:, None] / scale.double() - known.double()).abs().argmin(1)
    return known[nearest] * scale


PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels as the paper prints them."""
