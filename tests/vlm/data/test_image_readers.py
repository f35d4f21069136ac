"""Readers take what a record means: its own files, the order of numbers, the frames that a player shows. The rest is refused."""

import json
import tarfile
import wave
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import DataError
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import find
from forge_vlm.components.sources import ImageJsonl, ImageWebdataset, VideoCsv, VideoFrames
from forge_vlm.data.example_images import video
from forge_vlm.data.image_readers import natural_key
from forge_vlm.data.video_readers import VideoExamples
from vlm.data.test_stores import EOS, GIVEN, documents, opened, square
from vlm.data.test_video_readers import grays


def texts(source: Any) -> list[str]:
    return [bytes(token for token in ids if token < EOS).decode() for ids, _, _ in documents(source)]


def tar(path: Path, members: Sequence[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as content:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            content.addfile(member, BytesIO(data))
    return str(path)


def encoded(kind: str, value: int = 40) -> bytes:
    content = BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(content, kind)
    return content.getvalue()


def test_trials_b2_records_of_several_directories_have_their_own_images(tmp_path: Path) -> None:
    """Equal names in two directories are two images, when the store is prepared and when it is read again."""
    root = tmp_path / "data"
    for name, value in (("cats", 10), ("dogs", 200)):
        (root / name / "far").mkdir(parents=True)
        (root / name / "0.png").write_bytes(square(value))
        (root / name / "far" / "1.png").write_bytes(square(value + 1))
        lines = [{"image": "0.png", "text": name}, {"image": ["far/1.png", str(root / name / "0.png")], "text": name}]
        (root / name / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (root, root / "*" / "records.jsonl"):
        component = ImageJsonl(path=str(path), **GIVEN)
        for _ in range(2):  # prepared, then found in the workspace
            source = opened(component, tmp_path / "w")
            assert texts(source) == ["cats", "cats", "dogs", "dogs"]
            assert grays(source) == [10, 11, 10, 200, 201, 200]
    shared = opened(ImageJsonl(path=str(root), folder=str(root / "cats"), **GIVEN), tmp_path / "w")
    assert grays(shared) == [10, 11, 10, 10, 11, 200], "one folder that is given holds the images of all"
    (root / "dogs" / "0.png").unlink()
    with pytest.raises(DataError, match=r"dogs/0\.png cannot be read"):
        opened(component, tmp_path / "w").load(3, 4)


def test_trials_b2_clips_of_several_directories_have_their_own_frames(tmp_path: Path) -> None:
    for name, value in (("cats", 10), ("dogs", 200)):
        (tmp_path / name / "clip").mkdir(parents=True)
        for frame in range(2):
            (tmp_path / name / "clip" / f"{frame}.png").write_bytes(square(value + frame))
        (tmp_path / name / "clips.jsonl").write_text(json.dumps({"video": "clip", "text": name}) + "\n")
    source = opened(VideoFrames(path=str(tmp_path), timestamps=False, **GIVEN), tmp_path / "w")
    assert texts(source) == ["cats", "dogs"] and grays(source) == [10, 11, 200, 201]


def test_names_of_stores_change_only_where_images_may(tmp_path: Path) -> None:
    """Stores that an older Forge prepared are found where their images are the same."""
    for name in ("a", "b"):
        (tmp_path / "far" / name).mkdir(parents=True)
        (tmp_path / "far" / name / "records.jsonl").write_text('{"text": "a"}\n')
    one, both = tmp_path / "far" / "a" / "records.jsonl", tmp_path / "far"

    def key(path: Path, folder: Path | None = None) -> str:
        return ImageJsonl(path=str(path), folder=folder and str(folder)).read().fingerprint

    files = {path: find(str(path), (".jsonl",), "JSON lines") for path in (one, both)}
    assert key(one) == digest_of(files[one], f"jsonl {one.parent}")
    assert key(both, tmp_path) == digest_of(files[both], f"jsonl {tmp_path}")
    assert key(both) not in (digest_of(files[both], f"jsonl {directory}") for directory in (one.parent, both, tmp_path))


def test_images_next_to_a_url_need_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "0.png").write_bytes(square(1))
    for name in ("0.png", str(tmp_path / "0.png")):
        (tmp_path / "records.jsonl").write_text(json.dumps({"image": name, "text": "a"}) + "\n")
        component = ImageJsonl(path=f"file://{tmp_path}/records.jsonl", **GIVEN)
        if name == "0.png":
            with pytest.raises(
                DataError, match=r"the directory of 0\.png is unknown because the records come from a URL; set folder"
            ):
                opened(component, tmp_path / "w")
            component = replace(component, folder=str(tmp_path))
        assert grays(opened(component, tmp_path / "w")) == [1]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(json.dumps({"image": "0.png", "text": "a"}) + "\n")
    for component in (ImageJsonl, VideoFrames, VideoCsv):
        with pytest.raises(DataError, match='folder = "" is not a directory'):
            component(path=str(tmp_path / "records.jsonl"), folder="", **GIVEN).read()


def test_names_are_sorted_with_their_numbers_as_numbers() -> None:
    ordered = [
        "1.png",
        "2.png",
        "02.png",
        "10.png",
        "a1b2.png",
        "a1b10.png",
        "a01b11.png",
        "a10b1.png",
        f"b{'9' * 5000}",
        "b.png",
    ]
    expected = ["1.png", "02.png", "2.png", *ordered[3:]]
    assert sorted(set(ordered), key=natural_key) == expected


def test_trials_b3_frames_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    for number in range(12):
        (tmp_path / "clip" / f"frame_{number + 1}.png").write_bytes(square(20 * number))
    (tmp_path / "clips.jsonl").write_text(json.dumps({"video": "clip", "text": "x"}) + "\n")
    source = opened(VideoFrames(path=str(tmp_path / "clips.jsonl"), frames=12, **GIVEN), tmp_path / "w")
    assert grays(source) == [20 * number for number in range(12)]
    three = opened(VideoFrames(path=str(tmp_path / "clips.jsonl"), frames=3, **GIVEN), tmp_path / "w")
    assert grays(three) == [0, 100, 220], "of 0 to 11 seconds 0, 5.5 and 11; of two that are as near the first"


def test_trials_b3_images_of_a_tar_record_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    members = [(f"r.{number}.png", square(20 * number)) for number in range(11)]
    path = tar(tmp_path / "a.tar", [*members, ("r.txt", b"eleven")])
    assert grays(opened(ImageWebdataset(path=path, **GIVEN), tmp_path / "w")) == [20 * number for number in range(11)]


@pytest.mark.parametrize(
    ("suffix", "kind"), [("avif", "AVIF"), ("jfif", "JPEG"), ("ppm", "PPM"), ("JP2", "JPEG2000"), ("tga", "TGA")]
)
def test_trials_b4_every_image_that_pillow_reads_is_taken(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tar(tmp_path / "a.tar", [(f"0.{suffix}", encoded(kind)), ("0.txt", b"a")])
    source = opened(ImageWebdataset(path=path, **GIVEN), tmp_path / "w")
    assert documents(source)[0][2] == 1 and abs(grays(source)[0] - 40) <= 1
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / f"0.{suffix}").write_bytes(encoded(kind))
    (tmp_path / "clips.jsonl").write_text(json.dumps({"video": "clip", "text": "x"}) + "\n")
    assert abs(grays(opened(VideoFrames(path=str(tmp_path / "clips.jsonl"), **GIVEN), tmp_path / "w"))[0] - 40) <= 1


GOOD = [("9.png", square(90)), ("9.txt", b"good")]
LINK = tarfile.TarInfo("0.png")
LINK.type, LINK.linkname = tarfile.LNKTYPE, "9.png"


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([("0.heic", b"x"), ("0.txt", b"a")], r"record 0 has the member 0\.heic, whose kind 'heic' is unknown"),
        ([("0.png", square(1)), ("0.cls", b"3"), ("0.txt", b"a")], r"0\.cls, whose kind 'cls' is unknown.*ignore"),
        ([("0.jpg", square(1)), ("0.txt", b"one"), ("0.jpg", square(2)), ("0.txt", b"two")], r"record 0 has two members 0\.jpg"),
        ([("0.PNG", square(1)), ("0.txt", b"one"), ("0.png", square(2))], r"has two members 0\.png"),
        ([("0.txt", b"alone")], r"record 0 has no image; set text_records = true"),
        ([("0.png", square(1)), ("0.txt", b"caf\xe9")], r"0\.txt, which is not UTF-8: unexpected end of data at byte 3"),
        ([("0.png", square(1)), ("0.json", b"{")], r"0\.json, which is not valid JSON: Expecting property name"),
        ([("0.png", square(1)), ("0.json", b"[" * 100_000)], "brackets are nested too deeply"),
        ([("0.png", square(1)), ("0.json", b"[1]")], r"0\.json, which is not a JSON object"),
        (
            [("2.0.png", square(1)), ("2.0.txt", b"a"), ("2.1.png", square(1)), ("2.1.txt", b"a")],
            r"2\.0\.txt, but a name is split at",
        ),
        ([("d/README", b"x")], r"record d/README has the member d/README, whose kind '' is unknown"),
        ([("0.png", square(1)), ("0.txt", b"a"), ("0.caption", b"b")], r"has several text members \(txt, caption\)"),
        ([("0.pdf", b"%PDF"), ("0.txt", b"a")], r"0\.pdf, whose kind 'pdf' is unknown"),
        ([("0.png", square(1))], "neither turns in 'messages' nor text in 'text'"),
        ([("0.png", b"not an image"), ("0.txt", b"a")], r"a\.tar, record 0: .*cannot be decoded"),
    ],
)
def test_trials_b4_what_a_shard_means_is_read_or_refused_by_name(
    tmp_path: Path, members: list[tuple[str, bytes]], fault: str
) -> None:
    component = ImageWebdataset(path=tar(tmp_path / "a.tar", [*members, *GOOD]), **GIVEN)
    with pytest.raises(DataError, match=fault):
        opened(component, tmp_path / "w")
    said: list[str] = []
    source = opened(replace(component, skip=1), tmp_path / "w", said=said)
    assert texts(source) == ["good"] and grays(source) == [90], "each fault is one broken record"
    assert "left out 1 broken record" in said[0]


def test_members_that_are_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as content:
        for name, data in [*GOOD, ("0.txt", b"a")]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            content.addfile(member, BytesIO(data))
        content.addfile(LINK)
    with pytest.raises(DataError, match=r"0\.png, which is a link or another special file"):
        opened(ImageWebdataset(path=str(tmp_path / "a.tar"), **GIVEN), tmp_path / "w")


def test_kinds_that_are_named_are_left_out_and_text_is_taken_where_it_is_wanted(tmp_path: Path) -> None:
    members = [("._0.png", b"of a file system"), ("0.png", square(7)), ("0.cls", b"3"), ("0.txt", b"seen"), ("1.txt", b"read")]
    path = tar(tmp_path / "a.tar", members)
    source = opened(ImageWebdataset(path=path, ignore=(".cls",), text_records=True, **GIVEN), tmp_path / "w")
    assert texts(source) == ["seen", "read"] and grays(source) == [7]


def test_an_image_that_a_record_names_is_missing_also_where_text_is_taken(tmp_path: Path) -> None:
    members = [("0.json", json.dumps({"text": "a", "image": "0.png"}).encode()), ("1.json", b'{"text": "b"}')]
    component = ImageWebdataset(path=tar(tmp_path / "a.tar", members), text_records=True, **GIVEN)
    with pytest.raises(DataError, match="record 0 has no image"):
        opened(component, tmp_path / "w")
    assert texts(opened(replace(component, skip=1), tmp_path / "w")) == ["b"]


def test_a_sparse_member_is_not_read_from_its_offset(tmp_path: Path) -> None:
    """Its bytes in the tar are not those of the file: holes are left out."""
    sparse = tarfile.TarInfo("0.png")
    sparse.type, sparse.size = tarfile.GNUTYPE_SPARSE, 0
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as content:
        content.addfile(sparse)
        text = tarfile.TarInfo("0.txt")
        text.size = 1
        content.addfile(text, BytesIO(b"a"))
    with pytest.raises(DataError, match=r"0\.png, which is a link or another special file"):
        opened(ImageWebdataset(path=str(tmp_path / "a.tar"), **GIVEN), tmp_path / "w")


def test_a_directory_is_part_of_the_key(tmp_path: Path) -> None:
    members = [(f"v1.{part}/0.{kind}", data) for part in (0, 1) for kind, data in (("png", square(part)), ("txt", b"%d" % part))]
    source = opened(ImageWebdataset(path=tar(tmp_path / "a.tar", members), **GIVEN), tmp_path / "w")
    assert texts(source) == ["0", "1"] and grays(source) == [0, 1]


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz", "tar.zst"])
def test_trials_h_compressed_shards_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    tar(tmp_path / "a.tar", GOOD)
    tar(tmp_path / f"b.{suffix}", GOOD)
    with pytest.raises(DataError, match=rf"b\.{suffix} is compressed.*decompress it"):
        opened(ImageWebdataset(path=str(tmp_path), **GIVEN), tmp_path / "w")
    assert texts(opened(ImageWebdataset(path=str(tmp_path / "*.tar"), **GIVEN), tmp_path / "w")) == ["good"]


def test_a_frame_that_cannot_be_read_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "0.png").mkdir()
    for name in ("1.png", "2.heic", "notes.txt", ".hidden"):
        (tmp_path / "clip" / name).write_bytes(square(1))
    (tmp_path / "clips.jsonl").write_text(json.dumps({"video": "clip", "text": "x"}) + "\n")
    component = VideoFrames(path=str(tmp_path / "clips.jsonl"), **GIVEN)
    with pytest.raises(DataError, match=r"clip contains 2\.heic, whose suffix Pillow does not support"):
        opened(component, tmp_path / "w")
    (tmp_path / "clip" / "2.heic").unlink()
    assert grays(opened(component, tmp_path / "w")) == [1]


def clip(path: Path, codec: str, frames: int, start: float, begin: float = 0.0, lost: tuple[int, ...] = ()) -> None:
    """A clip whose frame n has the gray 6 n at 10 frames a second, cut at `start` seconds without encoding it again, so that this
    moment is at `begin` seconds, and without the packets `lost`."""
    import av

    whole = path.with_name("whole.mp4")
    with av.open(str(whole), "w") as container:
        stream: Any = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", 12
        stream.options = {"bf": "3", "crf": "1"} if codec == "libx264" else {"bf": "2", "qscale": "1"}
        for number in range(frames):
            image = np.full((48, 64, 3), 6 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(whole)) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        out = target.add_stream_from_template(stream)
        source.seek(int(start / stream.time_base), stream=stream)
        offset = int((start - begin) / stream.time_base)
        for number, packet in enumerate(source.demux(stream)):
            if packet.dts is not None and number not in lost:
                packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, out
                target.mux(packet)


@pytest.mark.parametrize(
    ("codec", "name", "start", "begin", "lost", "shown_frames"),
    [
        ("libx264", "cut.mp4", 0.0, 0.0, (), 40),
        ("libx264", "cut.mp4", 1.7, 0.0, (), 23),
        ("mpeg4", "cut.mkv", 1.7, 0.0, (), 22),
        ("mpeg4", "cut.mkv", 1.7, 0.9, (), 22),
        ("libx264", "cut.mkv", 0.0, 0.0, (0, 1, 2), 28),
        ("mpeg4", "cut.mp4", 0.0, 0.0, (), 40),
    ],
)
def test_trials_b7_frames_are_those_that_a_player_shows(
    tmp_path: Path, codec: str, name: str, start: float, begin: float, lost: tuple[int, ...], shown_frames: int
) -> None:
    """An edit list says which packets are not shown, and frames that need others from before the cut are not. Times and frames
    are those of PyAV's decoder."""
    av = pytest.importorskip("av")
    clip(tmp_path / name, codec, 40, start, begin, lost)
    with av.open(str(tmp_path / name)) as container:
        shown = [(frame.time, float(frame.to_ndarray(format="rgb24").mean())) for frame in container.decode(video=0)]
    assert len(shown) == shown_frames
    (tmp_path / "clips.csv").write_text(f"file,name\n{name},x\n")
    for count in (1, 2, 8, 64):
        examples = VideoExamples(str(tmp_path / "clips.csv"), None, "{file}", "name", "image", count, True)
        ((_, record),) = examples
        assert not isinstance(record, Exception)
        times = [time for time, _ in record["image"].frames]
        images = [np.asarray(Image.open(BytesIO(examples.fetch(reference)))) for _, reference in record["image"].frames]
        nearest = [shown[int(np.abs(np.array([time for time, _ in shown]) - time - shown[0][0]).argmin())] for time in times]
        assert len(times) == min(count, len(shown))
        assert times == pytest.approx([time - shown[0][0] for time, _ in nearest])
        assert [float(image.mean()) for image in images] == pytest.approx([gray for _, gray in nearest])
    middle = shown[(len(shown) - 1) // 2][1]
    alone = opened(VideoCsv(path=str(tmp_path / "clips.csv"), file="{file}", frames=1, **GIVEN), tmp_path / "w")
    assert abs(grays(alone)[0] - middle) <= 3


@pytest.mark.parametrize("count", [1, 8])
def test_a_clip_that_lost_packets_is_refused(tmp_path: Path, count: int) -> None:
    """The decoder shows nothing for some packets that are there, so numbers of packets are not those of frames."""
    pytest.importorskip("av")
    clip(tmp_path / "lost.mkv", "mpeg4", 40, 0.0, lost=(7, 8, 20))
    (tmp_path / "clips.csv").write_text("file,name\nlost.mkv,x\n")
    component = VideoCsv(path=str(tmp_path / "clips.csv"), file="{file}", frames=count, **GIVEN)
    with pytest.raises(DataError, match=r"row 1 \(line 2\): .*lost\.mkv has packets without a frame before"):
        opened(component, tmp_path / "w")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b"a.mp4,a cat, sitting", "has 3 columns, the header 2; quote text with commas"),
        (b"a.mp4", "has 1 columns, the header 2"),
        (b"a.mp4,caf\xe9", "is not UTF-8"),
        (b"gone.mp4,x", r"gone\.mp4 cannot be decoded"),
        (b"sound.wav,x", r"sound\.wav contains no video"),
        (b"a.mp4,", "has no text to train on"),
    ],
)
def test_rows_of_a_table_that_cannot_be_read_are_broken_records(tmp_path: Path, row: bytes, fault: str) -> None:
    pytest.importorskip("av")
    video(tmp_path / "a.mp4", [0, 40])
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    (tmp_path / "clips.csv").write_bytes(b'\xef\xbb\xbffile,name\n\na.mp4,"one,\ntwo"\n' + row + b"\n")
    component = VideoCsv(path=str(tmp_path / "clips.csv"), file="{file}", timestamps=False, **GIVEN)
    with pytest.raises(DataError, match=rf"clips\.csv, row 2 \(line 5\):? {fault}"):
        opened(component, tmp_path / "w")
    assert texts(opened(replace(component, skip=1), tmp_path / "w")) == ["one,\ntwo"]


def test_packets_without_a_frame_that_is_shown_are_not_counted(tmp_path: Path) -> None:
    """Frames of VP8 may be there only to be referred to: a bit of their head says so, which is cleared here in one packet."""
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "all.webm"), "w") as container:
        stream: Any = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(12):
            image = np.full((48, 64, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(tmp_path / "all.webm")) as source, av.open(str(tmp_path / "a.webm"), "w") as target:
        out = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            data = bytearray(bytes(packet))
            data[0] &= 0xFF if number != 5 else ~0x10 & 0xFF
            copy = av.Packet(bytes(data))
            copy.pts, copy.dts, copy.time_base, copy.stream = packet.pts, packet.dts, packet.time_base, out
            copy.is_keyframe = packet.is_keyframe
            target.mux(copy)
    (tmp_path / "clips.csv").write_text("file,name\na.webm,x\n")
    examples = VideoExamples(str(tmp_path / "clips.csv"), None, "{file}", "name", "image", 64, True)
    ((_, record),) = examples
    assert not isinstance(record, Exception)
    times = [round(time, 1) for time, _ in record["image"].frames]
    assert times == [number / 10 for number in range(12) if number != 5]
    shown = [np.asarray(Image.open(BytesIO(examples.fetch(reference)))).mean() for _, reference in record["image"].frames]
    assert np.abs(np.array(shown) - [20 * number for number in range(12) if number != 5]).max() < 12


@pytest.mark.parametrize("kind", [ImageJsonl, VideoFrames, VideoCsv])
def test_which_files_of_images_are_missing_is_known_without_reading_them(tmp_path: Path, kind: Any) -> None:
    source = opened(next(iter(kind.examples(tmp_path))), tmp_path / "w")
    names = {source.reference(image) for image in range(len(source._ends))}
    assert len(names) > 1 and source.missing() == []
    first = min(file for file in tmp_path.rglob("*") if file.suffix in (".png", ".jpg", ".mp4") and "w" not in file.parts)
    first.unlink()
    gone = source.missing()
    assert sorted(gone) == sorted(name for name in names if str(first).endswith(f"/{Path(name.partition('#')[0])}"))
    assert 0 < len(gone) < len(names)
    with pytest.raises(DataError, match=first.name):
        source._fetch(gone[0])


def test_a_missing_shard_is_other_data(tmp_path: Path) -> None:
    """Records of a tar are its images: without it there are others, so a store has nothing to look for."""
    component = next(iter(ImageWebdataset.examples(tmp_path)))
    before = opened(component, tmp_path / "w")
    min(tmp_path.rglob("*.tar")).unlink()
    assert opened(component, tmp_path / "w").path != before.path
