"""Prepared stores of documents with images: what is in them, by hand; and what is broken, missing, or changed since."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, SourceWithItems
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_vlm.components.encoders import Features, ViT
from forge_vlm.components.model import VLM
from forge_vlm.components.sources import Digits, ImageDataset, ImageJsonl, ImageSource, ImageWebdataset
from forge_vlm.data import example_images
from forge_vlm.images.tiling import Tiling

EOS, HOLE = 256, 300
GIVEN: dict[str, Any] = {"placeholder": HOLE, "per_image": 2, "size": 8}


def opened(component: Any, workspace: Path, model: Any = None, said: list[str] | None = None, length: int = 1024) -> Any:
    context = SourceContext(workspace, ByteTokenizer(), length, (said if said is not None else []).append, model=model)
    return component.build(context)


def documents(source: Any) -> list[tuple[list[int], list[bool], int]]:
    """(ids, learned, images) of each document."""
    found, start = [], 0
    for end in source.ends().tolist():
        images = np.diff(source.items_before(np.array([start, end])))
        found.append((source.read(start, end).tolist(), source.learned(start, end).tolist(), int(images[0])))
        start = end
    return found


def written(folder: Path, records: list[dict[str, Any]]) -> str:
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / "records.jsonl")


def square(value: int, side: int = 8) -> bytes:
    """A PNG of one color."""
    content = BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(content, "PNG")
    return content.getvalue()


def test_documents_are_bytes_placeholders_and_ends(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(square(number))
    talk = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "yes"}]
    records = [
        {"text": "ab<image>c", "image": "0.png"},
        {"text": "only text"},
        {"messages": talk, "image": ["1.png"]},
        {"text": "d", "image": ["2.png", "0.png"]},
    ]
    source = opened(ImageJsonl(path=written(tmp_path, records), **GIVEN), tmp_path / "w")
    hole = [HOLE, HOLE]
    assert isinstance(source, SourceWithItems)
    assert [(ids, images) for ids, _, images in documents(source)] == [
        ([*b"ab", *hole, *b"c", EOS], 1),
        ([*b"only text", EOS], 0),
        ([*b"User: ", *hole, *b"?\nAssistant:", *b" yes\n", EOS], 1),
        ([*hole, *hole, *b"d", EOS], 2),
    ]
    marks = ["".join(".x"[learned] for learned in each) for _, each, _ in documents(source)]
    assert marks == ["xx..xx", "x" * 10, "." * 8 + "." * 12 + "x" * 6, "....xx"]
    items = source.load(0, 4)
    assert items.shape == (4, 3, 8, 8)
    assert [round(float(item.mean() * 127.5 + 127.5), 3) for item in items] == [0, 1, 2, 0], "pixels between -1 and 1"
    learned = np.concatenate([np.array(ids)[each] for ids, each, _ in documents(source)])
    assert np.array_equal(source.counts(), np.bincount(learned))


@pytest.mark.parametrize("component", [ImageJsonl, ImageWebdataset, ImageDataset])
def test_formats_hold_the_same_pictures(tmp_path: Path, component: Any) -> None:
    (example,) = component.examples(tmp_path)
    source = opened(replace(example, size=6), tmp_path / "w")
    texts = [bytes(token for token in ids if token < EOS).decode() for ids, _, _ in documents(source)]
    with_image = [(text, images) for text, (_, _, images) in zip(texts, documents(source), strict=True) if images == 1]
    for text, _ in with_image:
        number = int(text.removeprefix("see "))
        index = next(place for place, found in enumerate(texts) if found == text)
        begin = int(source.items_before(source.ends()[index - 1 : index].astype(np.int64))[0]) if index else 0
        picture = Image.open(BytesIO(example_images.picture(number))).resize((6, 6), Image.Resampling.BICUBIC)
        wanted = np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1
        assert np.abs(source.load(begin, begin + 1)[0] - wanted).max() < 1e-6
    assert len(with_image) >= example_images.COUNT // 2
    assert len(texts) == example_images.COUNT


def test_digits_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    source = opened(Digits(each=2, **GIVEN), tmp_path)
    found = documents(source)
    assert len(found) == len(data.target) // 2
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for number in (0, 7, 500):
        one, two = data.target[2 * number], data.target[2 * number + 1]
        ids, _, images = found[number]
        assert images == 2 and bytes(ids[4:-1]).decode() == f"{names[one]} {names[two]}"
    ink = data.images[11] / 16
    assert np.abs((1 - source.load(11, 12)[0][0]) / 2 - ink).max() < 1 / 255


def test_splits_part_the_records(tmp_path: Path) -> None:
    whole, train, held_out = (
        documents(opened(Digits(split=split, held_out=0.3, **GIVEN), tmp_path)) for split in ("all", "train", "held_out")
    )
    assert len(whole) == len(train) + len(held_out) and 0.25 < len(held_out) / len(whole) < 0.35


def test_a_tile_is_an_image_to_the_model(tmp_path: Path) -> None:
    wide = Image.new("RGB", (16, 8))
    wide.paste((255, 255, 255), (8, 0, 16, 8))
    wide.save(tmp_path / "wide.png")
    path = written(tmp_path, [{"text": "a", "image": "wide.png"}, {"text": "b", "image": "wide.png"}])
    source = opened(ImageJsonl(path=path, tiling=Tiling(name="anyres", grids=((1, 2),)), **GIVEN), tmp_path / "w")
    assert documents(source)[0][0] == [HOLE] * 6 + [ord("a"), EOS] and documents(source)[0][2] == 3
    assert source.items_before(np.arange(17)).tolist() == [0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6]
    items = source.load(0, 6)
    assert items[1].max() == items[4].max() == -1 and items[2].min() == items[5].min() == 1, "left is black, right is white"
    assert np.array_equal(source.load(2, 5), items[2:5])
    shown = Image.open(BytesIO(source.picture(5)))
    assert shown.size == (8, 8) and shown.getpixel((0, 0)) == (255, 255, 255)


def test_broken_records_are_named_counted_and_budgeted(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(square(1))
    (tmp_path / "torn.png").write_bytes(example_images.picture(3)[:-30])
    (tmp_path / "text.png").write_text("not an image")
    records = [
        {"text": "a", "image": "good.png"},
        {"text": "b", "image": "torn.png"},
        {"text": "c", "image": "gone.png"},
        {"text": "d", "image": "text.png"},
        {"text": "e", "image": "good.png"},
    ]
    path = written(tmp_path, records)
    component = ImageJsonl(path=path, **GIVEN)
    with pytest.raises(DataError, match=r"records\.jsonl at byte 35 \(line 2\): torn\.png: the image cannot be decoded"):
        opened(component, tmp_path / "w")
    with pytest.raises(DataError, match=r"text\.png.*broken record 3, and `skip` allows 2"):
        opened(replace(component, skip=2), tmp_path / "w")
    assert not list((tmp_path / "w").glob("stores/*")), "nothing is left of it"
    said: list[str] = []
    source = opened(replace(component, skip=3), tmp_path / "w", said=said)
    assert [bytes(ids[2:-1]) for ids, _, _ in documents(source)] == [b"a", b"e"]
    assert (
        "left out 3 broken records; the first: " in said[0]
        and "records.jsonl at byte 35 (line 2)" in said[0]
        and "torn.png" in said[0]
    )
    with pytest.raises(DataError, match=r"3 records of .* are broken, but skip allows 0"):
        opened(component, tmp_path / "w")


def test_an_image_that_changed_or_is_gone_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square(1))
    source = opened(ImageJsonl(path=written(tmp_path, [{"text": "a", "image": "a.png"}]), **GIVEN), tmp_path / "w")
    (tmp_path / "a.png").write_bytes(square(2))
    with pytest.raises(DataError, match=r"a\.png has changed since it was prepared; restore it, or remove"):
        source.load(0, 1)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read: No such file"):
        source.load(0, 1)


def test_a_moved_folder_is_the_same_data(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        example_images.jsonl(tmp_path / name)
    one, two = (opened(ImageJsonl(path=str(tmp_path / n / "records.jsonl"), **GIVEN), tmp_path / "w") for n in ("one", "two"))
    assert one.fingerprint == two.fingerprint and one.path != two.path


@pytest.mark.parametrize(
    "change",
    [
        *({"placeholder": 301}, {"per_image": 3}, {"size": 4}, {"template": "chatml"}, {"split": "train"}),
        {"tiling": Tiling(name="anyres")},
    ],
)
def test_what_changes_the_tokens_is_prepared_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    example_images.jsonl(tmp_path)
    component = ImageJsonl(path=str(tmp_path / "records.jsonl"), held_out=0.5, **GIVEN)
    one, two = opened(component, tmp_path / "w"), opened(replace(component, **change), tmp_path / "w")
    assert one.path != two.path
    assert opened(component, tmp_path / "w").path == one.path


def test_text_that_spells_the_placeholder_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square(1))
    path = written(tmp_path, [{"text": "xyz", "image": "a.png"}])
    with pytest.raises(DataError, match=f"encodes as id {ord('y')}, the placeholder of images"):
        opened(ImageJsonl(path=path, placeholder=ord("y"), per_image=2, size=8), tmp_path / "w")


@pytest.mark.parametrize("name", ["learned.bin", "places.bin", "digests.bin", "images.json", "tokens/shard-00000.bin"])
def test_a_damaged_store_is_refused(tmp_path: Path, name: str) -> None:
    (example,) = ImageJsonl.examples(tmp_path)
    path = opened(example, tmp_path / "w").path
    file = path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"remove|write the store again"):
        opened(example, tmp_path / "w")


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    (example,) = ImageJsonl.examples(tmp_path)
    file = opened(example, tmp_path / "w").path / "images.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match="has format version 2, but this Forge reads 1"):
        opened(example, tmp_path / "w")


def model(**keys: Any) -> VLM:
    small = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn_dim": 16, "vocab_size": 260, "max_length": 64}
    return VLM(**(small | {"encoder": ViT(size=8, patch=4, channels=1, dim=8, layers=1, heads=2)} | keys))


def test_the_model_says_what_an_image_becomes(tmp_path: Path) -> None:
    source = opened(Digits(), tmp_path, model())
    ids, _, _ = documents(source)[0]
    assert ids == [259] * 4 + [*b"zero", EOS] and source.item_shape == (1, 8, 8) and source.vocab_size == 260
    other = opened(Digits(), tmp_path, model(image_token=258))
    assert documents(other)[0][0][:4] == [258] * 4 and other.fingerprint != source.fingerprint


@pytest.mark.parametrize(
    ("component", "made", "fault"),
    [
        (Digits(), None, "the recipe's model does not support images; set model.name = 'vlm'"),
        (Digits(placeholder=HOLE, per_image=2), None, "the recipe's model does not support images"),
        (Digits(per_image=3), model(), "sets 3 placeholders with id 259 per image, but the model expects 4 with id 259"),
        (Digits(placeholder=5), model(), "4 placeholders with id 5 per image, but the model expects 4 with id 259"),
        (Digits(size=16), model(), "has size 16, but the model's encoder 8"),
        (Digits(), model(encoder=Features(count=4, dim=8)), "the model's encoder expects precomputed features"),
        (Digits(), model(images="tokens", modalities={"image": (250, 260)}), "the model expects image tokens"),
        (ImageJsonl(path="nowhere.jsonl", **GIVEN), None, "nowhere.jsonl"),
        (ImageWebdataset(path="nowhere", **GIVEN), None, "nowhere"),
        (Digits(template="nothing", **GIVEN), None, "cannot be read: give one of"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, component: ImageSource, made: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        opened(component, tmp_path, made)


def test_shards_that_are_no_tar_or_end_early_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DataError, match=r"bad\.tar is damaged, or not an uncompressed tar file"):
        opened(ImageWebdataset(path=str(tmp_path / "bad.tar"), **GIVEN), tmp_path / "w")
    (tmp_path / "bad.tar").unlink()
    example_images.shards(tmp_path)
    source = opened(ImageWebdataset(path=str(tmp_path), **GIVEN), tmp_path / "w")
    shard = tmp_path / "1.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(DataError, match=r"1\.tar"):
        source.load(0, 24)


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = example_images.dataset(tmp_path)
    with pytest.raises(DataError, match="has no column 'picture'; it has image, text"):
        opened(ImageDataset(path=path, images="picture", **GIVEN), tmp_path / "w")


def test_a_tokenizer_can_be_trained_on_the_text(tmp_path: Path) -> None:
    (example,) = ImageJsonl.examples(tmp_path)
    texts = example.texts()
    wanted = [str(record["text"]).replace("<image>", "") for record in example_images.records()]
    assert [text for _, text in texts] == wanted and texts.fingerprint == example.texts().fingerprint


def test_trials_a9_half_a_character_and_a_nul_are_faults_of_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(square(7))
    broken = [{"text": "\ud83d"}, {"text": "x", "image": "a\0.png"}, {"text": "x", "image": "\udc00.png"}]
    path = written(tmp_path, [{"text": "ok", "image": "a.png"}, *broken, {"text": "nul \0"}])
    source = opened(ImageJsonl(path=path, skip=3, **GIVEN), tmp_path / "w", said=(said := []))
    assert [ids for ids, _, _ in documents(source)] == [[HOLE, HOLE, *b"ok", EOS], [*b"nul \0", EOS]]
    assert all(any(f"line {line})" in message for message in said) for line in (2, 3, 4))
    with pytest.raises(DataError, match=r"line 2\): has text that holds the lone surrogate U\+D83D at character 0"):
        opened(ImageJsonl(path=path, **GIVEN), tmp_path / "v")
