"""Image files to pixels of 8 bits, upright, with the channels that are asked for. What cannot be read is one kind of error.

Every mode of PIL is converted or refused, none by accident:

- The orientation in EXIF is applied.
- What is transparent lies on white: an alpha channel, or the transparent color of a palette.
- Palettes, CMYK, YCbCr and HSV become RGB. One channel is made of three by the luma of ITU-R 601.
- Brightness of 16 bits is rounded to 8. Colors of 16 bits are read by PIL as their upper 8.
- Brightness of 32 bits or as floats has no known range, and LAB no known white: both are refused.
- Of an animation, or a file of several pages, the first picture is taken.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from forge_core.errors import DataError

MODES = {1: "L", 3: "RGB"}
"""Channels -> PIL's mode."""
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N")
_CONVERTED = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")


class ImageError(DataError):
    """An image that cannot be decoded; `path` says which."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[Any, ...]:  # it travels from a worker of a loader to the trainer
        return ImageError, (self.path, self.why)


def decode(source: Path | bytes, channels: int = 3, path: str = "") -> Image.Image:
    """The image in a file, or in the bytes of one, with 1 or 3 channels.

    Args:
        source: the file, or what it holds.
        channels: 1 for brightness, 3 for red, green and blue.
        path: what messages call it; the file's name when empty.

    Raises:
        ImageError: it cannot be read, is damaged or cut short, too large, or of a mode that is refused.
    """
    name = path or (str(source) if isinstance(source, Path) else "an image in memory")
    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()  # open reads the head only
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            upright = ImageOps.exif_transpose(image) if turned else image
    except UnidentifiedImageError as cause:  # its own message names the object in memory
        raise ImageError(name, "the image cannot be decoded: Pillow knows no such format, or the file is damaged") from cause
    except Exception as cause:  # decoders raise OSError, SyntaxError, struct.error and others for damage
        raise ImageError(name, f"the image cannot be decoded: {cause}") from cause
    return convert(upright, channels, name)


def convert(image: Image.Image, channels: int = 3, path: str = "an image") -> Image.Image:
    """An image of any mode with 1 or 3 channels of 8 bits. The orientation in EXIF is not looked at.

    Raises:
        ImageError: the mode, or the number of channels, is refused.
    """
    if channels not in MODES:
        raise ImageError(path, f"{channels} channels are not implemented; 1 and 3 are")
    if image.mode in _WIDE:
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode not in _CONVERTED:
        raise ImageError(path, f"mode {image.mode} is refused, because its range is not known; save it with 8 or 16 bits")
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    if channels == 1 and image.mode not in ("1", "L"):
        image = image.convert("RGB")
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])
