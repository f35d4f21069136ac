"""Every mode of an image is converted or refused, and what is damaged is one kind of error that names the file."""

import copy
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import DataError
from forge_vlm.images.pixels import ImageError, convert, decode


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
