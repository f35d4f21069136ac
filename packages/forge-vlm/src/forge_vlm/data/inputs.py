"""Turns an image into the input of a model: the number of its placeholders, and its pixels."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forge_core.errors import DataError
from forge_vlm.images.pixels import cut_tiles, native_grid, native_item, tile_pixels
from forge_vlm.images.processing import Native, Processing
from forge_vlm.images.tiling import Tiling

if TYPE_CHECKING:
    from forge_vlm.data.processor_inputs import ProcessorInputs


@runtime_checkable
class SeesImages(Protocol):
    """The component of a model with image inputs.

    Attributes:
        placeholder: id of the token that represents a part of an image; None if images are tokens.
        per_image: number of placeholders of one image.
        vision: the encoder's component.
    """

    @property
    def placeholder(self) -> int | None: ...
    @property
    def per_image(self) -> int: ...
    @property
    def vision(self) -> Any: ...


@dataclass(frozen=True)
class ImageInputs:
    """How the images of a document are prepared.

    Attributes:
        placeholder: id of the token that represents an image.
        per_image: number of placeholders of one tile.
        processing: how an image becomes pixels.
        channels: number of channels of an image.
        tiling: how an image is split into tiles; the model processes each tile as an image.
        native: settings for images with native proportions; None: images become square tiles.
        timed: whether the model receives the time of each frame.
    """

    placeholder: int
    per_image: int
    processing: Processing
    channels: int
    tiling: Tiling
    native: Native | None = None
    timed: bool = False

    def placeholders(self, width: int, height: int) -> list[int]:
        """Returns the number of placeholders of each tile of an image with this width and height.

        Raises:
            ValueError: an image with native proportions is too elongated.
        """
        if self.native is None:
            return [self.per_image] * self.tiling.tiles(width, height, self.processing.size).count
        rows, columns = native_grid(width, height, self.native.patch, self.native.most)
        if rows * columns > self.native.most:
            raise ValueError(f"an image of {width} x {height} pixels is too elongated for {self.native.most} patches")
        return [rows * columns if self.native.each else self.per_image]

    @property
    def fewest(self) -> int:
        """Number of placeholders of the smallest possible image."""
        return 1 if self.native is not None and self.native.each else self.per_image

    @property
    def varies(self) -> bool:
        """Whether the number of placeholders depends on the size of the image."""
        return self.tiling.name != "square" if self.native is None else self.native.each

    def pixels(self, image: Image.Image) -> NDArray[np.float32]:
        """Returns the pixels (tiles, *shape) of a decoded image."""
        if self.native is None:
            return tile_pixels(image, self.tiling, self.processing)[0]
        return native_item(image, self.processing, self.native)[None]

    def pictures(self, image: Image.Image) -> list[Image.Image]:
        """Returns the tiles of an image for viewing."""
        return [image] if self.native is not None else cut_tiles(image, self.tiling, self.processing).images

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels of one tile."""
        if self.native is not None:
            return (self.native.most + 1, self.channels * self.native.patch**2)
        return (self.channels, self.processing.size, self.processing.size)


def inputs_of(
    model: Any, name: str, tiling: Tiling, *, placeholder: int | None, per_image: int | None, size: int | None
) -> ImageInputs:
    """Returns the image inputs of the recipe's model or, without a model with image inputs, those that the source describes.

    Args:
        model: the component of a model with image inputs, of any other model, or None.
        name: name of the source for messages.
        tiling: tiling of the source.
        placeholder, per_image: see `ImageInputs`.
        size: height and width of a tile. Without a model, pixels are between -1 and 1.

    Raises:
        DataError: the values contradict the model, the model has no pixel inputs, or neither model nor source has the values.
    """
    if isinstance(model, SeesImages):
        placeholder = model.placeholder if placeholder is None else placeholder
        per_image = model.per_image if per_image is None else per_image
        if model.placeholder is None:
            raise DataError(
                f"source {name!r} has image files, but the model expects image tokens (images = 'tokens'); prepare images as text"
            )
        if (placeholder, per_image) != (model.placeholder, model.per_image):
            raise DataError(
                f"source {name!r} sets {per_image} placeholders with id {placeholder} per image, but the model expects "
                f"{model.per_image} with id {model.placeholder}; remove placeholder and per_image"
            )
        encoder: Any = model.vision
        processing, native = getattr(encoder, "processing", None), getattr(model, "native", None)
        if processing is None:
            raise DataError(
                f"source {name!r} has images, but the model's encoder expects precomputed features; choose another encoder"
            )
        if native is not None and (tiling.name != "square" or size is not None):
            raise DataError(
                f"source {name!r} splits images into squares, but the model's encoder keeps their proportions; remove tiling and "
                "size from the source, or encoder.patches from the model"
            )
        if size not in (None, processing.size):
            raise DataError(f"source {name!r} has size {size}, but the model's encoder {processing.size}; remove size")
        timed = getattr(model, "frame_time", None) is not None
        return ImageInputs(model.placeholder, model.per_image, processing, encoder.channels, tiling, native, timed)
    if placeholder is None or per_image is None or size is None:
        raise DataError(
            f"source {name!r} has images, but the recipe's model does not support images; set model.name = 'vlm', or set "
            "placeholder, per_image and size of the source to prepare it for another model"
        )
    half = (0.5, 0.5, 0.5)
    return ImageInputs(placeholder, per_image, Processing(size=size, mean=half, std=half), 3, tiling)


def identity_of_inputs(inputs: "ImageInputs | ProcessorInputs") -> str:
    """Returns text that is equal if tokens and tiles are equal. Pixel statistics are left out: stored data does not depend on
    them.

    The text contains the `repr` of these classes and is hashed into names of stores: names of classes and fields must not change.
    """
    if not isinstance(inputs, ImageInputs):
        return inputs.identity
    processing = replace(inputs.processing, mean=(), std=(), scale=1.0)
    native = "" if inputs.native is None else f"/{inputs.native}"
    timed = "/timed" if inputs.timed else ""
    return f"{inputs.placeholder}/{inputs.per_image}/{inputs.channels}/{processing}/{inputs.tiling}{native}{timed}"
