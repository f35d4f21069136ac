"""An image to its tiles, each of the encoder's size."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forge_vlm.images.pixels import fit, pixels, resize
from forge_vlm.images.processing import Processing
from forge_vlm.images.tiling import Tiles, Tiling


class Cut(NamedTuple):
    """Tiles of one image, and how they lie: the grid row by row, the whole image before or behind it."""

    images: list[Image.Image]
    tiles: Tiles


def cut(image: Image.Image, tiling: Tiling, processing: Processing) -> Cut:
    """The tiles of an image that was decoded."""
    size, resample = processing.size, processing.resample
    tiles = tiling.tiles(*image.size, size)
    if not tiles.steps:
        return Cut([fit(image, processing)], tiles)
    resized = image
    for width, height in tiles.steps:
        resized = resize(resized, width, height, resample)
    grid: list[Image.Image] = []
    if tiles.rows:
        across, down = tiles.columns * size, tiles.rows * size
        whole = resized
        if resized.size != (across, down):
            whole = Image.new(image.mode, (across, down))
            whole.paste(resized, tiles.place)
        corners = ((column * size, row * size) for row in range(tiles.rows) for column in range(tiles.columns))
        grid = [whole.crop((left, top, left + size, top + size)) for left, top in corners]
    if tiles.whole == "first":
        return Cut([resize(image, size, size, resample), *grid], tiles)
    if tiles.whole == "last":  # of the image on the grid, as Idefics3 does
        return Cut([*grid, resize(resized, size, size, resample)], tiles)
    return Cut(grid, tiles)


def tile_pixels(image: Image.Image, tiling: Tiling, processing: Processing) -> tuple[NDArray[np.float32], Tiles]:
    """(tiles, channels, size, size) fp32 of an image that was decoded, and how the tiles lie."""
    found = cut(image, tiling, processing)
    return np.stack([pixels(each, processing) for each in found.images]), found.tiles
