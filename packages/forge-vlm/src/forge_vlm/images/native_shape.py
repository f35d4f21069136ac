"""Sizes of images that keep their proportions. Plain data: importing it needs no numpy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Native:
    """How an encoder takes images of any proportions.

    Attributes:
        patch: height and width of a patch in pixels.
        most: patches of an image at most.
        each: the model has a placeholder for each patch, and not as many for every image.
    """

    patch: int
    most: int
    each: bool
