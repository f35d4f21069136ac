"""Tiles equal those of transformers' processors of LLaVA-NeXT, Idefics3 and Llama 3.2, pixel by pixel."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from forge_vlm.images.pixels import cut_tiles, tile_pixels
from forge_vlm.images.processing import Processing
from forge_vlm.images.tiling import Tiling

SIZE = 8
SHAPES = [(8, 8), (20, 20), (33, 9), (9, 33), (7, 40), (50, 31), (16, 24), (3, 3), (100, 12), (17, 16)]
PLAIN = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": True}


def photo(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8))


def processing(resample: Any = "bicubic") -> Processing:
    return Processing(size=SIZE, mean=(0,) * 3, std=(1,) * 3, scale=1, resample=resample)


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_anyres_is_llava_next(width: int, height: int) -> None:
    module = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    points = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE], [3 * SIZE, SIZE], [SIZE, 3 * SIZE]]
    square = {"height": SIZE, "width": SIZE}
    theirs = module.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=square, image_grid_pinpoints=points, **PLAIN
    )
    image = photo(width, height)
    wanted = np.asarray(theirs(images=image, return_tensors="np")["pixel_values"][0])
    found, tiles = tile_pixels(image, Tiling(name="anyres"), processing())
    np.testing.assert_array_equal(found, wanted)
    assert tiles.count == len(wanted) == 1 + tiles.rows * tiles.columns


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8),
)
def test_anyres_chooses_the_grid_of_llava_next(width: int, height: int, grids: list[tuple[int, int]]) -> None:
    """Also where several keep as many pixels."""
    utils = pytest.importorskip("transformers.image_processing_utils")
    best = utils.select_best_resolution((height, width), [(rows * 100, columns * 100) for rows, columns in grids])
    tiles = Tiling(name="anyres", grids=tuple(grids)).tiles(width, height, 100)
    # An image so thin that not one row of it is left has no best grid there.
    assert best is None or (tiles.rows * 100, tiles.columns * 100) == best


@pytest.mark.parametrize(("width", "height"), SHAPES)
@pytest.mark.parametrize("most", [1, 3, 4])
def test_grid_is_idefics3(width: int, height: int, most: int) -> None:
    module = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3")
    theirs = module.Idefics3ImageProcessorPil(
        size={"longest_edge": most * SIZE}, max_image_size={"longest_edge": SIZE}, do_pad=False, return_row_col_info=True, **PLAIN
    )
    image = photo(width, height)
    out = theirs(images=[[image]], return_tensors="np")
    found, tiles = tile_pixels(image, Tiling(name="grid", most=most), processing("lanczos"))
    np.testing.assert_array_equal(found, np.asarray(out["pixel_values"][0]))
    assert (tiles.rows, tiles.columns) == (out["rows"][0][0], out["cols"][0][0])


@pytest.mark.parametrize(("width", "height"), SHAPES)
@pytest.mark.parametrize("most", [1, 4, 6])
def test_canvas_is_llama(width: int, height: int, most: int) -> None:
    module = pytest.importorskip("transformers.models.mllama.image_processing_pil_mllama")
    theirs = module.MllamaImageProcessorPil(size={"height": SIZE, "width": SIZE}, max_image_tiles=most, **PLAIN)
    image = photo(width, height)
    out = theirs(images=[[image]], return_tensors="np")
    found, tiles = tile_pixels(image, Tiling(name="canvas", most=most), processing("bilinear"))
    count = out["num_tiles"][0][0]
    np.testing.assert_array_equal(found, out["pixel_values"][0, 0, :count])
    assert tiles.count == count == tiles.rows * tiles.columns
    module_ratios = module.get_all_supported_aspect_ratios(most)
    assert module_ratios.index((tiles.rows, tiles.columns)) + 1 == out["aspect_ratio_ids"][0, 0]


def test_square_is_the_whole_image() -> None:
    image = photo(20, 12)
    found = cut_tiles(image, Tiling(), processing())
    assert (found.tiles.count, found.tiles.rows, found.tiles.columns) == (1, 0, 0)
    np.testing.assert_array_equal(np.asarray(found.images[0]), np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC)))


@given(
    st.sampled_from(["square", "anyres", "grid", "canvas"]),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 400),
    st.integers(1, 9),
)
@example("grid", 1, 253, 253, 1)
@example("grid", 2000, 3, 253, 1)
def test_any_image_becomes_at_most_as_many_tiles(name: Any, width: int, height: int, size: int, most: int) -> None:
    """And what is resized lies on the grid."""
    tiling = Tiling(name=name, most=most)
    tiles = tiling.tiles(width, height, size)
    assert 1 <= tiles.count <= tiling.most_tiles
    assert all(side >= 1 for step in tiles.steps for side in step)
    if tiles.rows:
        across, down = tiles.steps[-1]
        left, top = tiles.place
        assert 0 <= left <= left + across <= tiles.columns * size
        assert 0 <= top <= top + down <= tiles.rows * size


def test_grids_of_anyres_are_chosen_from() -> None:
    tiles = Tiling(name="anyres", grids=((2, 1),)).tiles(100, 10, 8)
    assert (tiles.rows, tiles.columns) == (2, 1)
    assert Tiling(name="anyres", grids=((1, 1), (1, 5))).most_tiles == 6
    with pytest.raises(ValueError, match="grids of a tiler are empty"):
        Tiling(name="anyres", grids=())


def test_images_of_one_channel_are_cut_alike() -> None:
    image = photo(33, 20)
    gray = image.convert("L")
    for name in ("square", "anyres", "grid", "canvas"):
        found = cut_tiles(gray, Tiling(name=name), processing()).images
        assert {each.mode for each in found} == {"L"}
        assert len(found) == len(cut_tiles(image, Tiling(name=name), processing()).images)
