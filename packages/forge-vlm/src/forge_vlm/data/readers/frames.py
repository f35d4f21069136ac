"""Clips as directories of image files, listed in JSON lines."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.sources.records.jsonl import SUFFIXES, records
from forge_data.storage.files import find
from forge_data.storage.fingerprints import digest_of
from forge_vlm.data.documents import Broken, Clip
from forge_vlm.data.frames import chosen
from forge_vlm.data.readers.webdataset import IMAGES


class FrameExamples:
    """The records of some files; a reference is the path of a frame relative to `folder`."""

    def __init__(self, path: str, folder: str | None, video: str, images: str, fps: float, count: int, told: bool) -> None:
        """
        Args:
            path: of the JSON lines.
            folder: of the clips' directories; by default that of the first file.
            video: field that names a clip's directory.
            images: field of a record into which its frames are put.
            fps: frames of a second, where a record does not say.
            count: frames of a clip at most.
            told: whether times stand before frames.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, SUFFIXES, "JSON lines")
        self._folder = Path(folder) if folder is not None else Path(self._files[0].where).parent
        self._video, self._images, self._fps, self._count, self._told = video, images, fps, count, told

    @property
    def fingerprint(self) -> str:
        """Of the records, the folder, and how frames are chosen."""
        return digest_of(self._files, f"frames {self._folder} {self._video} {self._fps} {self._count} {self._told}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(file and byte of its line, record) of each; one without a video is text."""
        for file in self._files:
            for offset, record in records(file):
                shown: Any = None
                if record.get(self._video) is not None:
                    try:
                        shown = self._clip(record)
                    except Broken as broken:
                        shown = broken
                yield f"{file.name}:{offset}", record | {self._images: shown}

    def fetch(self, reference: str) -> bytes:
        """The file of a frame."""
        path = self._folder / reference
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def _clip(self, record: Mapping[str, Any]) -> Clip:
        name = record[self._video]
        directory = self._folder / str(name)
        files = sorted(file.name for file in directory.glob("*") if file.suffix.lower().removeprefix(".") in IMAGES)
        if not isinstance(name, str) or not files:
            raise Broken(f"{directory} has no frame")
        fps, times = record.get("fps", self._fps), record.get("times")
        if times is None:
            if not isinstance(fps, int | float) or not isfinite(fps) or fps <= 0:
                raise Broken(f"{directory}: fps {fps!r} is not a positive number")
            times = [number / fps for number in range(len(files))]
        numbers = isinstance(times, list) and all(isinstance(each, int | float) and isfinite(each) for each in times)
        if not numbers or len(times) != len(files) or any(after <= before for before, after in pairwise(times)):
            raise Broken(f"{directory}: times must ascend, one for each of {len(files)} frames")
        return Clip(tuple((float(times[n]), f"{name}/{files[n]}") for n in chosen(times, self._count)), self._told)
