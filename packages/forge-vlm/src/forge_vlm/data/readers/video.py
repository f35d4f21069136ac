"""Clips in video files, listed in a CSV file. PyAV decodes them, from the start: what a frame is does not depend on which others
are asked for."""

import csv
import string
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.storage.files import find_one
from forge_data.storage.fingerprints import digest_of
from forge_vlm.data.documents import Broken, Clip, Frames, Record
from forge_vlm.data.frames import chosen

_HIDDEN = ("vp8", "vp9", "av1")
"""Codecs that have packets without a frame of their own."""
_CLIPS = 16
"""Whose frames are held, so that those of one clip are decoded together."""


class VideoExamples:
    """The rows of a CSV file; a reference is the path of a clip, the numbers of its chosen frames, and that of one."""

    def __init__(self, path: str, folder: str | None, file: str, text: str, images: str, count: int, told: bool) -> None:
        """
        Args:
            path: of the CSV file.
            folder: of the clips; by default that of the file.
            file: name of a clip, with columns in braces.
            text: column of the text.
            images: field of a record into which its frames are put.
            count: frames of a clip at most.
            told: whether times stand before frames.

        Raises:
            DataError: the file does not exist, lacks a column, or PyAV is not installed.
        """
        found = find_one(path)
        if found is None or found.remote:
            raise DataError(f"{path} is not a file of this machine")
        self.what, self._file = path, found
        self._folder = Path(folder) if folder is not None else Path(found.where).parent
        self._name, self._text, self._images, self._count, self._told = file, text, images, count, told
        self._columns = [name for _, name, _, _ in string.Formatter().parse(file) if name]
        head = next(self._rows(), None)
        if head is None:
            raise DataError(f"{path} has no row")
        if missing := [name for name in (*self._columns, text) if name not in head]:
            raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(head)}")
        _library()
        self._frames = lru_cache(_CLIPS)(self._decoded)

    @property
    def fingerprint(self) -> str:
        """Of the table, the folder, and how frames are chosen."""
        return digest_of([self._file], f"video as shown {self._folder} {self._name} {self._text} {self._count} {self._told}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(row of the table, record) of each."""
        for number, row in enumerate(self._rows()):
            clip = Clip(partial(self._chosen, self._name.format_map({name: row[name] for name in self._columns})), self._told)
            place = f"{self._file.where}, row {number + 1}"
            yield f"{self._file.name}:{number}", Record({self._text: row[self._text], self._images: clip}, place)

    def fetch(self, reference: str) -> bytes:
        """A frame, as an uncompressed image file.

        Raises:
            DataError: the clip is gone, or cannot be decoded.
        """
        name, _, place = reference.rpartition("#")
        numbers, _, wanted = place.rpartition("@")
        frames = tuple(map(int, numbers.split(",")))
        return self._frames(name, frames)[frames.index(int(wanted))]

    def _rows(self) -> Iterator[dict[str, str]]:
        with Path(self._file.where).open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)

    def _chosen(self, name: str) -> Frames:
        times = self._times(name)
        numbers = chosen(times, self._count)
        listed = ",".join(map(str, numbers))
        return tuple((times[number] - times[0], f"{name}#{listed}@{number}") for number in numbers)

    def _times(self, name: str) -> list[float]:
        """Seconds of every frame that a player shows, ascending.

        They are read from the packets, which costs no decoding, where each packet is one frame. That is not so where packets are
        marked as discarded (an edit list, as cutting without encoding writes it), precede the start, begin without a key frame or
        have no time of their own, nor for codecs with hidden frames: then the clip is decoded.
        """
        av = _library()
        try:
            with av.open(str(self._folder / name)) as container:
                stream = container.streams.video[0]
                packets = [packet for packet in container.demux(stream) if packet.size]
                stamps = sorted({packet.pts for packet in packets if packet.pts is not None})
                plain = len(stamps) == len(packets) and packets[0].is_keyframe if packets else False
                plain = plain and not any(packet.is_discard or packet.is_corrupt for packet in packets) and stamps[0] >= 0
                if plain and stream.codec_context.codec.canonical_name not in _HIDDEN:
                    return [float(stamp * stream.time_base) for stamp in stamps]
            with av.open(str(self._folder / name)) as container:
                times = [frame.time for frame in container.decode(video=0)]
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise Broken(f"{name} cannot be decoded: {error}") from error
        if not times:
            raise Broken(f"{name} has no frame")
        if None in times or any(after <= before for before, after in pairwise(times)):
            raise Broken(f"{name} has frames without times that ascend; encode it again")
        return times

    def _decoded(self, name: str, numbers: tuple[int, ...]) -> list[bytes]:
        """Frames by their numbers, in the order of presentation, upright as they are stored."""
        av = _library()
        found: list[bytes] = []
        try:
            with av.open(str(self._folder / name)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    if number in numbers:
                        content = BytesIO()
                        frame.to_image().save(content, "PPM")
                        found.append(content.getvalue())
                    if number == numbers[-1]:
                        break
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise DataError(f"{self._folder / name} cannot be decoded: {error}") from error
        if len(found) != len(numbers):
            raise DataError(f"{self._folder / name} has fewer frames than times: {len(found)} of {len(numbers)} were decoded")
        return found


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise DataError("source 'video_csv' needs PyAV; pip install 'forge-vlm[video]'") from error
    return av
