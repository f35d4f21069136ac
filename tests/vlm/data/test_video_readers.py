"""Clips as frames in the order of their times, from directories of images and from video files."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import DataError
from forge_vlm.components.sources import VideoCsv, VideoFrames
from forge_vlm.data.clips import VideoFiles, choose_frames
from forge_vlm.data.example_images import video
from forge_vlm.data.video_readers import VideoExamples
from vlm.data.test_stores import EOS, GIVEN, HOLE, documents, opened

FRAME = [HOLE, HOLE]


@pytest.mark.parametrize(
    ("times", "count", "wanted"),
    [
        ([0, 1, 2, 3, 4, 5, 6], 4, [0, 2, 4, 6]),
        ([0, 1, 2, 3, 4], 2, [0, 4]),
        ([0, 1, 2, 3, 4], 1, [2]),
        ([0, 1, 2], 3, [0, 1, 2]),
        ([0, 1], 8, [0, 1]),
        ([3.0], 4, [0]),
        ([0, 0.1, 0.2, 0.3, 10], 3, [0, 3, 4]),  # by time, not by number
        ([0, 0.1, 0.2, 10], 3, [0, 2, 3]),
        ([0, 9, 9.5, 10], 3, [0, 1, 3]),
        ([10, 11, 12, 13, 14], 3, [0, 2, 4]),
    ],
)
def test_frames_are_chosen_by_their_times(times: list[float], count: int, wanted: list[int]) -> None:
    assert choose_frames(times, count) == wanted


def grays(source: Any) -> list[int]:
    count = int(source.items_before(np.array([source.tokens]))[0])
    return [round(float(item.mean() * 127.5 + 127.5)) for item in source.load(0, count)]


def folders(tmp_path: Path, records: list[dict[str, Any]], clips: dict[str, list[int]]) -> str:
    for name, values in clips.items():
        (tmp_path / name).mkdir()
        for number, value in enumerate(values):
            Image.new("RGB", (8, 8), (value, value, value)).save(tmp_path / name / f"{number:03d}.png")
        (tmp_path / name / "notes.txt").write_text("not a frame")
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / "clips.jsonl")


def test_directories_of_frames_are_clips(tmp_path: Path) -> None:
    records = [
        {"video": "a", "text": "x"},
        {"video": "b", "text": "see <image> y", "fps": 2},
        {"text": "only text"},
        {"video": "b", "text": "z", "times": [0, 1, 7]},
    ]
    path = folders(tmp_path, records, {"a": [10, 20, 30, 40, 50], "b": [60, 70, 80]})
    source = opened(VideoFrames(path=path, frames=3, **GIVEN), tmp_path / "w")
    assert [ids for ids, _, _ in documents(source)] == [
        [*b"0.0s", *FRAME, *b"2.0s", *FRAME, *b"4.0s", *FRAME, *b"x", EOS],
        [*b"see ", *b"0.0s", *FRAME, *b"0.5s", *FRAME, *b"1.0s", *FRAME, *b" y", EOS],
        [*b"only text", EOS],
        [*b"0.0s", *FRAME, *b"1.0s", *FRAME, *b"7.0s", *FRAME, *b"z", EOS],
    ]
    marks = ["".join(".x"[each] for each in learned) for _, learned, _ in documents(source)]
    assert marks == ["." * 18 + "xx", "xxxx" + "." * 18 + "xxx", "x" * 10, "." * 18 + "xx"], "times and frames are not learned"
    assert grays(source) == [10, 30, 50, 60, 70, 80, 60, 70, 80]
    untold = opened(VideoFrames(path=path, frames=2, timestamps=False, **GIVEN), tmp_path / "w")
    assert documents(untold)[0][0] == [*FRAME, *FRAME, *b"x", EOS] and grays(untold)[:2] == [10, 50]
    assert untold.fingerprint != source.fingerprint


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"video": "none"}, "none contains no frames"),
        ({"video": 7}, "7 contains no frames"),
        ({"video": "a", "fps": 0}, "fps 0 is not a positive number"),
        ({"video": "a", "fps": "2"}, "fps '2' is not a positive number"),
        ({"video": "a", "times": [0, 1]}, "one time for each of 3 frames"),
        ({"video": "a", "times": [0, 2, 2]}, "times must be ascending"),
        ({"video": "a", "times": "soon"}, "times must be ascending"),
        ({"video": "a", "times": [0, 1, 10**400]}, r"times\[2\] = 10+ is not a time"),
        ({"video": "a", "times": [0, float("nan"), 2]}, r"times\[1\] = nan is not a time"),
        ({"video": "a", "times": [0, 1, float("inf")]}, r"times\[2\] = inf is not a time"),
        ({"video": "a", "times": [-0.5, 1, 2]}, r"times\[0\] = -0.5 is not a time .* 0 or more"),
        ({"video": "a", "times": [0, True, 2]}, r"times\[1\] = True is not a time"),
        ({"video": "a", "times": [0, "1", 2]}, r"times\[1\] = '1' is not a time"),
        ({"video": "a", "times": [0, 1, 2, 3]}, "one time for each of 3 frames, but there are 4"),
        ({"video": "a", "times": [2, 1, 0]}, r"times must be ascending, but times\[1\] = 1 follows 2"),
        ({"video": "a", "fps": float("nan")}, "fps nan is not a positive number"),
        ({"video": "a", "fps": True}, "fps True is not a positive number"),
        ({"video": "a", "fps": 1e-320}, "fps 1e-320 is too small"),
        ({"video": "a", "fps": 10**400}, "is not a positive number"),
        ({"video": "a\0"}, "contains no frames"),
        ({"video": ""}, "contains no frames"),
        ({"video": "a", "image": "a.png"}, r"\(line 2\): has images in 'image', but this source reads clips only"),
        ({"image": "a.png"}, r"\(line 2\): has images in 'image', but this source reads clips only"),
    ],
)
def test_clips_that_cannot_be_read_are_counted(tmp_path: Path, record: dict[str, Any], fault: str) -> None:
    path = folders(tmp_path, [{"video": "a", "text": "x"}, record | {"text": "y"}], {"a": [1, 2, 3]})
    component = VideoFrames(path=path, **GIVEN)
    with pytest.raises(DataError, match=fault):
        opened(component, tmp_path / "w")
    assert len(documents(opened(replace(component, skip=1), tmp_path / "w"))) == 1


def test_a_table_of_videos(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    video(tmp_path / "p" / "1.mp4", [0, 40, 80, 120, 160], fps=2)
    video(tmp_path / "p" / "2.mp4", [200, 255], fps=4)
    (tmp_path / "p" / "3.mp4").write_bytes(b"not a video" * 100)
    rows = ["videoid,page_dir,name", "1,p,one", "2,p,two", "3,p,broken", "4,p,gone"]
    (tmp_path / "clips.csv").write_text("\n".join(rows) + "\n")
    component = VideoCsv(path=str(tmp_path / "clips.csv"), frames=3, **GIVEN)
    with pytest.raises(DataError, match=r"clips\.csv, row 3 \(line 4\): p/3\.mp4 cannot be decoded"):
        opened(component, tmp_path / "w")
    said: list[str] = []
    source = opened(replace(component, skip=2), tmp_path / "w", said=said)
    assert "left out 2 broken records" in said[0]
    assert [ids for ids, _, _ in documents(source)] == [
        [*b"0.0s", *FRAME, *b"1.0s", *FRAME, *b"2.0s", *FRAME, *b"one", EOS],
        [*b"0.0s", *FRAME, *b"0.2s", *FRAME, *b"two", EOS],
    ]
    assert np.abs(np.array(grays(source)) - [0, 80, 160, 200, 255]).max() <= 8, (
        "the codec keeps grays nearly; frames are 40 apart"
    )
    shown = Image.open(BytesIO(source.picture(2)))
    assert shown.size == (8, 8)
    again = opened(replace(component, skip=2), tmp_path / "w")
    assert np.array_equal(again.load(1, 3), source.load(1, 3)) and again.fingerprint == source.fingerprint


def test_times_are_told_from_the_first_frame_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video(tmp_path / "1.mp4", [0, 40])
    (tmp_path / "clips.csv").write_text("videoid,name\n1,one\n")
    monkeypatch.setattr(VideoFiles, "times", lambda self, name: [7.0, 7.5])
    source = opened(VideoCsv(path=str(tmp_path / "clips.csv"), file="{videoid}.mp4", **GIVEN), tmp_path / "w")
    assert documents(source)[0][0] == [*b"0.0s", *FRAME, *b"0.5s", *FRAME, *b"one", EOS]


def test_a_clip_that_changed_is_named(tmp_path: Path) -> None:
    video(tmp_path / "1.mp4", [0, 40, 80])
    (tmp_path / "clips.csv").write_text("videoid,name\n1,one\n")
    component = VideoCsv(path=str(tmp_path / "clips.csv"), file="{videoid}.mp4", **GIVEN)
    _, one, two = (opened(component, tmp_path / "w") for _ in range(3))  # the first one has decoded it, to prepare it
    video(tmp_path / "1.mp4", [250, 40, 80])
    with pytest.raises(DataError, match=r"1\.mp4#0,1,2@0 has changed since it was prepared"):
        one.load(0, 1)
    video(tmp_path / "1.mp4", [0, 40])
    with pytest.raises(DataError, match="only 2 of 3 frames"):
        two.load(0, 1)


@pytest.mark.parametrize(
    ("content", "file", "fault"),
    [
        ("videoid,name\n1,x\n", "{page_dir}/{videoid}.mp4", "has no column 'page_dir'; it has videoid, name"),
        ("videoid\n1\n", "{videoid}.mp4", "has no column 'name'"),
        ("videoid,name\n", "{videoid}.mp4", "has no row"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, content: str, file: str, fault: str) -> None:
    (tmp_path / "clips.csv").write_text(content)
    with pytest.raises(DataError, match=fault):
        opened(VideoCsv(path=str(tmp_path / "clips.csv"), file=file, **GIVEN), tmp_path / "w")
    with pytest.raises(DataError, match="is not a local file"):
        opened(VideoCsv(path=str(tmp_path / "none.csv"), **GIVEN), tmp_path / "w")


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("1.mp4#0,1,2@7", "frame 7 is not one of the selected frames 0,1,2"),
        ("1.mp4#0,9@9", "only 1 of 2 frames"),
        ("1.mp4#9@9", "only 0 of 1 frames"),
        ("1.mp4#-1@-1", "has no frames '-1'"),
        ("1.mp4#nan@nan", "has no frames 'nan'"),
        ("1.mp4#2,0@0", "has no frames '2,0'"),
        ("1.mp4#@0", "has no frames ''"),
        ("1.mp4", "is not a reference to a frame"),
    ],
)
def test_a_frame_that_a_clip_does_not_have_is_refused_by_name(tmp_path: Path, reference: str, fault: str) -> None:
    video(tmp_path / "1.mp4", [0, 40, 80])
    (tmp_path / "clips.csv").write_text("videoid,name\n1,one\n")
    clips = VideoExamples(str(tmp_path / "clips.csv"), None, "{videoid}.mp4", "name", "image", 3, True)
    assert clips.fetch("1.mp4#0,2@2") != clips.fetch("1.mp4#0,2@0")
    with pytest.raises(DataError, match=fault) as refusal:
        clips.fetch(reference)
    assert "1.mp4" in str(refusal.value)


@pytest.mark.parametrize(
    ("times", "fault"),
    [
        ([0.0, float("nan"), 2.0], r"times\[1\] = nan"),
        ([0.0, 1.0, float("inf")], r"times\[2\] = inf"),
        ([0.0, 2.0, 1.0], r"times\[2\] = 1.0 follows 2.0"),
    ],
)
def test_frames_are_not_chosen_by_times_that_are_none(times: list[float], fault: str) -> None:
    for count in (1, 2, 8):
        with pytest.raises(DataError, match=fault):
            choose_frames(times, count)
