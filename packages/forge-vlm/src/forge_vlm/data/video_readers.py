"""Readers of clips: folders of image files listed in JSON lines, and video files listed in a CSV file.

PyAV decodes a video from its start, so a frame does not depend on the other selected frames. The end of the file selects the
frames of a clip.
"""

import csv
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from io import BytesIO
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_data.sources.jsonl import SUFFIXES, each_line
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find, find_one
from forge_vlm.data.documents import BrokenRecord, Clip, Frames, Record
from forge_vlm.data.image_readers import ImageFiles, is_image, natural_key

NOTE_SUFFIXES = ("txt", "text", "caption", "md", "json", "jsonl", "csv", "tsv", "xml", "yaml", "yml", "srt", "vtt")
"""Suffixes of text files that may be stored among the frames of a clip."""
_CODECS_WITH_HIDDEN_FRAMES = ("vp8", "vp9", "av1")
"""Codecs whose packets may contain no visible frame."""
_TIME_TOLERANCE = 1e-3
"""Maximum difference in seconds between the times of a frame and of its packet; some containers round them."""
_MAX_CLIPS_WITH_TIMES = 4096
"""Number of clips whose times are cached until they are decoded."""
_MAX_DECODED_CLIPS = 16
"""Number of clips whose decoded frames are cached: the frames of a clip are decoded together and read one by one."""


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
        self._video, self._images, self._fps, self._count, self._told = video, images, fps, count, told

    @property
    def fingerprint(self) -> str:
        """Changes with the records, the folder, and the order and selection of frames."""
        how = f"{self._video} {self._fps} {self._count} {self._told}"
        return digest_of(self._files, f"frames by number {self._folder.identity} {how}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (file and byte offset of the line, record); a record without a video is text."""
        for file in self._files:
            for offset, place, record in each_line(file):
                name = f"{file.name}:{offset}"
                if isinstance(record, str):
                    yield name, BrokenRecord(f"{place} {record}")
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
        return self._folder.read(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a reference exists."""
        return self._folder.is_there(reference)

    def _frames(self, file: File, record: Mapping[str, Any]) -> Frames:
        name = record[self._video]
        reference = self._folder.reference(file, str(name))
        directory = self._folder.path(reference)
        try:
            listed = [each.name for each in directory.iterdir() if each.is_file() and not each.name.startswith(".")]
        except (OSError, ValueError):  # missing directory; NUL in its name
            listed = []
        files = sorted(filter(is_image, listed), key=natural_key)
        if not isinstance(name, str) or not name or not (files or listed):
            raise BrokenRecord(f"{directory} contains no frames")
        unknown = sorted(each for each in listed if not is_image(each) and each.rpartition(".")[2].lower() not in NOTE_SUFFIXES)
        if unknown:
            raise BrokenRecord(
                f"{directory} contains {unknown[0]}, whose suffix Pillow does not support; convert it, or move it away"
            )
        if not files:
            raise BrokenRecord(f"{directory} contains no frames")
        fps, times = record.get("fps", self._fps), record.get("times")
        if times is None:
            if not _is_number(fps) or fps <= 0:
                raise BrokenRecord(f"{directory}: fps {fps!r} is not a positive number")
            times = [number / fps for number in range(len(files))]
            if not isfinite(times[-1]):
                raise BrokenRecord(f"{directory}: fps {fps!r} is too small, because the time of the last frame is not finite")
        elif not isinstance(times, list) or len(times) != len(files):
            there = f"there are {len(times)}" if isinstance(times, list) else f"times is {times!r}"
            raise BrokenRecord(f"{directory}: times must be ascending, one time for each of {len(files)} frames, but {there}")
        if fault := _fault_of(times):
            raise BrokenRecord(f"{directory}: {fault}")
        if times[0] < 0:
            raise BrokenRecord(f"{directory}: times[0] = {times[0]!r} is not a time in seconds, 0 or more")
        return tuple((float(times[n]), f"{reference}/{files[n]}") for n in choose_frames(times, self._count))


def _fault_of(times: Sequence[Any]) -> str | None:
    """Says which of these times cannot be one of a clip's, and why; None if they are finite and ascending."""
    for number, time in enumerate(times):
        if not _is_number(time):
            return f"times[{number}] = {time!r} is not a time in seconds"
        if number and time <= times[number - 1]:
            return f"times must be ascending, but times[{number}] = {time!r} follows {times[number - 1]!r}"
    return None


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that is finite in fp64."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


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
        self._read_from(ImageFiles([table_file], folder), count, told)
        self._name, self._text, self._images = file, text, images
        self._columns = [name for _, name, _, _ in string.Formatter().parse(file) if name]
        table = self._table()
        _, head = next(table, (0, []))
        if missing := [name for name in (*self._columns, text) if name not in head]:
            raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(head)}")
        if next(table, None) is None:
            raise DataError(f"{path} has no rows")
        _import_pyav()

    def _read_from(self, folder: ImageFiles, count: int, told: bool) -> None:
        """Sets where the clips are and what is read of them; `forge_vlm.data.questions.Clips` needs no more."""
        self._folder, self._count, self._told = folder, count, told
        self._frames = lru_cache(_MAX_DECODED_CLIPS)(self._decoded)
        self._expected: dict[str, list[float]] = {}

    @property
    def fingerprint(self) -> str:
        """Changes with the table, the folder, and the selection of frames."""
        return digest_of(
            [self._file], f"video as shown {self._folder.identity} {self._name} {self._text} {self._count} {self._told}"
        )

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (row of the table, record)."""
        table = self._table()
        _, head = next(table)
        for number, (line, values) in enumerate(table):
            name, place = f"{self._file.name}:{number}", f"{self._file.where}, row {number + 1} (line {line})"
            if len(values) != len(head):
                yield name, BrokenRecord(f"{place} has {len(values)} columns, the header {len(head)}; quote text with commas")
                continue
            if any("\udc80" <= letter <= "\udcff" for value in values for letter in value):
                yield name, BrokenRecord(f"{place} is not UTF-8")
                continue
            row = dict(zip(head, values, strict=True))
            clip = Clip(
                partial(self._chosen, self._name.format_map({column: row[column] for column in self._columns})), self._told
            )
            yield name, Record({self._text: row[self._text], self._images: clip}, place)

    def fetch(self, reference: str) -> bytes:
        """Returns a frame as an uncompressed image file.

        Raises:
            DataError: the clip does not exist any more, cannot be decoded, or does not have the frame.
        """
        name, _, place = reference.rpartition("#")
        numbers, _, wanted = place.rpartition("@")
        if not name or not wanted:
            raise DataError(f"{reference!r} is not a reference to a frame, such as clip.mp4#0,7,14@7; prepare the data again")
        listed = numbers.split(",")
        frames = tuple(int(number) for number in listed if number.isdecimal())
        if len(frames) != len(listed) or any(after <= before for before, after in pairwise(frames)):
            raise DataError(f"{name} has no frames {numbers!r}; frames are numbers from 0 on, ascending; prepare the data again")
        if wanted not in listed:
            raise DataError(f"{name}: frame {wanted} is not one of the selected frames {numbers}; prepare the data again")
        return self._frames(name, frames)[listed.index(wanted)]

    def is_there(self, reference: str) -> bool:
        """Whether the clip's file exists."""
        return self._folder.is_there(reference.rpartition("#")[0])

    def _table(self) -> Iterator[tuple[int, list[str]]]:
        """Yields (line of the last character, values) of the header and of each row."""
        with Path(self._file.where).open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.reader(file)
            try:
                yield from ((reader.line_num, values) for values in reader if values)
            except csv.Error as error:
                raise DataError(f"{self._file.where} is not valid CSV after line {reader.line_num}: {error}") from error

    def _chosen(self, name: str) -> Frames:
        times = self._times(name)
        numbers = choose_frames(times, self._count)
        listed = ",".join(map(str, numbers))
        return tuple((times[number] - times[0], f"{name}#{listed}@{number}") for number in numbers)

    def _times(self, name: str) -> list[float]:
        """Returns the seconds of every visible frame, ascending.

        If each packet is one frame, these are the times of the packets, and nothing is decoded. The clip is decoded if this is
        not
        certain: if packets are marked as discarded (by an edit list, which cutting without encoding writes), precede the start,
        have no time, or do not begin with a key frame and its time; and for codecs with hidden frames.
        """
        av = _import_pyav()
        try:
            with av.open(str(self._folder.path(name))) as container:
                if not container.streams.video:
                    raise BrokenRecord(f"{name} contains no video")
                stream = container.streams.video[0]
                packets = [packet for packet in container.demux(stream) if packet.size]
                stamps = sorted({packet.pts for packet in packets if packet.pts is not None})
                if (
                    packets
                    and len(stamps) == len(packets)
                    and packets[0].is_keyframe
                    and packets[0].pts == stamps[0] >= 0
                    and not any(packet.is_discard or packet.is_corrupt for packet in packets)
                    and stream.codec_context.codec.canonical_name not in _CODECS_WITH_HIDDEN_FRAMES
                ):
                    self._expected[name] = times_of_packets = [float(stamp * stream.time_base) for stamp in stamps]
                    while len(self._expected) > _MAX_CLIPS_WITH_TIMES:
                        self._expected.pop(next(iter(self._expected)), None)
                    return times_of_packets
            with av.open(str(self._folder.path(name))) as container:
                times = [frame.time for frame in container.decode(video=0)]
        except BrokenRecord:
            raise
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise BrokenRecord(f"{name} cannot be decoded: {error}") from error
        if not times:
            raise BrokenRecord(f"{name} contains no frames")
        if None in times or any(after <= before for before, after in pairwise(times)):
            raise BrokenRecord(f"{name} has frames without ascending times; encode it again")
        return times

    def _decoded(self, name: str, numbers: tuple[int, ...]) -> list[bytes]:
        """Returns frames by their numbers, in the order of presentation, with the orientation in which they are stored.

        If the times of a clip were read from its packets, its frames must have the same times: in a damaged clip some packets
        have no frame.
        """
        av = _import_pyav()
        path, times = self._folder.path(name), self._expected.pop(name, None)
        images: list[bytes] = []
        try:
            with av.open(str(path)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    if times is not None and (number >= len(times) or abs((frame.time or 0.0) - times[number]) > _TIME_TOLERANCE):
                        raise DataError(f"{path} has packets without a frame before {frame.time} s; encode it again")
                    if number in numbers:
                        content = BytesIO()
                        frame.to_image().save(content, "PPM")
                        images.append(content.getvalue())
                    if number == numbers[-1]:
                        break
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise DataError(f"{path} cannot be decoded: {error}") from error
        if len(images) != len(numbers):
            raise DataError(f"{path} is damaged: only {len(images)} of {len(numbers)} frames could be decoded")
        return images


def _import_pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise DataError("source 'video_csv' needs PyAV; pip install 'forge-vlm[video]'") from error
    return av


def choose_frames(times: Sequence[float], count: int) -> list[int]:
    """Returns the numbers of at most `count` frames, ascending: the nearest frame to each of `count` equally spaced times from
    the first to the last, each frame once. A single frame is the middle frame.

    Args:
        times: in seconds, ascending.
        count: maximum number of frames.

    Raises:
        DataError: a time is not finite, or times do not ascend.
    """
    if fault := _fault_of(times):
        raise DataError(f"frames cannot be chosen: {fault}; correct the times of the clip")
    if len(times) <= count:
        return list(range(len(times)))
    moments = np.linspace(times[0], times[-1], count) if count > 1 else [(times[0] + times[-1]) / 2]
    all_times = np.asarray(times, dtype=np.float64)
    return sorted({int(np.abs(all_times - moment).argmin()) for moment in moments})
