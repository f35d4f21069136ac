"""PIL images to what an encoder takes: resizing of 8 bits, then floats by a table. Equal to transformers' processors on PIL."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forge_vlm.images.processing import Processing, Resample


def resize(image: Image.Image, width: int, height: int, resample: Resample) -> Image.Image:
    """The image with this size, each side stretched as it has to be."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling[resample.upper()])


def fit(image: Image.Image, processing: Processing) -> Image.Image:
    """The image as one square of the encoder's size: stretched, or the middle of it."""
    size, shortest = processing.size, processing.shortest
    if shortest is None:
        return resize(image, size, size, processing.resample)
    width, height = image.size
    short = min(width, height)
    image = resize(image, int(shortest * width / short), int(shortest * height / short), processing.resample)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def pixels(image: Image.Image, processing: Processing) -> NDArray[np.float32]:
    """(channels, height, width) fp32: pixels between 0 and 255, times `scale`, minus `mean`, over `std`.

    Raises:
        ValueError: the image has not as many channels as there are statistics.
    """
    table = _table(processing)
    levels = np.asarray(image)
    levels = levels[..., None] if levels.ndim == 2 else levels
    if levels.shape[-1] != len(table) or levels.dtype != np.uint8:
        raise ValueError(f"an image of mode {image.mode} has not {len(table)} channels of 8 bits; decode or convert it first")
    out = np.empty((len(table), *levels.shape[:2]), np.float32)
    for channel, values in enumerate(table):
        np.take(values, levels[..., channel], out=out[channel], mode="clip")
    return out


@lru_cache(maxsize=32)
def _table(processing: Processing) -> NDArray[np.float32]:
    """(channels, 256): what becomes of each of the 256 values, in the order of operations of the processors."""
    scaled = (np.arange(256, dtype=np.float64) * processing.scale).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None] for each in (processing.mean, processing.std))
    return (scaled - mean) / std
