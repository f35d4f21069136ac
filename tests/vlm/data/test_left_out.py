"""Records that are left out are named, `skip` covers every fault; documents longer than a row are refused, left out or cut."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import DataError
from forge_data.sources import records
from forge_vlm.components.sources import ImageJsonl, ImageSource, VideoFrames
from forge_vlm.data import prepare
from forge_vlm.data.inputs import ImageInputs
from forge_vlm.images.processing import Native, Processing
from forge_vlm.images.tiling import Tiling
from vlm.data.test_image_readers import texts
from vlm.data.test_stores import EOS, GIVEN, HOLE, documents, opened, square, written
from vlm.data.test_video_readers import grays


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the images that were decoded while a store is prepared."""
    names: list[str] = []
    decode = prepare.decode

    def noted(content: bytes, channels: int, name: str) -> Any:
        names.append(name)
        return decode(content, channels, name)

    monkeypatch.setattr(prepare, "decode", noted)
    return names


def twenty(folder: Path) -> ImageJsonl:
    """Twenty documents of 13 tokens, of which number 13 has 205: two of its image, 202 letters, and its end."""
    for number in range(20):
        (folder / f"{number}.png").write_bytes(square(number))
    lines = [{"image": f"{number}.png", "text": "x" * (202 if number == 13 else 10)} for number in range(20)]
    return ImageJsonl(path=written(folder, lines), **GIVEN)


def test_trials_b8_a_document_that_is_too_long_is_named_before_any_image_is_decoded(tmp_path: Path, decoded: list[str]) -> None:
    component = twenty(tmp_path)
    with pytest.raises(DataError) as refused:
        opened(component, tmp_path / "w", length=204)
    start = sum(len(line) + 1 for line in (tmp_path / "records.jsonl").read_text().splitlines()[:13])
    where = f"{tmp_path / 'records.jsonl'} at byte {start} (line 14)"
    assert str(refused.value).startswith(f"{where}: has 205 tokens, images included, and a row has 204; shorten it, raise data.")
    assert "too_long = 'skip' or 'truncate'" in str(refused.value)
    assert decoded == []
    assert opened(component, tmp_path / "w", length=205).facts.images == 20, "it fits exactly"


@pytest.mark.parametrize("change", [{"skip": 1}, {"too_long": "skip"}])
def test_trials_b8_documents_that_are_too_long_may_be_left_out(
    tmp_path: Path, change: dict[str, Any], decoded: list[str]
) -> None:
    said: list[str] = []
    source = opened(replace(twenty(tmp_path), **change), tmp_path / "w", said=said, length=64)
    assert texts(source) == ["x" * 10] * 19 and grays(source) == [number for number in range(20) if number != 13]
    assert "13.png" not in decoded, "an image of a document that is left out is not decoded"
    assert "records.jsonl at byte" in said[0] and "(line 14): has 205 tokens" in said[0]
    assert source.facts.skipped == ("skip" in change), "only one of the two counts for the number of broken records"


def test_trials_b8_skip_allows_so_many_documents_that_are_too_long(tmp_path: Path, decoded: list[str]) -> None:
    lines = [{"text": "x" * (100 if number in (3, 5) else 10)} for number in range(8)]
    component = ImageJsonl(path=written(tmp_path, lines), **GIVEN)
    with pytest.raises(
        DataError, match=r"(?s)\(line 6\): .*broken record 2, and `skip` allows 1.*before it: .*\(line 4\): has 101"
    ):
        opened(replace(component, skip=1), tmp_path / "w", length=64)
    assert len(texts(opened(replace(component, skip=2), tmp_path / "w", length=64))) == 6


def test_trials_b8_documents_that_are_too_long_may_be_cut_but_no_image_in_half(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(square(number))
    lines = [
        {"image": ["0.png", "1.png", "2.png"], "text": "ab<image>c<image><image>def"},  # 2 + 2 + 1 + 2 + 2 + 3 + 1 tokens
        {"image": "2.png", "text": "ab<image>"},
    ]
    component = ImageJsonl(path=written(tmp_path, lines), too_long="truncate", **GIVEN)
    whole = [*b"ab", HOLE, HOLE, ord("c"), *[HOLE] * 4, *b"def", EOS]
    kept = {13: 13, 12: 12, 10: 10, 9: 9, 8: 7, 7: 7, 6: 5, 5: 5, 4: 4, 3: 2, 2: 2}
    for length, count in kept.items():
        found = documents(opened(component, tmp_path / "w", length=length))
        assert found[0][0] == whole[:count] and found[0][2] == whole[:count].count(HOLE) // 2
        assert found[1][0] == [*b"ab", HOLE, HOLE, EOS][: length if length != 3 else 2]
        assert [len(ids) == len(learned) for ids, learned, _ in found] == [True, True]
    source = opened(component, tmp_path / "w", length=8)
    assert grays(source) == [0, 1, 2] and source.facts.too_long == 1
    pad = opened(component, tmp_path / "w", length=3)
    assert pad.facts.images == 0 and pad.items_before(np.array([pad.tokens])).tolist() == [0]


def test_a_cut_document_has_something_to_learn(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a long question"}, {"role": "assistant", "content": "yes"}]
    path = written(tmp_path, [{"messages": talk}, {"text": "abc"}])
    component = ImageJsonl(path=path, too_long="truncate", **GIVEN)
    with pytest.raises(DataError, match=r"\(line 1\): has no text to train on in its first 20 tokens"):
        opened(component, tmp_path / "w", length=20)
    assert texts(opened(replace(component, skip=1), tmp_path / "w", length=20)) == ["abc"]


def test_tiles_of_one_image_are_cut_together(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(square(1))
    path = written(tmp_path, [{"image": "0.png", "text": "abcdef<image>gh"}])
    component = ImageJsonl(path=path, tiling=Tiling(name="anyres", grids=((1, 1), (2, 2))), too_long="truncate", **GIVEN)
    tiles = opened(component, tmp_path / "w").facts.tiles
    source = opened(component, tmp_path / "w", length=6 + 2 * tiles - 1)
    assert documents(source) == [([*b"abcdef"], [True] * 6, 0)] and tiles > 1
    error = replace(component, too_long="error")
    with pytest.raises(DataError, match=r"has at least 11 tokens, images included, and a row has 10"):
        opened(error, tmp_path / "w", length=10)
    with pytest.raises(DataError, match=rf"has {9 + 2 * tiles} tokens, images included, and a row has 11"):
        opened(error, tmp_path / "w", length=11)


def test_a_store_is_prepared_anew_only_where_rows_change_it(tmp_path: Path) -> None:
    component = twenty(tmp_path)
    long = opened(component, tmp_path / "w", length=1024)
    assert opened(component, tmp_path / "w", length=205).path == long.path
    with pytest.raises(DataError, match="has 205 tokens"):
        opened(component, tmp_path / "w", length=100)
    short, cut = (opened(replace(component, too_long=kind), tmp_path / "w", length=100) for kind in ("skip", "truncate"))
    assert [store.documents for store in (long, short, cut)] == [20, 19, 20]
    assert len({long.fingerprint, short.fingerprint, cut.fingerprint}) == 3
    assert opened(replace(component, too_long="skip"), tmp_path / "w", length=1024).path == long.path
    facts = json.loads((long.path / "images.json").read_text())
    del facts["longest"], facts["too_long"]  # as an older Forge wrote it
    (long.path / "images.json").write_text(json.dumps(facts))
    again = opened(component, tmp_path / "w", length=205)
    assert again.path == long.path and again.fingerprint == long.fingerprint and again.longest == 205
    with pytest.raises(DataError, match="has 205 tokens"):
        opened(component, tmp_path / "w", length=100)


BROKEN = [
    (b'{"text": half', r"is not valid JSON: Expecting value at column 10"),
    (b'{"text": "caf\xe9"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xe9"),
    (b'["a"]', "is not a JSON object"),
    (b"[" * 100_000, "is not valid JSON: brackets are nested too deeply"),
]


@pytest.mark.parametrize(("line", "fault"), BROKEN)
@pytest.mark.parametrize("component", [ImageJsonl, VideoFrames])
def test_trials_b8_skip_covers_lines_that_are_no_records(
    tmp_path: Path, component: type[ImageSource], line: bytes, fault: str
) -> None:
    (tmp_path / "records.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    chosen: Any = component
    source = chosen(path=str(tmp_path / "records.jsonl"), **GIVEN)
    with pytest.raises(DataError, match=rf"records\.jsonl at byte 17 \(line 3\) {fault}"):
        opened(source, tmp_path / "w")
    assert texts(opened(replace(source, skip=1), tmp_path / "w")) == ["one", "two"]
    assert [text for _, text in source.texts()] == ["one", "two"], "a tokenizer is trained on the others"


def test_elements_of_a_list_that_are_no_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_bytes(b'\xef\xbb\xbf[{"text": "one"}, 7, {"text": "two"}]')
    source = ImageJsonl(path=str(tmp_path / "list.json"), **GIVEN)
    with pytest.raises(DataError, match=r"list\.json, record 2 is not a JSON object"):
        opened(source, tmp_path / "w")
    assert texts(opened(replace(source, skip=1), tmp_path / "w")) == ["one", "two"]


def test_trials_h_each_record_that_is_left_out_is_named(tmp_path: Path) -> None:
    """The first ones in messages, all in a file next to the store."""
    (tmp_path / "good.png").write_bytes(square(1))
    lines = [{"image": "good.png" if number % 2 else f"gone-{number}.png", "text": str(number)} for number in range(40)]
    said: list[str] = []
    source = opened(ImageJsonl(path=written(tmp_path, lines), skip=20, **GIVEN), tmp_path / "w", said=said)
    file = source.path.with_name(f"{source.path.name}.skipped.txt")
    named = file.read_text().splitlines()
    assert [line.split("gone-")[1].split(".png")[0] for line in named] == [str(number) for number in range(0, 40, 2)]
    assert all(f"(line {number + 1}): " in line for number, line in zip(range(0, 40, 2), named, strict=True))
    assert said[0] == f"left out 20 broken records; the first: {named[0]}"
    assert said[1:10] == [f"left out {line}" for line in named[1:10]]
    assert said[10] == f"{file} lists everything that was left out"
    with pytest.raises(
        DataError, match=rf"20 records of .* are broken, but skip allows 19; fix the records listed in {file}, or raise skip"
    ):
        opened(ImageJsonl(path=str(tmp_path / "records.jsonl"), skip=19, **GIVEN), tmp_path / "w")


@pytest.mark.parametrize(("native", "fewest"), [(None, 4), (Native(16, 20, each=True), 1), (Native(16, 20, each=False), 4)])
def test_no_image_has_fewer_placeholders_than_the_fewest(native: Native | None, fewest: int) -> None:
    """Else a document that fits would be refused before its images are looked at."""
    half = (0.5, 0.5, 0.5)
    inputs = ImageInputs(300, 4, Processing(size=8, mean=half, std=half), 3, Tiling(), native)
    found = [sum(inputs.placeholders(width, height)) for width, height in ((3, 3), (1, 15), (400, 300))]
    assert inputs.fewest == fewest <= min(found) and inputs.varies == (len({*found}) > 1)


def test_the_longest_document_of_an_older_store_may_be_its_first(tmp_path: Path) -> None:
    source = opened(ImageJsonl(path=written(tmp_path, [{"text": "x" * 30}, {"text": "y"}]), **GIVEN), tmp_path / "w")
    facts = json.loads((source.path / "images.json").read_text())
    del facts["longest"]
    (source.path / "images.json").write_text(json.dumps(facts))
    assert opened(ImageJsonl(path=str(tmp_path / "records.jsonl"), **GIVEN), tmp_path / "w").longest == 31


def test_the_file_of_names_is_bounded_and_takes_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LISTED", 3)
    skips = records.Skips(budget=10)
    for number in range(6):
        skips.broken(f"record {number}: half of a pair \ud83d\nand a second line")
    assert skips.count == 6 and len(skips.messages) == 3
    records.name_skipped("6 broken records", skips.messages, tmp_path / "store", lambda _: None)
    named = (tmp_path / "store.skipped.txt").read_text().splitlines()
    assert named == [f"record {number}: half of a pair ? and a second line" for number in range(3)]
