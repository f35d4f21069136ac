"""Clips as directories of image files, listed in JSON lines."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any

from forge_data.sources.jsonl import SUFFIXES, each_line
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find
from forge_vlm.data.documents import Broken, Clip, Frames, Record
from forge_vlm.data.frames import chosen
from forge_vlm.data.readers.files import ImageFiles, is_image, natural

NOTES = ("txt", "text", "caption", "md", "json", "jsonl", "csv", "tsv", "xml", "yaml", "yml", "srt", "vtt")
"""Suffixes of text, which may lie among the frames of a clip."""


class FrameExamples:
    """The records of some files; a reference is the path of a frame, see `ImageFiles`."""

    def __init__(self, path: str, folder: str | None, video: str, images: str, fps: float, count: int, told: bool) -> None:
        """
        Args:
            path: of the JSON lines.
            folder: of the clips' directories; by default that of the file that a record comes from.
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
        self._folder = ImageFiles(self._files, folder)
        self._video, self._images, self._fps, self._count, self._told = video, images, fps, count, told

    @property
    def fingerprint(self) -> str:
        """Of the records, the folder, and how frames are ordered and chosen."""
        how = f"{self._video} {self._fps} {self._count} {self._told}"
        return digest_of(self._files, f"frames by number {self._folder.identity} {how}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | Broken]]:
        """(file and byte of its line, record) of each; one without a video is text."""
        for file in self._files:
            for offset, place, record in each_line(file):
                name = f"{file.name}:{offset}"
                if isinstance(record, str):
                    yield name, Broken(f"{place} {record}")
                    continue
                named = record.get(self._video)
                if record.get(self._images) is not None:
                    yield name, Broken(f"{place}: has {self._images!r}, and this source reads clips alone; give images their own")
                    continue
                clip = None if named is None else Clip(partial(self._frames, file, dict(record)), self._told)
                yield name, Record(record | {self._images: clip}, place)

    def fetch(self, reference: str) -> bytes:
        """The file of a frame."""
        return self._folder.read(reference)

    def is_there(self, reference: str) -> bool:
        """Whether there is such a file."""
        return self._folder.is_there(reference)

    def _frames(self, file: File, record: Mapping[str, Any]) -> Frames:
        name = record[self._video]
        reference = self._folder.reference(file, str(name))
        directory = self._folder.path(reference)
        try:
            listed = [each.name for each in directory.iterdir() if each.is_file() and not each.name.startswith(".")]
        except (OSError, ValueError):  # it is not there; a NUL in its name
            listed = []
        files = sorted(filter(is_image, listed), key=natural)
        if not isinstance(name, str) or not name or not (files or listed):
            raise Broken(f"{directory} has no frame")
        unknown = sorted(each for each in listed if not is_image(each) and each.rpartition(".")[2].lower() not in NOTES)
        if unknown:
            raise Broken(f"{directory} has {unknown[0]}, which Pillow does not read by its suffix; convert it, or move it away")
        if not files:
            raise Broken(f"{directory} has no frame")
        fps, times = record.get("fps", self._fps), record.get("times")
        if times is None:
            if not _is_number(fps) or fps <= 0:
                raise Broken(f"{directory}: fps {fps!r} is not a positive number")
            times = [number / fps for number in range(len(files))]
        if (
            not isinstance(times, list)
            or not all(map(_is_number, times))
            or len(times) != len(files)
            or any(after <= before for before, after in pairwise(times))
        ):
            raise Broken(f"{directory}: times must ascend, one for each of {len(files)} frames")
        return tuple((float(times[n]), f"{reference}/{files[n]}") for n in chosen(times, self._count))


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number of fp64."""
    try:
        return isinstance(value, int | float) and isfinite(value)
    except OverflowError:
        return False
