"""Images in their own proportions: as many whole patches as fit under a limit (NaFlex, Tschannen et al., 2025).

In a batch such an image is one array: a row for each patch, padded, and a last row that begins with the image's rows and columns
of patches.
"""

from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forge_vlm.images.native_shape import Native
from forge_vlm.images.pixels import pixels, resize
from forge_vlm.images.processing import Processing

if TYPE_CHECKING:
    from torch import Tensor

LEAST, MOST, STEP = 1e-6, 100.0, 1e-5
"""Scales between which the largest one is looked for, and how exactly: those of SigLIP 2."""


def native_item(image: Image.Image, processing: Processing, native: Native) -> NDArray[np.float32]:
    """(most + 1, channels * patch * patch) fp32 of an image that was decoded.

    Raises:
        ValueError: it is too long for so many patches.
    """
    found, grid = native_patches(image, processing, native.patch, native.most)
    last = np.zeros((1, found.shape[1]), np.float32)
    last[0, :2] = grid
    return np.concatenate((found, last))


def taken_apart(items: "Tensor") -> "tuple[Tensor, Tensor]":
    """Items (N, most + 1, numbers) -> patches (N, most, numbers) and grids (N, 2) int64."""
    return items[:, :-1], items[:, -1, :2].long()


def native_grid(width: int, height: int, patch: int, most: int) -> tuple[int, int]:
    """(rows, columns) of patches: the image at the largest scale whose patches, rounded up, are not more than `most`."""

    def counts(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, ceil(side * scale / patch)) for side in (height, width))
        return rows, columns

    low, high = LEAST, MOST
    while high - low >= STEP:
        scale = (low + high) / 2
        rows, columns = counts(scale)
        low, high = (scale, high) if rows * columns <= most else (low, scale)
    return counts(low)


def native_patches(
    image: Image.Image, processing: Processing, patch: int, most: int
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """(most, channels * patch * patch) fp32, patches row by row and then zeros, and their (rows, columns)."""
    rows, columns = native_grid(*image.size, patch, most)
    if rows * columns > most:
        raise ValueError(
            f"an image of {image.width} x {image.height} is too long for {most} patches; raise patches of the encoder"
        )
    found = pixels(resize(image, columns * patch, rows * patch, processing.resample), processing)
    cut = found.reshape(len(found), rows, patch, columns, patch).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    return np.concatenate((cut, np.zeros((most - len(cut), cut.shape[1]), np.float32))), (rows, columns)
