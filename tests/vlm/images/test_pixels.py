"""Images are decoded or refused, and their pixels are those of transformers' processors."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import DataError, ForgeError
from forge_vlm.images.pixels import ImageError, convert, decode, fit_square, pixels
from forge_vlm.images.processing import FILE, Processing, read_processing


def noise(mode: str = "RGB", width: int = 12, height: int = 7) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def test_a_file_and_its_bytes_are_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved(noise()))
    for found in (decode(path), decode(path.read_bytes())):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(noise()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_exif_is_applied(orientation: int) -> None:
    """What the camera stored, turned as the EXIF standard says."""
    upright = np.asarray(noise())
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    np.testing.assert_array_equal(np.asarray(decode(data)), upright)


def test_what_is_transparent_lies_on_white() -> None:
    alpha = Image.fromarray(np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [0, 0, 0, 51]]], np.uint8))
    assert np.asarray(decode(saved(alpha)))[0].tolist() == [[255, 255, 255], [10, 20, 30], [204, 204, 204]]
    gray = Image.fromarray(np.array([[[10, 0], [10, 255]]], np.uint8))
    assert gray.mode == "LA"
    assert np.asarray(decode(saved(gray)))[0].tolist() == [[255] * 3, [10] * 3]
    assert np.asarray(decode(saved(gray), channels=1)).tolist() == [[255, 10]]


def test_palettes_and_their_transparent_color() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    assert np.asarray(decode(saved(image)))[0].tolist() == [[1, 2, 3], [40, 50, 60], [7, 8, 9]]
    assert np.asarray(decode(saved(image, transparency=1)))[0].tolist() == [[1, 2, 3], [255] * 3, [7, 8, 9]]


def test_colors_that_are_transparent_by_value() -> None:
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert np.asarray(decode(saved(image, transparency=(4, 5, 6))))[0].tolist() == [[1, 2, 3], [255] * 3]


def test_sixteen_bits_are_rounded_to_eight() -> None:
    levels = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    data = saved(Image.fromarray(levels))
    assert np.asarray(decode(data, channels=1)).tolist() == np.round(levels / 257).astype(int).tolist()
    assert np.asarray(decode(data))[0, -1].tolist() == [255] * 3


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr", "HSV", "RGBX"])
def test_other_modes_are_converted(mode: str) -> None:
    image = noise(mode)
    np.testing.assert_array_equal(np.asarray(convert(image)), np.asarray(image.convert("RGB")))
    assert convert(image, 1).mode == "L"


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_modes_without_a_known_range_are_refused(mode: str) -> None:
    with pytest.raises(ImageError, match=f"here: mode {mode} is refused"):
        convert(Image.new(mode, (2, 2)), path="here")


def test_one_channel_is_the_luma_of_three() -> None:
    red, green, blue = (np.asarray(decode(saved(Image.new("RGB", (1, 1), color)), 1))[0, 0] for color in ("red", "lime", "blue"))
    assert (red, green, blue) == (76, 150, 29)
    with pytest.raises(ImageError, match="2 channels are not implemented"):
        decode(saved(noise()), 2)


def damaged() -> dict[str, bytes]:
    png, jpeg = saved(noise(width=200, height=200)), saved(noise(width=200, height=200), "JPEG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    return {
        "empty": b"",
        "text": b"not an image",
        "head": png[:20],
        "cut_png": png[: len(png) // 2],
        "cut_jpeg": jpeg[: len(jpeg) // 2],
        "flipped_png": bytes(flipped),
    }


@pytest.mark.parametrize("case", damaged())
def test_damage_is_an_error_that_names_the_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / f"{case}.img"
    path.write_bytes(damaged()[case])
    with pytest.raises(ImageError, match=f"{case}.img: the image cannot be decoded") as caught:
        decode(path)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, DataError)
    with pytest.raises(ImageError, match=r"^row 7: ") as caught:
        decode(path.read_bytes(), path="row 7")
    assert " at 0x" not in str(caught.value), "an object in memory tells nobody anything"


def test_a_missing_file_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"none\.png: the image cannot be decoded"):
        decode(tmp_path / "none.png")


def test_an_image_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ImageError, match="exceeds limit of 60 pixels"):
        decode(saved(noise()))


def test_the_error_travels_between_processes() -> None:
    """What pickle calls is what copy calls."""
    found = copy.copy(ImageError("a.png", "why"))
    assert (str(found), found.path) == ("a.png: why", "a.png")


def test_the_first_picture_of_an_animation() -> None:
    frames = [Image.new("RGB", (3, 3), color) for color in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode(data))[0, 0].tolist() == [255, 0, 0]


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
