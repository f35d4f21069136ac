"""Converts image files to the input arrays of an encoder: decoding, resizing, tiles, and patches in native proportions.

Pixels equal those of the PIL processors of transformers. A file that cannot be read raises `ImageError`. `decode` returns upright
images of 8 bits with 1 or 3 channels; every mode of PIL is either converted or an error:

- The orientation in EXIF is applied.
- Transparent pixels become white, whether by an alpha channel or by the transparent color of a palette.
- Palettes, CMYK, YCbCr and HSV become RGB. RGB becomes one channel by the luma of ITU-R 601.
- Brightness of 16 bits is rounded to 8. PIL reads colors of 16 bits as their upper 8.
- Brightness of 32 bits or in floats has no known range, and LAB no known white: both are errors.
- The first picture of an animation, or of a file with several pages, is used.

In native proportions (NaFlex, Tschannen et al., 2025) an image has as many whole patches as fit under a limit. In a batch it is
one array: a row for each patch, padding, and a last row that begins with the image's rows and columns of patches.
"""

from functools import lru_cache
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from forge_core.errors import DataError
from forge_vlm.images.processing import Native, Processing, Resample
from forge_vlm.images.tiling import Tiles, Tiling

if TYPE_CHECKING:
    from torch import Tensor


MODES = {1: "L", 3: "RGB"}
"""Channels -> PIL's mode."""
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_CONVERTED_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
MIN_SCALE, MAX_SCALE, SCALE_STEP = 1e-6, 100.0, 1e-5
"""Bounds and precision of the search for the largest scale of an image in native proportions, as in SigLIP 2."""


class ImageError(DataError):
    """Error for an image that cannot be decoded. `path` is the name of the image, `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[Any, ...]:  # workers of a loader pickle it for the trainer
        return ImageError, (self.path, self.why)


def decode(source: Path | bytes, channels: int = 3, path: str = "") -> Image.Image:
    """Decodes an image file, or its bytes, to 1 or 3 channels.

    Args:
        source: path of the file, or its content.
        channels: 1 for brightness, 3 for red, green and blue.
        path: name of the image in messages; by default the name of the file.

    Raises:
        ImageError: the image is missing, damaged, truncated, too large, or has an unsupported mode.
    """
    name = path or (str(source) if isinstance(source, Path) else "an image in memory")
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()  # open reads only the header
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            upright = ImageOps.exif_transpose(image) if turned else image
    except UnidentifiedImageError as cause:  # its message contains only the address of the object in memory
        raise ImageError(name, "the image cannot be decoded: Pillow knows no such format, or the file is damaged") from cause
    except Exception as cause:  # decoders raise OSError, SyntaxError, struct.error and others for damaged files
        raise ImageError(name, f"the image cannot be decoded: {cause}") from cause
    return convert(upright, channels, name)


def convert(image: Image.Image, channels: int = 3, path: str = "an image") -> Image.Image:
    """Converts an image of any mode to 1 or 3 channels of 8 bits. The orientation in EXIF is ignored.

    Raises:
        ImageError: the mode or the number of channels is not supported.
    """
    if channels not in MODES:
        raise ImageError(path, f"{channels} channels are not implemented; 1 and 3 are")
    if image.mode in _SIXTEEN_BIT_MODES:
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode not in _CONVERTED_MODES:
        raise ImageError(path, f"mode {image.mode} is refused, because its range is not known; save it with 8 or 16 bits")
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    if channels == 1 and image.mode not in ("1", "L"):
        image = image.convert("RGB")
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def resize(image: Image.Image, width: int, height: int, resample: Resample) -> Image.Image:
    """Returns the image stretched to this size."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling[resample.upper()])


def fit_square(image: Image.Image, processing: Processing) -> Image.Image:
    """Returns the image as one square of the encoder's size: stretched, or cropped to the center."""
    size, shortest = processing.size, processing.shortest
    if shortest is None:
        return resize(image, size, size, processing.resample)
    width, height = image.size
    short = min(width, height)
    image = resize(image, int(shortest * width / short), int(shortest * height / short), processing.resample)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def pixels(image: Image.Image, processing: Processing) -> NDArray[np.float32]:
    """Returns (channels, height, width) fp32: pixels between 0 and 255, times `scale`, minus `mean`, divided by `std`.

    Raises:
        ValueError: the numbers of channels of the image and of `mean` and `std` differ.
    """
    table = _level_table(processing)
    levels = np.asarray(image)
    levels = levels[..., None] if levels.ndim == 2 else levels
    if levels.shape[-1] != len(table) or levels.dtype != np.uint8:
        raise ValueError(
            f"an image of mode {image.mode} does not have {len(table)} channels of 8 bits; decode or convert it first"
        )
    out = np.empty((len(table), *levels.shape[:2]), np.float32)
    for channel, values in enumerate(table):
        np.take(values, levels[..., channel], out=out[channel], mode="clip")
    return out


@lru_cache(maxsize=32)
def _level_table(processing: Processing) -> NDArray[np.float32]:
    """Returns (channels, 256): the normalized value of each of the 256 levels, computed in transformers' order."""
    scaled = (np.arange(256, dtype=np.float64) * processing.scale).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None] for each in (processing.mean, processing.std))
    return (scaled - mean) / std


class TiledImage(NamedTuple):
    """Tiles of one image and their arrangement: the grid row by row, with the whole image before or after it."""

    images: list[Image.Image]
    tiles: Tiles


def cut_tiles(image: Image.Image, tiling: Tiling, processing: Processing) -> TiledImage:
    """Cuts a decoded image into tiles."""
    size, resample = processing.size, processing.resample
    tiles = tiling.tiles(*image.size, size)
    if not tiles.steps:
        return TiledImage([fit_square(image, processing)], tiles)
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
        return TiledImage([resize(image, size, size, resample), *grid], tiles)
    if tiles.whole == "last":  # resized from the image on the grid, as in Idefics3
        return TiledImage([*grid, resize(resized, size, size, resample)], tiles)
    return TiledImage(grid, tiles)


def tile_pixels(image: Image.Image, tiling: Tiling, processing: Processing) -> tuple[NDArray[np.float32], Tiles]:
    """Returns (tiles, channels, size, size) fp32 pixels of a decoded image, and the arrangement of the tiles."""
    tiled = cut_tiles(image, tiling, processing)
    return np.stack([pixels(each, processing) for each in tiled.images]), tiled.tiles


def native_item(image: Image.Image, processing: Processing, native: Native) -> NDArray[np.float32]:
    """Returns (most + 1, channels * patch * patch) fp32 of a decoded image: patches, padding, and a row that begins with the
    grid.

    Raises:
        ValueError: the image is too long for this number of patches.
    """
    patches, grid = native_patches(image, processing, native.patch, native.most)
    last = np.zeros((1, patches.shape[1]), np.float32)
    last[0, :2] = grid
    return np.concatenate((patches, last))


def split_native(items: "Tensor") -> "tuple[Tensor, Tensor]":
    """Splits items (N, most + 1, numbers) into patches (N, most, numbers) and grids (N, 2) int64."""
    return items[:, :-1], items[:, -1, :2].long()


def native_grid(width: int, height: int, patch: int, most: int) -> tuple[int, int]:
    """Returns (rows, columns) of patches, rounded up, at the largest scale for which the image has at most `most` patches."""

    def counts(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, ceil(side * scale / patch)) for side in (height, width))
        return rows, columns

    low, high = MIN_SCALE, MAX_SCALE
    while high - low >= SCALE_STEP:
        scale = (low + high) / 2
        rows, columns = counts(scale)
        low, high = (scale, high) if rows * columns <= most else (low, scale)
    return counts(low)


def native_patches(
    image: Image.Image, processing: Processing, patch: int, most: int
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """Returns (most, channels * patch * patch) fp32, patches row by row and then zeros, and the (rows, columns) of the image."""
    rows, columns = native_grid(*image.size, patch, most)
    if rows * columns > most:
        raise ValueError(
            f"an image of {image.width} x {image.height} is too long for {most} patches; raise patches of the encoder"
        )
    values = pixels(resize(image, columns * patch, rows * patch, processing.resample), processing)
    cut = values.reshape(len(values), rows, patch, columns, patch).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    return np.concatenate((cut, np.zeros((most - len(cut), cut.shape[1]), np.float32))), (rows, columns)
