"""Batches with images: every label is the next token of its document, and every image is that of its placeholders."""

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.checks import packing_keeps_documents
from forge_data.components import Bytes, TextFiles
from forge_data.loading.evaluation import Question, evaluation, inputs_of, questions
from forge_data.loading.stream import open_stream
from forge_data.packing.plan import planned
from forge_data.section import Data
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_vlm.components.sources import ImageJsonl

EOS, HOLE, EACH = 256, 300, 2
LENGTH = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents; document n says n and shows images whose gray tells n and their place in it; every fifth is text."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = []
    for number in range(60):
        count = 0 if number % 5 == 4 else 1 + number % 3
        names = [f"{number}-{place}.png" for place in range(count)]
        for place, name in enumerate(names):
            Image.new("RGB", (5, 7), (number, place, 0)).save(folder / name)
        text = f"{number:02d}" if number % 2 else f"<image>{number:02d}" + "<image>" * (count - 1)
        text = text if count else f"{number:02d} text"
        lines.append(json.dumps({"text": text, "image": names}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "plain.txt").write_text("words of a text without images, " * 20)
    return folder


def source(corpus: Path, **more: Any) -> ImageJsonl:
    return ImageJsonl(path=str(corpus / "records.jsonl"), placeholder=HOLE, per_image=EACH, size=4, **more)


def data(*sources: Any, **more: Any) -> Data:
    chosen: dict[str, Any] = {"sequence_length": LENGTH, "packing": "best_fit", "tokenizer": Bytes()}
    return Data(**(chosen | {"sources": list(sources)} | more))


def steps(chosen: Data, workspace: Path, count: int, begin: Any = None, **more: Any) -> Iterator[tuple[list[Batch], Any]]:
    sizes: dict[str, Any] = {"global_batch": 8, "micro_batch": 4, "seed": 3}
    stream = open_stream(chosen, workspace=workspace, **(sizes | more))
    return islice(stream.from_cursor(begin or stream.start()), count)


def color(image: Any) -> tuple[int, int]:
    """(document, place in it) by the color of an image."""
    red, green = ((image[channel] * 0.5 + 0.5) * 255 for channel in (0, 1))
    assert float(red.std()) < 1e-3 and float(green.std()) < 1e-3
    return round(float(red.mean())), round(float(green.mean()))


def audit(batch: Batch) -> list[tuple[int, int]]:
    """Looks at every place of a batch; returns (document, images) of each whole document in it."""
    found = []
    assert batch.documents is not None and batch.positions is not None
    rows = batch.extras.get("image_rows")
    for row in range(len(batch.tokens)):
        tokens, labels, documents = (each[row].tolist() for each in (batch.tokens, batch.labels, batch.documents))
        held = [] if rows is None else [number for number in rows[row].tolist() if number >= 0]
        assert tokens.count(HOLE) == EACH * len(held)
        taken = 0
        for document in sorted({*documents} - {PADDING}):
            places = [place for place, number in enumerate(documents) if number == document]
            ids = [tokens[place] for place in places]
            assert ids[-1] == EOS and batch.positions[row, places].tolist() == list(range(len(places)))
            wanted = [*ids[1:], None]
            for place, after in zip(places, wanted, strict=True):
                assert labels[place] == (IGNORE if after in (None, HOLE) else after), "a label is the next token that is learned"
            images = ids.count(HOLE) // EACH
            said = int(bytes(token for token in ids if token < EOS)[:2])
            for place in range(images):
                assert color(batch.extras["images"][held[taken]]) == (said, place), "an image stands where its document is"
                taken += 1
            found.append((said, images))
        assert taken == len(held)
        padding = [place for place, number in enumerate(documents) if number == PADDING]
        assert all(labels[place] == IGNORE for place in padding)
    return found


def test_every_label_and_image_of_an_epoch(corpus: Path, tmp_path: Path) -> None:
    """T9 and T11: over an epoch each document comes once, whole, with its images in their order."""
    chosen = data(source(corpus), epochs=1)
    seen = [
        pair for batches, _ in steps(chosen, tmp_path, 100, global_batch=1, micro_batch=1) for b in batches for pair in audit(b)
    ]
    assert sorted(seen) == [(number, 0 if number % 5 == 4 else 1 + number % 3) for number in range(60)]


def test_a_batch_without_images_has_no_extras(corpus: Path, tmp_path: Path) -> None:
    chosen = data(source(corpus), packing="pad", shuffle="none")
    found = [batch for batches, _ in steps(chosen, tmp_path, 8, global_batch=1, micro_batch=1) for batch in batches]
    assert [bool(batch.extras) for batch in found] == [True] * 4 + [False] + [True] * 3
    assert [tuple(batch.extras["image_rows"].shape) for batch in found if batch.extras][:3] == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("more", [{"loader_workers": 2}, {"loader_workers": 1, "workers": 1}, {"workers": 4}])
def test_workers_change_nothing(corpus: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    plain, other = (list(steps(data(source(corpus), **each), tmp_path, 5)) for each in ({}, more))
    for (one, _), (two, _) in zip(plain, other, strict=True):
        for a, b in zip(one, two, strict=True):
            audit(b)
            assert a.tokens.equal(b.tokens) and a.labels.equal(b.labels)
            assert {name: value.tolist() for name, value in a.extras.items()} == {n: v.tolist() for n, v in b.extras.items()}


def test_ranks_share_a_step_and_a_cursor_goes_on(corpus: Path, tmp_path: Path) -> None:
    def images(found: list[tuple[list[Batch], Any]]) -> list[list[tuple[int, int]]]:
        return [sorted(color(i) for b in batches for i in b.extras.get("images", ())) for batches, _ in found]

    alone = list(steps(data(source(corpus)), tmp_path, 4))
    both = [list(steps(data(source(corpus)), tmp_path, 4, rank=rank, ranks=2)) for rank in range(2)]
    for step in range(4):
        together = [number for part in both for batch in part[step][0] for number in batch.tokens.tolist()]
        assert together == [number for batch in alone[step][0] for number in batch.tokens.tolist()]
        assert sorted(a + b for a, b in zip(*(images(part) for part in both), strict=True))
        assert sorted(images(both[0])[step] + images(both[1])[step]) == images(alone)[step]
    cursor = json.loads(json.dumps(alone[1][1]))
    rest = list(steps(data(source(corpus)), tmp_path, 2, begin=cursor))
    assert images(rest) == images(alone)[2:]


def test_text_is_mixed_in_by_weight(corpus: Path, tmp_path: Path) -> None:
    chosen = data(source(corpus, label="seen"), TextFiles(path=str(corpus / "plain.txt"), label="read"))
    batches = [batch for found, _ in steps(chosen, tmp_path, 6, micro_batch=2) for batch in found]
    origins = [name for batch in batches if batch.sources for name in batch.sources.rows.tolist()]
    assert sorted({*origins}) == [0, 1] and abs(origins.count(0) - origins.count(1)) <= 1
    for batch in batches:
        held = batch.extras.get("image_rows")
        assert batch.sources is not None
        for row, origin in enumerate(batch.sources.rows.tolist()):
            count = 0 if held is None else int((held[row] >= 0).sum())
            assert int((batch.tokens[row] == HOLE).sum()) == EACH * count and (origin == 0 or count == 0)


def test_a_row_has_no_more_images_than_it_may(corpus: Path, tmp_path: Path) -> None:
    def most(**more: Any) -> tuple[int, int]:
        chosen = data(source(corpus), epochs=1, **more)
        rows = [b for found, _ in steps(chosen, tmp_path, 100, global_batch=1, micro_batch=1) for b in found]
        for batch in rows:
            audit(batch)
        return max(batch.extras["image_rows"].shape[1] for batch in rows if batch.extras), len(rows)

    (unbounded, few), (bounded, many) = most(), most(items_per_row=3)
    assert unbounded > 3 == bounded and many > few
    for limit in (4, 5, 7):  # some divide the length of a row, some do not
        assert most(items_per_row=limit)[0] <= limit
    with pytest.raises(DataError, match=r"has 3 items, more than data\.items_per_row = 2; raise it"):
        list(steps(data(source(corpus), items_per_row=2), tmp_path, 1))


def test_images_that_take_few_tokens_are_counted_too(tmp_path: Path) -> None:
    """Eight documents of three tokens fit a row of 24, and seven images may be in it."""
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    (tmp_path / "records.jsonl").write_text('{"text": "a", "image": "0.png"}\n' * 40)
    chosen = data(replace(source(tmp_path), per_image=1), epochs=1, items_per_row=7)
    found = [batch for batches, _ in steps(chosen, tmp_path, 100, global_batch=1, micro_batch=1) for batch in batches]
    counts = [int((batch.extras["image_rows"] >= 0).sum()) for batch in found]
    assert sum(counts) == 40 and 5 <= max(counts) <= 7


def test_documents_are_never_cut(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="packing = 'concatenate' would cut them"):
        list(steps(data(source(corpus), packing="concatenate"), tmp_path, 1))
    with pytest.raises(DataError, match=r"records\.jsonl at byte 92 \(line 3\): has 9 tokens, images included, and a row has 8"):
        list(steps(data(source(corpus), sequence_length=8), tmp_path, 1))
    store: Any = source(corpus).build(SourceContext(tmp_path, ByteTokenizer(), LENGTH, print))
    with pytest.raises(DataError, match=r"more than 8 tokens \(document 3 of .*, with the image 2-0\.png\) would be cut"):
        planned(store, 8, "best_fit", tmp_path, "all")
    with pytest.raises(
        DataError, match=r"\(document 3 of .*, with the image 2-0\.png\) has 3 items, more than data\.items_per_row = 1"
    ):
        planned(store, LENGTH, "best_fit", tmp_path, "all", 1)

    class Job:
        data = data_ = data(source(corpus), packing="concatenate")

    (fault,) = packing_keeps_documents(Job, None)  # type: ignore[arg-type]
    assert fault.key == "data.packing"
    Job.data = replace(Job.data_, packing="pad")
    assert list(packing_keeps_documents(Job, None)) == []  # type: ignore[arg-type]


def test_sources_whose_images_differ_are_not_mixed(corpus: Path, tmp_path: Path) -> None:
    chosen = data(source(corpus, label="a"), replace(source(corpus, label="b"), size=6))
    with pytest.raises(DataError, match=r"has images of shape \(3, 4, 4\), .* images of shape \(3, 6, 6\)"):
        list(steps(chosen, tmp_path, 1))


def test_a_step_ends_with_the_image_that_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    chosen = data(source(corpus))
    list(steps(chosen, tmp_path, 1))
    name = corpus / "7-0.png"
    kept = name.read_bytes()
    content = BytesIO()
    Image.new("RGB", (5, 7)).save(content, "PNG")
    name.write_bytes(content.getvalue())
    try:
        with pytest.raises(DataError, match=r"7-0\.png has changed since it was prepared"):
            list(steps(chosen, tmp_path, 30))
    finally:
        name.write_bytes(kept)


def test_held_out_documents_come_once_on_any_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    (held_out,) = evaluation(data(evaluation={"set": source(corpus)}), workspace=tmp_path).values()
    for ranks in (1, 2, 3):
        parts = [list(held_out.batches(rank, ranks, 7)) for rank in range(ranks)]
        assert any(-1 in batch.samples for part in parts for batch in part), "some rows only fill up"
        assert len({len(part) for part in parts}) == 1
        seen = sorted(pair for part in parts for batch in part for pair in audit(batch))
        assert seen == [(number, 0 if number % 5 == 4 else 1 + number % 3) for number in range(60)]


def test_questions_are_what_stands_before_the_first_learned_token(tmp_path: Path) -> None:
    for number in range(2):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    asked = {"role": "user", "content": "<image>?"}
    talk = [
        asked,
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "B"},
    ]
    records = [
        {"messages": talk, "image": ["1.png", "0.png"]},
        {"text": "no question"},
        {"text": "<image><image>C", "image": ["0.png", "1.png"]},
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (held_out,) = evaluation(data(evaluation={"set": source(tmp_path)}, sequence_length=64), workspace=tmp_path).values()
    one, two = questions(held_out.source, 10)
    hole = [HOLE] * EACH
    assert (one.prompt.tolist(), one.answer.tolist(), one.items) == ([*b"User: ", *hole, *b"?\nAssistant:"], [*b" A\n"], (0, 1))
    assert (two.prompt.tolist(), two.answer.tolist(), two.items) == (hole + hole, [*b"C", EOS], (2, 4))
    found = inputs_of(held_out.source, [one, two])  # type: ignore[arg-type]
    assert found["image_rows"].tolist() == [[0, -1], [1, 2]]
    assert [color(image)[0] for image in found["images"]] == [1, 0, 1]
    assert inputs_of(held_out.source, []) == {}  # type: ignore[arg-type]
    assert list(questions(object(), 5)) == []


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ([7, 8, EOS], [7, 8, EOS], True),
        ([7, 8, EOS], [7, 8, 9, EOS], False),
        ([7, 8, EOS], [7, 8], False),
        ([7, 8], [7, 8, 9], True),  # a turn: what comes after it was not asked for
        ([7, 8], [7, 8], True),
        ([7, 8], [7, 9, 8], False),
        ([7, 8], [7], False),
    ],
)
def test_an_answer_is_right_as_far_as_it_goes(answer: list[int], said: list[int], right: bool) -> None:
    question = Question(np.array([1]), np.array(answer), (0, 0))
    assert question.is_answered_by(said, EOS) is right


def test_a_thousand_questions_of_few_documents_are_each_asked_once(corpus: Path, tmp_path: Path) -> None:
    (held_out,) = evaluation(data(evaluation={"set": source(corpus)}), workspace=tmp_path).values()
    found = [question.items for question in questions(held_out.source, 1000)]
    with_prompt = [number for number in range(60) if number % 5 != 4]
    assert len(found) == len(with_prompt) and len({*found}) == len(found)
    assert np.diff([first for first, _ in found]).min() > 0
