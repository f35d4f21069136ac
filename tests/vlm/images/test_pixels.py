"""Pixels equal those of transformers' processors on PIL, for the settings that published towers have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import ForgeError
from forge_vlm.images.pixels import fit_square, pixels
from forge_vlm.images.processing import FILE, Processing, read_processing

transformers = pytest.importorskip("transformers")


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a slope: nothing in it is symmetric."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    slope = np.linspace(0, 127, width)[None, :, None] * np.array([1, 0.5, 0.2])
    return Image.fromarray((noise + slope).astype(np.uint8))


def processed(processor: Any, image: Image.Image) -> np.ndarray:
    return np.asarray(processor(images=image, return_tensors="np")["pixel_values"][0])


SHAPES = [(40, 40), (61, 37), (23, 50), (16, 16), (5, 90)]


@pytest.mark.parametrize(("width", "height"), SHAPES)
@pytest.mark.parametrize("case", ["siglip", "siglip_bilinear", "clip", "clip_large", "dinov2"])
def test_pixels_are_those_of_the_processor(case: str, width: int, height: int, tmp_path: Path) -> None:
    """As they are read from the file that the processor writes."""
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    square = {"height": 16, "width": 16}
    processor = {
        "siglip": lambda: SiglipImageProcessorPil(size=square),
        "siglip_bilinear": lambda: SiglipImageProcessorPil(size=square, resample=2, image_mean=[0.1, 0.2, 0.3]),
        "clip": lambda: CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square),
        "clip_large": lambda: CLIPImageProcessorPil(size={"shortest_edge": 21}, crop_size=square),
        "dinov2": lambda: BitImageProcessorPil(size={"shortest_edge": 18}, crop_size=square, do_center_crop=True),
    }[case]()
    processor.save_pretrained(tmp_path)
    processing = read_processing(tmp_path, 99, 3)
    image = photo(width, height)
    wanted = processed(processor, image)
    found = pixels(fit_square(image, processing), processing)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
    exact = Processing(size=processing.size, mean=(0,) * 3, std=(1,) * 3, scale=1, shortest=processing.shortest)
    again = {"do_rescale": False, "do_normalize": False}
    if case in ("siglip", "clip", "clip_large", "dinov2"):
        bytes_of_theirs = np.asarray(processor(images=image, return_tensors="np", **again)["pixel_values"][0])
        np.testing.assert_array_equal(pixels(fit_square(image, exact), exact), bytes_of_theirs)


def test_brightness_alone() -> None:
    processing = Processing(size=2, mean=(0.5,), std=(0.25,))
    image = Image.fromarray(np.array([[0, 255], [51, 102]], np.uint8))
    np.testing.assert_allclose(pixels(image, processing), [[[-2, 2], [-1.2, -0.4]]], atol=1e-6)


def test_channels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="an image of mode L does not have 3 channels"):
        pixels(Image.new("L", (2, 2)), Processing(size=2, mean=(0.5,) * 3, std=(0.5,) * 3))
    with pytest.raises(ValueError, match="an image of mode F does not have 1 channels"):
        pixels(Image.new("F", (2, 2)), Processing(size=2, mean=(0.5,), std=(0.5,)))


def written(folder: Path, **values: Any) -> Path:
    (folder / FILE).write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, **values}))
    return folder


def test_older_files_give_sizes_as_numbers(tmp_path: Path) -> None:
    found = read_processing(written(tmp_path, size=24, crop_size=20, do_center_crop=True, resample=3), 99, 3)
    assert (found.shortest, found.size) == (24, 20)
    found = read_processing(written(tmp_path, size=24), 99, 3)
    assert (found.shortest, found.size) == (None, 24)
    assert read_processing(written(tmp_path), 99, 3).size == 99


def test_the_filter_is_pils(tmp_path: Path) -> None:
    for number in range(6):
        name = read_processing(written(tmp_path, resample=number), 9, 3).resample
        assert Image.Resampling[name.upper()] == number


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_normalize": False}, "do_normalize False is not implemented"),
        ({"do_resize": False}, "do_resize False"),
        ({"image_mean": [0.5]}, r"image_mean \[0\.5\]: expected 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "expected positive numbers"),
        ({"size": {"height": 4, "width": 6}}, "only squares are"),
        ({"size": {"shortest_edge": 8}}, "a crop of at most that size is"),
        ({"size": {"shortest_edge": 8}, "crop_size": 9, "do_center_crop": True}, "a crop of at most that size is"),
        ({"size": {"height": 8, "width": 8}, "crop_size": 6, "do_center_crop": True}, "crop_size 6 of a square of 8"),
        ({"resample": None}, "resample None is not a filter of PIL"),
        ({"resample": 6}, "resample 6 is not a filter of PIL"),
        ({"rescale_factor": 0}, "rescale_factor 0 is not a positive number"),
        ({"do_color_quantize": True}, "do_color_quantize True is not implemented"),
        ({"do_pad": True}, "do_pad True is not implemented"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(values: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=message):
        read_processing(written(tmp_path, **values), 16, 3)


def test_a_larger_size_keeps_the_margin() -> None:
    processing = Processing(size=16, mean=(0,), std=(1,), shortest=20)
    assert (processing.at(32).size, processing.at(32).shortest) == (32, 40)
    with pytest.raises(ValueError, match="size 16 cannot be cropped from an image whose shorter edge is 15"):
        Processing(size=16, mean=(0,), std=(1,), shortest=15)
