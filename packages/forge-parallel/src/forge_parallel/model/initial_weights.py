"""Initial weights as a function of (seed, global name): the same in every layout on one type of device.

`forge_core.draws` defines the random stream of every element. A rank draws only the blocks that overlap its shard; the full
tensor never exists. (torch's CPU generator keeps only 32 bits of a seed, too few for the blocks of a large model.)
"""

from collections.abc import Callable
from math import prod

import numpy as np
import torch

from forge_core.draws import BLOCK, device_seed, key_of, philox, row_name
from forge_core.specs import Init, TensorSpec
from forge_parallel import accelerator
from forge_parallel.placement.boxes import Box

SLAB = 1 << 20
"""Number of elements drawn at a time; limits the temporary memory to a few megabytes."""

Draw = Callable[[int, int], torch.Tensor]
"""(first, last) flat index -> fp32 samples of a standard normal for [first, last)."""


def fill(box: Box, spec: TensorSpec, name: str, seed: int, device: torch.device | None = None) -> None:
    """Fills `box.local` according to `spec.init`, in fp32, rounded to the tensor's dtype.

    `device` is the device whose random stream is used, if it differs from that of `box.local`.
    """
    if spec.stacked:
        for row in range(box.local.shape[0]):
            part = Box(box.shape[1:], box.offset[1:], box.local[row])
            _fill(part, spec.init, row_name(name, box.offset[0] + row), seed, device)
    else:
        _fill(box, spec.init, name, seed, device)


def _fill(box: Box, init: Init, name: str, seed: int, device: torch.device | None) -> None:
    if init.kind == "normal":
        _scatter(box.local, box.shape, box.offset, 0, init.std, _stream(seed, name, device or box.local.device))
    else:
        box.local.fill_(1.0 if init.kind == "ones" else 0.0)


def _scatter(local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], base: int, std: float, draw: Draw) -> None:
    """Fills `local`, the box at `offset` in a tensor of `shape` whose first element has flat index `base`."""
    if local.numel() == 0:
        return
    if local.dim() == 0:
        local.copy_(draw(base, base + 1)[0] * std)
        return
    width = prod(shape[1:])
    if width > SLAB:
        for row in range(local.shape[0]):
            _scatter(local[row], shape[1:], offset[1:], base + (offset[0] + row) * width, std, draw)
        return
    inner = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    step = max(1, SLAB // width)
    for row in range(0, local.shape[0], step):
        rows = min(step, local.shape[0] - row)
        first = base + (offset[0] + row) * width
        drawn = draw(first, first + rows * width).view(rows, *shape[1:])
        local[row : row + rows].copy_(drawn[:, *inner] * std)


def _stream(seed: int, name: str, device: torch.device) -> Draw:
    key = key_of(seed, name)

    def cpu(block: int) -> torch.Tensor:
        generator = np.random.Generator(np.random.Philox(**philox(key, block)))  # type: ignore[arg-type]
        return torch.from_numpy(generator.standard_normal(BLOCK, dtype=np.float32))

    def cuda(block: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(device_seed(key, block))
        return torch.empty(BLOCK, device=device, dtype=torch.float32).normal_(generator=generator)

    draw_block = cuda if accelerator.draws(device) else cpu

    def draw(first: int, last: int) -> torch.Tensor:
        start = first // BLOCK
        blocks = [draw_block(block) for block in range(start, (last - 1) // BLOCK + 1)]
        return torch.cat(blocks)[first - start * BLOCK : last - start * BLOCK]

    return draw
