"""The handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 (Alpaydin and Kaynak, 1998), with made captions."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError

if TYPE_CHECKING:
    import numpy as np

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def caption(digits: "list[int]") -> str:
    """What is said of some images in their order."""
    return " ".join(NAMES[digit] for digit in digits)


class DigitExamples:
    """Each record shows some neighbors of the data set and is captioned with their names; an image is named by its number."""

    def __init__(self, text: str, images: str, each: int = 1) -> None:
        """
        Args:
            text, images: fields of a record.
            each: images of one record.

        Raises:
            DataError: scikit-learn is not installed.
        """
        self.what = "the digits of scikit-learn"
        self._text, self._images, self._each = text, images, each
        _ = self._data

    @property
    def fingerprint(self) -> str:
        """Of the images and their labels."""
        import xxhash

        pixels, labels = self._data
        return xxhash.xxh3_128_hexdigest(pixels.tobytes() + labels.tobytes()) + f" {self._each}"

    @cached_property
    def _data(self) -> "tuple[np.ndarray, np.ndarray]":
        """Pixels (1797, 8, 8) uint8, from white paper to black ink, and labels (1797,)."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError("source 'digits' needs scikit-learn; pip install 'forge-vlm[digits]'") from error
        found: Any = load_digits()
        ink = found.images * (255 / 16)
        return (255 - ink).round().astype("uint8"), found.target.astype("int64")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(number of the first image, record) of each."""
        _, labels = self._data
        for start in range(0, len(labels) - self._each + 1, self._each):
            numbers = range(start, start + self._each)
            images = [str(number) for number in numbers]
            yield f"digits:{start}", {self._text: caption([int(labels[number]) for number in numbers]), self._images: images}

    def fetch(self, reference: str) -> bytes:
        """An image as PNG."""
        from PIL import Image

        content = BytesIO()
        Image.fromarray(self._data[0][int(reference)]).save(content, "PNG")
        return content.getvalue()
