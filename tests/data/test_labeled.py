"""Labeled texts: what becomes of a record, in rows and in a store, and which records are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from forge_core.batch import IGNORE, PADDING
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data import Bytes, Data, Labeled, TokenStore, open_stream
from forge_data.commands.convert import convert
from forge_data.commands.show import show
from forge_data.components import MOST_LABELS, Exercises
from forge_data.loading.evaluation import training_sets
from forge_data.preparation.tokenization import trained_text
from forge_data.sources.exercises import TASKS, labeled_exercises
from forge_data.sources.store import MaskEntry, open_store
from forge_data.sources.store_writer import StoreWriter
from forge_models import DecoderConfig

LABELS = ("bad", "fair", "good")
RECORDS = [
    {"text": "plain awful", "label": "bad"},
    {"text": "so so", "label": 1},
    {"text": "a joy to read, from the first page to the last", "label": "good"},
    {"text": "naïve, Größe", "label": 0},
    {"text": "fine", "label": "good"},
]
NUMBERS = [0, 1, 2, 0, 2]
MODEL = DecoderConfig(dim=8, layers=1, heads=2, vocab_size=257, max_length=64, labels=LABELS)


def written(folder: Path, records: list[dict], name: str = "texts.jsonl") -> str:
    path = folder / name
    if name.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({key: [record[key] for record in records] for key in records[0]}), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def source(folder: Path, records: list[dict], **more) -> Labeled:
    return Labeled(**({"path": written(folder, records), "labels": LABELS} | more))


def built(component, folder: Path):
    return component.build(SourceContext(folder / "w", Bytes().build(), 48, lambda _: None))


def rows(component, folder: Path, model=MODEL, **more):
    data = Data(**({"sources": [component], "tokenizer": Bytes(), "sequence_length": 48, "packing": "best_fit"} | more))
    stream = open_stream(data, workspace=folder / "w", seed=1, global_batch=1, micro_batch=1, model=model)
    (found,) = training_sets(stream)  # type: ignore[arg-type]
    return [*found.batches(0, 1, 1)]


def documents_of(batches) -> dict[str, int]:
    """Text of each document -> its label. Every label is at the last token of a document, and every document has one."""
    found = {}
    for batch in batches:
        tokens, labels, documents = batch.tokens[0], batch.labels[0], batch.documents[0]
        assert int((labels != IGNORE).sum()) == int(documents.max()) + 1
        for number in range(int(documents.max()) + 1):
            at = (documents == number).nonzero().flatten().tolist()
            found[bytes(tokens[at].tolist()).decode(errors="replace")] = int(labels[at[-1]])
        assert (labels[documents == PADDING] == IGNORE).all()
    return found


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_each_document_has_its_label_at_its_last_token(tmp_path: Path, packing: str) -> None:
    batches = rows(source(tmp_path, RECORDS), tmp_path, packing=packing)
    assert documents_of(batches) == {record["text"]: number for record, number in zip(RECORDS, NUMBERS, strict=True)}
    assert len(batches) == (len(RECORDS) if packing == "pad" else 2)  # of 46, and of 11, 5, 14 and 4 bytes


@pytest.mark.parametrize("name", ["texts.json", "texts.parquet"])
def test_other_files_have_the_same_documents(tmp_path: Path, name: str) -> None:
    records = [{**record, "label": LABELS[number]} for record, number in zip(RECORDS, NUMBERS, strict=True)]
    component = Labeled(path=written(tmp_path, records, name), labels=LABELS)
    assert documents_of(rows(component, tmp_path)) == dict(zip([each["text"] for each in RECORDS], NUMBERS, strict=True))


def test_a_row_alone_has_a_label_where_documents_are_not_marked(tmp_path: Path) -> None:
    for batch in rows(source(tmp_path, RECORDS), tmp_path, packing="pad", documents="ignore"):
        last = 47 if batch.token_mask is None else int(batch.token_mask[0].sum()) - 1
        assert batch.documents is None and (batch.labels[0] != IGNORE).nonzero().flatten().tolist() == [last]
    with pytest.raises(DataError, match=r"would see each other; set data.documents = 'mask'"):
        rows(source(tmp_path, RECORDS), tmp_path, documents="ignore")


def test_a_pair_is_one_text(tmp_path: Path) -> None:
    records = [{"a": "it rains", "b": "it is wet", "class": "good"}, {"a": "it rains", "b": "it is dry", "class": "bad"}]
    given = {"text": "a", "pair": "b", "answer": "class"}
    found = documents_of(rows(source(tmp_path, records, **given), tmp_path))
    assert found == {"it rains\nit is wet": 2, "it rains\nit is dry": 0}
    other = source(tmp_path, records, **given, separator=" => ")
    assert "it rains => it is wet" in documents_of(rows(other, tmp_path))


def test_a_long_text_is_refused_left_out_or_truncated_with_its_label(tmp_path: Path) -> None:
    records = [
        {"text": "0123456789" * 6, "label": "good"},
        {"text": "short", "label": "bad"},
        {"text": "x" * 48, "label": "fair"},
    ]
    with pytest.raises(DataError, match=r"document 1 \(texts.jsonl:0\) has 60 tokens, but a row has 48.*'truncate'"):
        rows(source(tmp_path, records), tmp_path)
    assert documents_of(rows(source(tmp_path, records, too_long="skip"), tmp_path)) == {"short": 0, "x" * 48: 1}
    found = documents_of(rows(source(tmp_path, records, too_long="truncate"), tmp_path))
    assert found == {("0123456789" * 6)[:48]: 2, "short": 0, "x" * 48: 1}


def test_integers_are_names_where_names_are_integers(tmp_path: Path) -> None:
    stars = ("5", "4", "3", "2", "1")
    records = [{"text": f"rated {star}", "label": star} for star in (1, 5, "3")]
    found = built(source(tmp_path, records, labels=stars), tmp_path)
    assert found.classes(0, found.tokens)[found.ends().astype(int) - 1].tolist() == [5, 1, 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "label": "great"}, r"'label' is 'great', which is none of the labels bad, fair, good; correct it, or add"),
        ({"text": "x", "label": 3}, r"'label' is 3, but there are 3 labels, numbered from 0"),
        ({"text": "x", "label": -1}, r"'label' is -1, but there are 3 labels"),
        ({"text": "x", "label": True}, r"'label' is bool, neither the name of a label nor its number"),
        ({"text": "x", "label": 1.0}, r"'label' is float, neither"),
        ({"text": "x", "label": None}, r"'label' is missing: each record needs a label"),
        ({"text": "x"}, r"'label' is missing"),
        ({"text": "", "label": "bad"}, r"'text' is empty"),
        ({"text": " \n", "label": "bad"}, r"'text' is empty"),
        ({"text": 3, "label": "bad"}, r"'text' is a int, not text"),
        ({"label": "bad"}, r"'text' is missing"),
    ],
)
def test_a_broken_record_is_named_and_may_be_skipped(tmp_path: Path, record: dict, message: str) -> None:
    records = [RECORDS[0], record, RECORDS[1]]
    with pytest.raises(DataError, match=rf"texts.jsonl at byte \d+ \(line 2\): {message}"):
        built(source(tmp_path, records), tmp_path)
    found = built(source(tmp_path, records, skip=1), tmp_path)
    assert found.documents == 2 and found.manifest.mask.documents == (1, 1, 0)


def test_names_are_different_and_few_enough(tmp_path: Path) -> None:
    for labels, message in (
        (("a", "a"), "'a' twice"),
        (("a", ""), "empty name"),
        (tuple(map(str, range(256))), "maximum is 255"),
    ):
        with pytest.raises(ValueError, match=message):
            source(tmp_path, RECORDS, labels=labels)
    many = tuple(f"l{number}" for number in range(MOST_LABELS))
    found = built(source(tmp_path, [{"text": "x", "label": MOST_LABELS - 1}], labels=many), tmp_path)
    assert found.classes(0, 1).tolist() == [MOST_LABELS]


def test_labels_of_source_and_model_are_the_same(tmp_path: Path) -> None:
    other = DecoderConfig(dim=8, layers=1, heads=2, vocab_size=257, max_length=64, labels=("good", "fair", "bad"))
    with pytest.raises(DataError, match=r"has the labels bad, fair, good, but model.labels has good, fair, bad; set both"):
        rows(source(tmp_path, RECORDS), tmp_path, other)
    with pytest.raises(DataError, match=r"but model.labels has none"):
        rows(source(tmp_path, RECORDS), tmp_path, None)
    store = StoreWriter(tmp_path / "plain", dtype="uint16")
    with store:
        store.add(np.arange(60), np.array([60]))
        store.commit()
    with pytest.raises(DataError, match=r"has no labels, but the model is a classifier"):
        rows(TokenStore(path=str(tmp_path / "plain")), tmp_path, tokenizer=None)


def test_a_store_keeps_labels_and_their_names(tmp_path: Path) -> None:
    found = built(source(tmp_path, RECORDS), tmp_path)
    content = json.loads((found.path / "manifest.json").read_text())
    assert content["version"] == 3 and content["mask"]["labels"] == list(LABELS) and content["mask"]["documents"] == [2, 1, 2]
    assert trained_text(found.manifest.mask, found.tokens) == " (2 bad, 1 fair, 2 good)"
    again = open_store(found.path, None)
    assert again.labels == LABELS and again.fingerprint == found.fingerprint and not again.verify()
    sizes = [len(record["text"].encode()) for record in RECORDS]
    assert again.classes(0, again.tokens).tolist() == np.repeat(np.array(NUMBERS) + 1, sizes).tolist()
    assert again.tokens == sum(sizes)  # no end-of-document token, as of `tokenizer(text)`
    convert(again, tmp_path / "copy", target="store", report=lambda _: None)
    copy = open_store(tmp_path / "copy", None)
    assert copy.manifest.mask == again.manifest.mask and not copy.verify()
    assert copy.classes(0, copy.tokens).tolist() == again.classes(0, again.tokens).tolist()
    assert documents_of(rows(TokenStore(path=str(copy.path)), tmp_path, tokenizer=None)) == documents_of(
        rows(source(tmp_path, RECORDS), tmp_path)
    )


def test_names_and_their_order_are_part_of_a_store(tmp_path: Path) -> None:
    one = built(source(tmp_path, [{"text": "x", "label": 0}]), tmp_path)
    other = built(source(tmp_path, [{"text": "x", "label": 0}], labels=("fair", "bad", "good")), tmp_path)
    assert one.path != other.path and one.fingerprint != other.fingerprint


def test_a_writer_refuses_what_is_no_label(tmp_path: Path) -> None:
    for learned, message in (([1, 2], "all tokens of a document"), ([0, 0], "from 0 to 2"), ([4, 4], "from 0 to 2")):
        writer = StoreWriter(tmp_path / "s", dtype="uint16", mask=MaskEntry("labels", labels=LABELS))
        with writer, pytest.raises(ValueError, match=message):
            writer.add(np.arange(2), np.array([2]), learned=np.array(learned))


def test_a_damaged_label_is_refused(tmp_path: Path) -> None:
    found = built(source(tmp_path, RECORDS), tmp_path)
    path = found.path / "shard-00000.learned.bin"
    content = bytearray(path.read_bytes())
    content[0] = 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="has no label, or an unknown one"):
        open_store(found.path, None).classes(0, 3)
    assert open_store(found.path, None).verify()


def test_labeled_exercises_have_one_right_task(tmp_path: Path) -> None:
    tasks = ("Reverse", "Capitalize", "Rotate")
    made = [*labeled_exercises(300, 4, 0, tasks)]
    assert len({text for text, _ in made}) == 300
    for text, task in made:
        word, solution = text.split(": ")
        assert [name for name in tasks if TASKS[name](word) == solution] == [task]
    component = Exercises(labeled=True, count=300, tasks=tasks, split="train")
    assert component.labels == tasks and built(component, tmp_path).labels == tasks
    with pytest.raises(ValueError, match="pairs and labeled"):
        Exercises(labeled=True, pairs=True)


def test_data_show_prints_the_labels_of_a_row(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[job]\nname = "x"\n[data]\nsequence_length = 64\npacking = "best_fit"\nshuffle = "none"\n'
        'tokenizer = { name = "bytes" }\n'
        f'[[data.sources]]\nname = "labeled"\npath = "{written(tmp_path, RECORDS)}"\nlabels = {list(LABELS)}\n'
        "[train]\nglobal_batch = 1\nmicro_batch = 1\n"
    )
    found = show(str(recipe), [], 1, tmp_path / "w", lambda _: None)
    (row,) = found["rows"]
    texts = [piece["text"] for piece in row["pieces"] if piece["role"] != "padding"]
    right = {record["text"]: LABELS[number] for record, number in zip(RECORDS, NUMBERS, strict=True)}
    assert row["labels"] == [right[text] for text in texts] and row["trained"] == 0 and found["rows_without_training"] == 0
