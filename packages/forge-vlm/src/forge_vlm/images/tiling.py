"""Computes the tiles of an image, each of the encoder's size, from its width and height. Needs no PIL and no torch.

square  the whole image in one tile
anyres  one tile with the whole image, then the grid that keeps most of its pixels (LLaVA-NeXT, Liu et al., 2024)
grid    a grid of at most `most` rows and columns with the image's proportions, then one tile with the whole image (Idefics3,
        Laurencon et al., 2024)
canvas  the grid of at most `most` tiles that enlarges the image least, padded; no tile with the whole image (Llama 3.2, 2024)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import IDENTITY

TilerName = Literal["square", "anyres", "grid", "canvas"]
LLAVA: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


@dataclass(frozen=True)
class Tiles:
    """The tiles of one image.

    Attributes:
        rows: number of rows of the grid; 0 if there is only the whole image.
        columns: number of columns of the grid; 0 if there is only the whole image.
        whole: position of the tile with the whole image: before the tiles of the grid, after them, or not at all.
        steps: sizes (width, height) to which the image is resized, one after the other, before the grid is cut.
        place: (left, top) of the resized image on the grid; the rest of the grid is black.
    """

    rows: int
    columns: int
    whole: Literal["first", "last", "none"]
    steps: tuple[tuple[int, int], ...] = ()
    place: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.rows * self.columns + (self.whole != "none")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A tiler and its limits; see the module docstring."""

    key_class: ClassVar = IDENTITY

    name: TilerName = "square"
    """Method of cutting an image into tiles: `square`, `anyres`, `grid` or `canvas`."""
    most: Annotated[int, Gt(0)] = 4
    """grid: maximum number of rows and of columns. canvas: maximum number of tiles."""
    grids: tuple[tuple[Annotated[int, Gt(0)], Annotated[int, Gt(0)]], ...] = LLAVA
    """anyres: (rows, columns) of the grids to choose from."""

    def __post_init__(self) -> None:
        if not self.grids:
            raise ValueError("grids of a tiler are empty; give (rows, columns), or remove the key")

    def tiles(self, width: int, height: int, size: int) -> Tiles:
        """Returns the tiles of size x size for an image of width x height."""
        if self.name == "square":
            return Tiles(0, 0, "first")
        if self.name == "anyres":
            return anyres(width, height, size, self.grids)
        return (grid if self.name == "grid" else canvas)(width, height, size, self.most)

    @property
    def most_tiles(self) -> int:
        """Maximum number of tiles of an image."""
        if self.name == "square":
            return 1
        if self.name == "canvas":
            return self.most
        return 1 + (self.most**2 if self.name == "grid" else max(rows * columns for rows, columns in self.grids))


def anyres(width: int, height: int, size: int, grids: Sequence[tuple[int, int]]) -> Tiles:
    """Chooses the grid that keeps most pixels of the image; of equals, the one with the least empty area."""

    def kept(grid: tuple[int, int]) -> tuple[int, int]:
        across, down = grid[1] * size, grid[0] * size
        scale = min(across / width, down / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - across * down

    rows, columns = max(grids, key=kept)  # the first of equals
    across, down = columns * size, rows * size
    by_width, by_height = across / width, down / height
    narrow = by_width < by_height
    new = (across, min(ceil(height * by_width), down)) if narrow else (min(ceil(width * by_height), across), down)
    return Tiles(rows, columns, "first", (new,), ((across - new[0]) // 2, (down - new[1]) // 2))


def grid(width: int, height: int, size: int, most: int) -> Tiles:
    """Computes a grid whose longer side is `most` tiles long; both sides are rounded up to whole tiles, and at least one."""
    longest = _long_side(width, height, most * size)
    ratio = longest[0] / longest[1]
    if longest[0] >= longest[1]:
        across = _up(longest[0], size)
        down = _up(max(1, int(across / ratio)), size)
    else:
        down = _up(longest[1], size)
        across = _up(max(1, int(down * ratio)), size)
    rows, columns = down // size, across // size
    if rows == columns == 1:
        return Tiles(0, 0, "last", (longest, (across, down)))
    return Tiles(rows, columns, "last", (longest, (across, down)))


def canvas(width: int, height: int, size: int, most: int) -> Tiles:
    """Chooses the grid that enlarges the image least, or, if none enlarges it, shrinks it least; of equals, the fewest tiles."""
    counts = range(1, most + 1)
    grids = [(rows, columns) for rows in counts for columns in counts if rows * columns <= most]
    scales = [min(rows * size / height, columns * size / width) for rows, columns in grids]
    larger = [scale for scale in scales if scale >= 1]
    chosen = min(larger) if larger else max(scales)
    rows, columns = min(
        (each for each, scale in zip(grids, scales, strict=True) if scale == chosen), key=lambda at: at[0] * at[1]
    )
    most_across, most_down = (min(max(each, size), count * size) for each, count in ((width, columns), (height, rows)))
    by_width, by_height = most_across / width, most_down / height
    if by_width < by_height:
        new = (most_across, min(floor(height * by_width) or 1, most_down))
    else:
        new = (min(floor(width * by_height) or 1, most_across), most_down)
    return Tiles(rows, columns, "none", (new,))


def _long_side(width: int, height: int, length: int) -> tuple[int, int]:
    """Returns the size with `length` as the longer side; the other side is rounded down, made even, and at most `length`."""
    ratio = width / height
    if width >= height:
        return length, max(1, min(_even(int(length / ratio)), length))
    return max(1, min(_even(int(length * ratio)), length)), length


def _even(length: int) -> int:
    return length + length % 2


def _up(length: int, size: int) -> int:
    return ceil(length / size) * size
