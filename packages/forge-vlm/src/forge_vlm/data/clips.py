"""Clips: directories of frames, and video files. The end of the file selects frames by their times.

PyAV decodes a video from its start, so a frame does not depend on the other selected frames.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_vlm.data.documents import BrokenRecord, Frames
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
_FRAME_OF_VIDEO = re.compile(r"#[0-9,]+@[0-9]+$")
"""End of the reference of a frame of a video file, which no image file has; see `VideoFiles`."""


@dataclass(frozen=True)
class Footage:
    """All frames of a clip.

    Attributes:
        times: seconds of each frame, ascending.
        references: returns the references of frames with these numbers, which ascend.
        start: time that counts as second 0.
    """

    times: Sequence[float]
    references: Callable[[Sequence[int]], Sequence[str]]
    start: float = 0.0

    def frames(self, numbers: Sequence[int]) -> Frames:
        """Returns time and reference of the frames with these numbers, which ascend."""
        times = (float(self.times[number] - self.start) for number in numbers)
        return tuple(zip(times, self.references(numbers), strict=True))


class FrameFolders:
    """Clips as directories of image files; a reference is the path of a frame, see `ImageFiles`."""

    def __init__(self, files: ImageFiles) -> None:
        """`files` resolves the names of directories."""
        self._files = files

    def fetch(self, reference: str) -> bytes:
        """Returns the file of a frame."""
        return self._files.read(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a reference exists."""
        return self._files.is_there(reference)

    def open(self, reference: str, fps: Any, times: Any = None) -> Footage:
        """Lists the frames of a directory.

        Args:
            reference: of the directory.
            fps: frames per second, if `times` is None.
            times: seconds of each frame, as a record has them.

        Raises:
            BrokenRecord: the directory has no frames or other files, or the times are not those of its frames.
        """
        directory = self._files.path(reference)
        try:
            listed = [each.name for each in directory.iterdir() if each.is_file() and not each.name.startswith(".")]
        except (OSError, ValueError):  # missing directory; NUL in its name
            listed = []
        files = sorted(filter(is_image, listed), key=natural_key)
        if not (files or listed):
            raise BrokenRecord(f"{directory} contains no frames")
        unknown = sorted(each for each in listed if not is_image(each) and each.rpartition(".")[2].lower() not in NOTE_SUFFIXES)
        if unknown:
            raise BrokenRecord(
                f"{directory} contains {unknown[0]}, whose suffix Pillow does not support; convert it, or move it away"
            )
        if not files:
            raise BrokenRecord(f"{directory} contains no frames")
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
        return Footage(times, lambda numbers: [f"{reference}/{files[number]}" for number in numbers])


class VideoFiles:
    """Video files as clips; a reference has the path of a clip, the numbers of its selected frames, and the number of one frame:
    `clip.mp4#0,7,14@7`."""

    def __init__(self, files: ImageFiles, needed_by: str) -> None:
        """
        Args:
            files: resolves the names of video files.
            needed_by: name of the source for messages.
        """
        self._files, self._needed_by = files, needed_by
        self._frames = lru_cache(_MAX_DECODED_CLIPS)(self._decoded)
        self._expected: dict[str, list[float]] = {}

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
        return self._files.is_there(reference.rpartition("#")[0])

    def open(self, name: str) -> Footage:
        """Reads the times of a clip.

        Raises:
            BrokenRecord: the file cannot be decoded.
        """
        times = self.times(name)

        def references(numbers: Sequence[int]) -> list[str]:
            listed = ",".join(map(str, numbers))
            return [f"{name}#{listed}@{number}" for number in numbers]

        return Footage(times, references, times[0])

    def times(self, name: str) -> list[float]:
        """Returns the seconds of every visible frame, ascending.

        If each packet is one frame, these are the times of the packets, and nothing is decoded. The clip is decoded if this is
        not certain: if packets are marked as discarded (by an edit list, which cutting without encoding writes), precede the
        start, have no time, or do not begin with a key frame and its time; and for codecs with hidden frames.
        """
        av = import_pyav(self._needed_by)
        try:
            with av.open(str(self._files.path(name))) as container:
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
            with av.open(str(self._files.path(name))) as container:
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
        av = import_pyav(self._needed_by)
        path, times = self._files.path(name), self._expected.pop(name, None)
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


class ClipFiles:
    """Clips that are directories of frames or video files, as each is found."""

    def __init__(self, files: ImageFiles, needed_by: str) -> None:
        """
        Args:
            files: resolves names of directories and video files.
            needed_by: name of the source for messages.
        """
        self._files = files
        self._folders, self._videos = FrameFolders(files), VideoFiles(files, needed_by)

    def open(self, reference: str, fps: Any, times: Any = None) -> Footage:
        """Lists the frames of a clip. `fps` and `times` are those of a directory of frames; see `FrameFolders.open`.

        Raises:
            BrokenRecord: the clip does not exist or cannot be read.
        """
        path = self._files.path(reference)
        try:
            is_folder, exists = path.is_dir(), path.exists()
        except (OSError, ValueError):  # NUL in the name, or a name that is too long
            is_folder = exists = False
        if not exists:
            raise BrokenRecord(f"{path} does not exist; restore it, or set `folder` and `file` of the source")
        return self._folders.open(reference, fps, times) if is_folder else self._videos.open(reference)

    def fetch(self, reference: str) -> bytes:
        """Returns a frame as an image file.

        Raises:
            DataError: the frame cannot be read.
        """
        return (self._videos if _FRAME_OF_VIDEO.search(reference) else self._folders).fetch(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a frame, or of its video, exists."""
        return (self._videos if _FRAME_OF_VIDEO.search(reference) else self._folders).is_there(reference)


def import_pyav(needed_by: str) -> Any:
    """Returns the module `av`.

    Raises:
        DataError: PyAV is not installed; the message names the source that needs it.
    """
    try:
        import av
    except ImportError as error:
        raise DataError(f"source {needed_by!r} needs PyAV; pip install 'forge-vlm[video]'") from error
    return av


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
