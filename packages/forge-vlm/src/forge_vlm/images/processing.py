"""Image processing that an encoder expects: resizing to squares, or native proportions, and normalization.

Plain data: importing this module needs no numpy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from forge_core.errors import ForgeError

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
FILE = "preprocessor_config.json"

RESAMPLES: tuple[Resample, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Resampling filters in the order of PIL's numbers, which `preprocessor_config.json` contains."""
_READ_KEYS = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"),
    *("image_mean", "image_std", "patch_size", "max_num_patches"),
)
_IGNORED_KEYS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        "processor_class": None,
        "image_processor_type": None,
        "feature_extractor_type": None,
        "_valid_processor_keys": None,
        "do_convert_rgb": None,
        "default_to_square": None,
        "do_pad": (False, None),
        "do_thumbnail": (False, None),
        "do_reduce_labels": (False, None),
        "data_format": ("channels_first", None),
    }
)
"""Keys without effect, with the values for which that is true; None: all values. Images always become RGB."""


@dataclass(frozen=True, kw_only=True)
class Processing:
    """Conversion of an image of any size to the pixels of an encoder.

    Attributes:
        size: height and width of the encoder's input.
        mean: mean of each channel, for pixels between 0 and 1.
        std: standard deviation of each channel.
        resample: filter for resizing.
        shortest: length to which the shorter edge is resized before the center is cropped; None: the whole image is stretched to
            a square.
        scale: factor for pixels between 0 and 255.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: Resample = "bicubic"
    shortest: int | None = None
    scale: float = 1 / 255

    def __post_init__(self) -> None:
        if self.shortest is not None and self.shortest < self.size:
            raise ValueError(f"size {self.size} cannot be cropped from an image whose shorter edge is {self.shortest}")

    def at(self, size: int) -> "Processing":
        """Returns the same processing for images of another size."""
        shortest = None if self.shortest is None else max(size, round(self.shortest * size / self.size))
        return replace(self, size=size, shortest=shortest)


def read_processing(folder: Path, size: int, channels: int) -> Processing:
    """Reads the processing from `preprocessor_config.json` of a folder; `size` is used if the file has none.

    Raises:
        ForgeError: the file is missing, or describes a processing that Forge does not implement.
    """
    path = folder / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ForgeError(
            f"{path} cannot be read: {cause.strerror}; without it mean and std of the encoder are not known"
        ) from cause
    except ValueError as cause:
        raise ForgeError(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise ForgeError(f"{path} is not a JSON object")
    for key, value in values.items():
        allowed = _IGNORED_KEYS.get(key, ())
        if key not in _READ_KEYS and value is not None and allowed is not None and value not in allowed:
            raise ForgeError(f"{path}: {key} {value!r} is not implemented; remove the key if it changes no pixel")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(key, True) is not True:
            raise ForgeError(f"{path}: {key} {values[key]!r} is not implemented; only true is")
    shortest, size = _sizes(values, size, str(path))
    number = values.get("resample")
    if type(number) is not int or not 0 <= number < len(RESAMPLES):
        raise ForgeError(f"{path}: resample {number!r} is not a filter of PIL; give a number from 0 to {len(RESAMPLES) - 1}")
    scale = values.get("rescale_factor", 1 / 255)
    if not _is_positive(scale):
        raise ForgeError(f"{path}: rescale_factor {scale!r} is not a positive number")
    return Processing(
        size=size,
        mean=_numbers(values, "image_mean", channels, str(path)),
        std=_numbers(values, "image_std", channels, str(path), positive=True),
        resample=RESAMPLES[number],
        shortest=shortest,
        scale=float(scale),
    )


def _sizes(values: Mapping[str, Any], default: int, where: str) -> tuple[int | None, int]:
    """Returns (length of the shorter edge or None, size)."""
    size = values.get("size")
    crop = _square(values["crop_size"], where, "crop_size") if values.get("do_center_crop") and values.get("crop_size") else None
    if size is None:
        return None, default if crop is None else crop
    edge = size if crop is not None and type(size) is int else size.get("shortest_edge") if isinstance(size, dict) else None
    if edge is None:
        side = _square(size, where, "size")
        if crop not in (None, side):
            raise ForgeError(f"{where}: crop_size {crop} of a square of {side} is not implemented; only the same size is")
        return None, side
    if type(edge) is not int or edge <= 0 or crop is None or crop > edge:
        raise ForgeError(f"{where}: size {size!r} with crop_size {crop!r} is not implemented; a crop of at most that size is")
    return edge, crop


def _square(value: Any, where: str, key: str) -> int:
    sides = {value} if type(value) is int else {value.get("height"), value.get("width")} if isinstance(value, dict) else {None}
    side = sides.pop()
    if sides or type(side) is not int or side <= 0:
        raise ForgeError(f"{where}: {key} {value!r} is not implemented; only squares are")
    return side


def _numbers(values: Mapping[str, Any], key: str, channels: int, where: str, positive: bool = False) -> tuple[float, ...]:
    numbers = values.get(key)
    if not isinstance(numbers, list) or len(numbers) != channels or not all(map(_is_number, numbers)):
        raise ForgeError(f"{where}: {key} {numbers!r}: expected {channels} numbers, one for each channel")
    if positive and not all(map(_is_positive, numbers)):
        raise ForgeError(f"{where}: {key} {numbers!r}: expected positive numbers")
    return tuple(float(cast(float, each)) for each in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


@dataclass(frozen=True)
class Native:
    """Input format for images of any proportions.

    Attributes:
        patch: height and width of a patch in pixels.
        most: maximum number of patches of an image.
        each: whether the model has one placeholder per patch, instead of the same number for every image.
    """

    patch: int
    most: int
    each: bool
