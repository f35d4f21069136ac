"""Stochastic rounding to bf16: up or down with the probability that keeps the expected value.

A step of 1e-5 on a weight of 1 is far below half a unit in the last place of bf16 and would always be rounded away; rounded
stochastically it is taken once in a few hundred steps (Gupta et al., 2015). The noise of an element is a hash of
(key, step, flat index in the global tensor), so every layout draws the same noise and nothing needs to be stored.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod

import torch

from forge_parallel.placement.boxes import Box

CHUNK = 1 << 22
"""Elements that are worked on at a time where operators run one by one: the extra memory is some tens of MiB for any tensor."""


def key_of(name: str, state: str) -> int:
    """A 31-bit key for one tensor's noise."""
    return int.from_bytes(blake2b(f"{state}/{name}".encode(), digest_size=4).digest(), "little") >> 1


def noise(index: torch.Tensor, key: int | torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Uniform 16-bit integers, int32, one for each flat `index` (int64). `step`, and `key` unless it is a number, are int64
    scalars on the device.

    Three rounds of the murmur3 finalizer (Appleby, 2011) over 32-bit words held in int64.
    """
    word = index & 0xFFFFFFFF
    for salt in (index >> 32, key, step):
        word = (word + salt * 0x9E3779B1) & 0xFFFFFFFF
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        word = word ^ (word >> 16)
    return (word & 0xFFFF).to(torch.int32)


def rounded(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 `value` rounded to bf16 by 16 random `bits`: they are added below the last kept bit, then cut off.

    Infinities and NaN stay what they are.
    """
    cut = (value.view(torch.int32) + bits) & -65536
    return torch.where(torch.isfinite(value), cut.view(torch.float32), value).to(torch.bfloat16)


def regions(box: Box, elements: int | None) -> Iterator[tuple[tuple[slice, ...], list[int]]]:
    """Parts of a box of at most about `elements`, or all of it: each with its place, which is the flat global index of its first
    element, and of each dimension how far apart neighbors are in the global tensor."""
    shape = tuple(box.local.shape)
    if box.local.numel() == 0:
        return
    strides = [prod(box.shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(box.offset, strides, strict=True))
    if not shape:
        yield (), [0]
        return
    rows = shape[0] if elements is None else max(1, elements // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])),), [first + start * strides[0], *strides]


def flat_index(shape: Sequence[int], place: torch.Tensor) -> torch.Tensor:
    """Global indices of the elements of a part of this shape, int64; `place` as of `regions`, on the device."""
    index = place[0]
    for dim, size in enumerate(shape):
        places = torch.arange(size, device=place.device) * place[1 + dim]
        index = index + places.view(-1, *[1] * (len(shape) - dim - 1))
    return index
