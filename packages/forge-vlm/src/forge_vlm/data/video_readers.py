"""Readers of captioned clips: folders of image files listed in JSON lines, and video files listed in a CSV file."""

import string
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from forge_core.errors import DataError
from forge_data.sources.jsonl import SUFFIXES
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find, find_one
from forge_vlm.data.clips import FrameFolders, VideoFiles, choose_frames, import_pyav
from forge_vlm.data.documents import BrokenRecord, Clip, Frames, Record
from forge_vlm.data.image_readers import ImageFiles
from forge_vlm.data.rows import columns_of, read_lines, read_table


class FrameExamples:
    """Clips as directories of image files, listed in JSON lines; a reference is the path of a frame, see `ImageFiles`."""

    def __init__(self, path: str, folder: str | None, video: str, images: str, fps: float, count: int, told: bool) -> None:
        """
        Args:
            path: path of the JSON lines.
            folder: folder of the clips' directories; by default the folder of the record's file.
            video: field that names a clip's directory.
            images: field of a record that receives its frames.
            fps: frames per second of records that do not set it.
            count: maximum number of frames of a clip.
            told: writes times before frames.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, SUFFIXES, "JSON lines")
        self._folder = ImageFiles(self._files, folder)
        self._clips = FrameFolders(self._folder)
        self._video, self._images, self._fps, self._count, self._told = video, images, fps, count, told

    @property
    def fingerprint(self) -> str:
        """Changes with the records, the folder, and the order and selection of frames."""
        how = f"{self._video} {self._fps} {self._count} {self._told}"
        return digest_of(self._files, f"frames by number {self._folder.identity} {how}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (file and byte offset of the line, record); a record without a video is text."""
        for file in self._files:
            for name, place, record in read_lines(file):
                if isinstance(record, BrokenRecord):
                    yield name, record
                    continue
                named = record.get(self._video)
                if record.get(self._images) is not None:
                    yield (
                        name,
                        BrokenRecord(
                            f"{place}: has images in {self._images!r}, but this source reads clips only; add a source of images"
                        ),
                    )
                    continue
                clip = None if named is None else Clip(partial(self._frames, file, dict(record)), self._told)
                yield name, Record(record | {self._images: clip}, place)

    def fetch(self, reference: str) -> bytes:
        """Returns the file of a frame."""
        return self._clips.fetch(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a reference exists."""
        return self._clips.is_there(reference)

    def _frames(self, file: File, record: Mapping[str, Any]) -> Frames:
        name = record[self._video]
        reference = self._folder.reference(file, str(name))
        if not isinstance(name, str) or not name:
            raise BrokenRecord(f"{self._folder.path(reference)} contains no frames")
        footage = self._clips.open(reference, record.get("fps", self._fps), record.get("times"))
        return footage.frames(choose_frames(footage.times, self._count))


class VideoExamples:
    """Video files listed in a CSV file; a reference has the path of a clip, the numbers of its selected frames, and the number of
    one frame."""

    def __init__(self, path: str, folder: str | None, file: str, text: str, images: str, count: int, told: bool) -> None:
        """
        Args:
            path: path of the CSV file.
            folder: folder of the clips; by default the folder of the CSV file.
            file: file name of a clip, with column names in braces.
            text: text column.
            images: field of a record that receives its frames.
            count: maximum number of frames of a clip.
            told: writes times before frames.

        Raises:
            DataError: the file does not exist, lacks a column, or PyAV is not installed.
        """
        table_file = find_one(path)
        if table_file is None or table_file.remote:
            raise DataError(f"{path} is not a local file")
        self.what, self._file = path, table_file
        self._folder = ImageFiles([table_file], folder)
        self._name, self._text, self._images, self._count, self._told = file, text, images, count, told
        self._columns = [name for _, name, _, _ in string.Formatter().parse(file) if name]
        head = columns_of(table_file)
        if missing := [name for name in (*self._columns, text) if name not in head]:
            raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(head)}")
        import_pyav("video_csv")
        self._clips = VideoFiles(self._folder, "video_csv")

    @property
    def fingerprint(self) -> str:
        """Changes with the table, the folder, and the selection of frames."""
        return digest_of(
            [self._file], f"video as shown {self._folder.identity} {self._name} {self._text} {self._count} {self._told}"
        )

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (row of the table, record)."""
        for name, place, row in read_table(self._file):
            if isinstance(row, BrokenRecord):
                yield name, row
                continue
            clip = Clip(
                partial(self._chosen, self._name.format_map({column: row[column] for column in self._columns})), self._told
            )
            yield name, Record({self._text: row[self._text], self._images: clip}, place)

    def fetch(self, reference: str) -> bytes:
        """Returns a frame as an uncompressed image file; see `VideoFiles.fetch`."""
        return self._clips.fetch(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the clip's file exists."""
        return self._clips.is_there(reference)

    def _chosen(self, name: str) -> Frames:
        footage = self._clips.open(name)
        return footage.frames(choose_frames(footage.times, self._count))
