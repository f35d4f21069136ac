"""Records of text and of ids: every format gives the same documents, in any parts, and broken ones are named or counted."""

import codecs
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, TextComponent
from forge_data.commands.mix import read_recipe
from forge_data.components import Arrow, Bpe, Bytes, HuggingFace, JsonLines, Parquet, RecordComponent, TextFiles
from forge_data.loading.sources import LoadSpec, context_of
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.sources import jsonl
from forge_data.sources.records import Document, Skips, Wanted, part_as_json, part_from_json, read_part
from forge_data.storage.files import find, read_bytes
from forge_data.tokenizers.bytes import ByteTokenizer

TEXTS = ["first", "zweiter Text\nmit Zeile", "", "漢字 and more", "last " * 50, '"quoted" \\ escaped', "x"]
IDS = [[1, 2, 3], [4], [], [500, 7, 0], list(range(60))]


def context(workspace: Path, **more: Any) -> SourceContext:
    return SourceContext(workspace, more.pop("tokenizer", ByteTokenizer()), 16, lambda _: None, **more)


def as_jsonl(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    lines = [json.dumps({"id": number, column: value}, ensure_ascii=number % 2 == 0) for number, value in enumerate(values)]
    (folder / "a.jsonl").write_text("\n".join(lines[:3]) + "\n\n", encoding="utf-8")
    (folder / "b.jsonl").write_text("\n".join(lines[3:]), encoding="utf-8")  # without a line's end at the end
    return JsonLines(path=str(folder))


def as_gzip(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps({column: value}) for value in values).encode()))
    return JsonLines(path=str(folder / "*.gz"))


def as_zstandard(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    """In two frames, as tools that append to a file write them."""
    lines = "".join(json.dumps({column: value}) + "\n" for value in values).encode()
    compress = zstandard.ZstdCompressor().compress
    (folder / "a.json.zst").write_bytes(compress(lines[:70]) + compress(lines[70:]))
    return JsonLines(path=str(folder))


def as_parquet(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    parquet.write_table(pa.table({"n": range(3), column: values[:3]}), folder / "a.parquet", row_group_size=2)
    parquet.write_table(pa.table({column: values[3:]}), folder / "b.parquet", row_group_size=1)
    return Parquet(path=str(folder))


def as_arrow(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    """One file of each of Arrow's two formats."""
    for name, own, new in [("a", values[:3], pa.ipc.new_file), ("b", values[3:], pa.ipc.new_stream)]:
        table = pa.table({column: own})
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2 if name == "a" else 2000)
    return Arrow(path=str(folder))


def as_dataset(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    datasets.Dataset.from_dict({column: values}).save_to_disk(folder / "set", num_shards=2)
    return HuggingFace(path=str(folder / "set"))


def as_dataset_dict(folder: Path, column: str, values: list[Any]) -> RecordComponent:
    made = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({column: values}), "test": datasets.Dataset.from_dict({column: values[:1]})}
    )
    made.save_to_disk(folder / "set")
    return HuggingFace(path=str(folder / "set"))


Write = Callable[[Path, str, list[Any]], RecordComponent]
FORMATS: list[Write] = [as_jsonl, as_gzip, as_zstandard, as_parquet, as_arrow, as_dataset, as_dataset_dict]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, write: Write) -> None:
    component = write(tmp_path, "text", TEXTS)
    assert isinstance(component, TextComponent)
    texts = component.texts()
    assert texts is not None
    assert [text for _, text in texts] == [text for text in TEXTS if text]
    assert len({name for name, _ in texts}) == len(TEXTS) - 1
    store = component.build(context(tmp_path / "w"))
    expected = b"".join(text.encode() + b"\0" for text in TEXTS if text)
    assert (store.read(0, store.tokens) % 256).astype(np.uint8).tobytes() == expected
    assert store.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert store.ends().tolist() == np.cumsum([len(text.encode()) + 1 for text in TEXTS if text]).tolist()


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_ids(tmp_path: Path, write: Write) -> None:
    component = write(tmp_path, "input_ids", IDS)
    component = type(component)(**{**vars(component), "ids": "input_ids"})
    assert component.texts() is None
    store = component.build(context(tmp_path / "w", tokenizer=None))
    kept = [ids for ids in IDS if ids]
    assert store.read(0, store.tokens).tolist() == [token for ids in kept for token in ids]
    assert store.ends().tolist() == np.cumsum([len(ids) for ids in kept]).tolist()
    assert store.text_bytes is None and store.tokenizer is None
    closed = type(component)(**{**vars(component), "eos": 0}).build(context(tmp_path / "w", tokenizer=None))
    assert closed.read(0, closed.tokens).tolist() == [token for ids in kept for token in (ids if ids[-1] == 0 else [*ids, 0])]
    with pytest.raises(DataError, match="holds token id 500, but the vocabulary has only 257 ids"):
        component.build(context(tmp_path / "w"))


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("size", [1, 40, 150, 10**6])
def test_parts_of_any_size_give_every_document_once(tmp_path: Path, write: Write, size: int) -> None:
    records = write(tmp_path, "text", TEXTS).records()
    parts = records.parts(size)
    found = [
        document
        for part in parts
        for document in read_part(part_from_json(json.loads(json.dumps(part_as_json(part)))), records.wanted, Skips())
    ]
    assert found == list(records)
    assert size > 1 or len(parts) > 1 or write in (as_gzip, as_zstandard)


@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=9),
    size=st.integers(1, 60),
    end=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_line_belongs_to_the_range_in_which_it_begins(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes("\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines).encode() + b"\n" * end)
    parts = jsonl.cut(find(str(path), (".jsonl",), "jsonl"), size)
    assert [text for part in parts for _, text in jsonl.read(part, Wanted("jsonl"), Skips())] == lines


@pytest.mark.parametrize("write", FORMATS)
def test_long_columns_are_read_in_slices(tmp_path: Path, write: Write) -> None:
    """More rows than are taken at a time, so that every row is looked for at its own place."""
    ids = [[number, number + 1, 0] for number in range(1, 2501)]
    component = write(tmp_path, "ids", ids)
    component = type(component)(**{**vars(component), "ids": "ids"})
    store = component.build(context(tmp_path / "w", tokenizer=None))
    assert store.read(0, store.tokens).tolist() == [token for row in ids for token in row]


def test_splits_share_no_record_and_leave_none_out(tmp_path: Path) -> None:
    as_jsonl(tmp_path, "text", [f"document {number}" for number in range(200)])
    taken = {
        split: {text for _, text in JsonLines(path=str(tmp_path), split=split, held_out=0.3).records()}  # type: ignore[arg-type]
        for split in ("all", "train", "held_out")
    }
    assert taken["train"] | taken["held_out"] == taken["all"] and not taken["train"] & taken["held_out"]
    assert 30 < len(taken["held_out"]) < 90


BROKEN = [
    (b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', r"a\.jsonl at byte 14 \(line 2\) is not valid JSON"),
    (b'{"text": "a"}\n{"other": "b"}\n{"text": "c"}', r"a\.jsonl at byte 14 \(line 2\): 'text' is missing or null, not text"),
    (b'{"text": "a"}\n{"text": 7}\n{"text": "c"}', r"line 2\): 'text' is a int, not text"),
    (b'{"text": "a"}\n["b"]\n{"text": "c"}', r"line 2\) is not a JSON object with a key 'text'"),
    (b'{"text": "a"}\n{"text": "\xff"}\n{"text": "c"}', r"line 2\) is not valid JSON: .*utf-8"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_fault_41_broken_records_are_named_or_skipped_by_choice_and_counted(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        JsonLines(path=str(tmp_path)).build(context(tmp_path / "w"))
    said: list[str] = []
    told = SourceContext(tmp_path / "w", ByteTokenizer(), 16, said.append)
    store = JsonLines(path=str(tmp_path), skip=1).build(told)
    assert (store.read(0, store.tokens) % 256).astype(np.uint8).tobytes() == b"a\0c\0"
    assert any(message_.startswith("left out 1 broken records; the first: ") for message_ in said)
    assert store.manifest.source == "jsonl, 1 broken records left out"  # type: ignore[attr-defined]
    (named,) = Path(f"{store.name}.skipped.txt").read_text().splitlines()
    assert re.search(message, named) and f"{store.name}.skipped.txt lists everything that was left out" in said
    (tmp_path / "b.jsonl").write_bytes(b"{\n")
    with pytest.raises(DataError, match=r"2 records are broken, and `skip` allows 1; the first: .*a\.jsonl at byte 14"):
        JsonLines(path=str(tmp_path), skip=1).build(told)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, -2], "negative id -2"),
        ([1.5], "holds a float at index 0, not a token id"),
        ("ab", "is a str"),
        (None, "missing or null"),
        ([[1]], "holds a list at index 0, not a token id"),
    ],
)
def test_broken_ids_are_named(tmp_path: Path, value: Any, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": value}))
    with pytest.raises(DataError, match=message):
        JsonLines(path=str(tmp_path), ids="ids").build(context(tmp_path / "w", tokenizer=None))


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    for write in (as_parquet, as_arrow, as_dataset):
        folder = tmp_path / write.__name__
        folder.mkdir()
        component = write(folder, "body", TEXTS)
        with pytest.raises(DataError, match=r"has no column 'text'; it has .*body"):
            component.build(context(tmp_path / "w"))
    with pytest.raises(DataError, match="has no split 'valid'; it has train, test"):
        as_dataset_dict(tmp_path, "text", TEXTS)
        HuggingFace(path=str(tmp_path / "set"), dataset_split="valid").build(context(tmp_path / "w"))


def test_null_values_are_broken_records(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a", None], "ids": [[1], None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="group 0, row 1: 'text' is missing or null"):
        Parquet(path=str(tmp_path)).build(context(tmp_path / "w"))
    with pytest.raises(DataError, match="group 0, row 1: 'ids' is missing or null"):
        Parquet(path=str(tmp_path), ids="ids").build(context(tmp_path / "w"))
    store = Parquet(path=str(tmp_path), ids="ids", skip=1).build(context(tmp_path / "w"))
    assert store.read(0, store.tokens).tolist() == [1]


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (as_gzip, "a.jsonl.gz", r"a\.jsonl\.gz is damaged after byte \d+ of its content"),
        (as_zstandard, "a.json.zst", r"a\.json\.zst is damaged after byte \d+ of its content: it ends inside a zstandard frame"),
        (as_parquet, "b.parquet", r"b\.parquet is damaged"),
        (as_arrow, "a.arrow", r"a\.arrow is damaged"),
    ],
)
def test_fault_41_truncated_files_are_refused(tmp_path: Path, write: Write, name: str, message: str) -> None:
    component = write(tmp_path, "text", TEXTS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-9])
    with pytest.raises(DataError, match=message):
        component.build(context(tmp_path / "w"))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"damaged|has no records"):
        component.build(context(tmp_path / "w"))


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    for component in (JsonLines, Parquet, Arrow):
        with pytest.raises(DataError, match="does not exist"):
            component(path=str(tmp_path / "none")).texts()
        with pytest.raises(DataError, match=r"matches no .* file; in a directory, Forge looks for"):
            component(path=str(tmp_path)).texts()
    with pytest.raises(DataError, match="cannot be loaded"):
        HuggingFace(path=str(tmp_path / "none")).texts()
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(DataError, match=r"has no row|cannot be loaded"):
        HuggingFace(path=str(tmp_path / "empty")).texts()


def test_a_changed_corpus_is_prepared_again(tmp_path: Path) -> None:
    component = as_jsonl(tmp_path, "text", TEXTS)
    first = component.build(context(tmp_path / "w"))
    assert component.build(context(tmp_path / "w")).fingerprint == first.fingerprint
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('\n{"text": "one more"}')
    assert component.build(context(tmp_path / "w")).tokens == first.tokens + 9
    made = as_dataset(tmp_path, "text", TEXTS)
    before = made.records().fingerprint
    assert made.records().fingerprint == before
    loaded = datasets.load_from_disk(tmp_path / "set")
    loaded.select([0, 1]).save_to_disk(tmp_path / "fewer")
    assert HuggingFace(path=str(tmp_path / "fewer")).records().fingerprint != before


def test_a_recipe_mixes_text_and_ids_of_records(tmp_path: Path) -> None:
    """The tokenizer is trained on what is text; ids are left alone."""
    (tmp_path / "text").mkdir()
    (tmp_path / "ids").mkdir()
    as_jsonl(tmp_path / "text", "text", ["some words to train on, again and again"] * 40)
    as_parquet(tmp_path / "ids", "ids", IDS * 30)
    data = Data(
        sequence_length=16,
        sources=[JsonLines(path=str(tmp_path / "text")), Parquet(path=str(tmp_path / "ids"), ids="ids")],
        tokenizer=Bpe(vocab_size=501),
    )
    assert len(context_of(LoadSpec(data, tmp_path / "w"), lambda _: None).texts) == 1
    with pytest.raises(DataError, match="holds token id 500, but the vocabulary has only 2"):
        open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=4, micro_batch=2)
    as_parquet(tmp_path / "ids", "ids", [[3, 2, 1, 0]] * 300)
    opened = open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=4, micro_batch=2)
    assert opened.tokens == 1200 + sum(opened.sources[0].tokens for _ in range(1))
    next(iter(opened.from_cursor(opened.start())))


PLUGIN = """
from dataclasses import dataclass
from forge_data.components import JsonLines

@dataclass(frozen=True, kw_only=True)
class Web(JsonLines):
    '''Pages of the web.'''

    language: str = "en"
    '''Language of the pages.'''
"""


def test_a_plugin_may_give_a_record_source_another_name(tmp_path: Path) -> None:
    """The format is declared, not taken from the name of the class."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    files = as_jsonl(tmp_path, "text", TEXTS)
    (tmp_path / "recipe.toml").write_text(
        f"[[data.sources]]\nname = '{tmp_path}/mine.py:Web'\npath = '{tmp_path}'\nlanguage = 'de'\n"
        "[data]\nsequence_length = 8\ntokenizer = { name = 'bytes' }\n"
    )
    (web,) = read_recipe(tmp_path / "recipe.toml").data.sources
    assert type(web).__name__ == "Web"
    own, plain = (component.build(context(tmp_path / name)) for name, component in (("own", web), ("plain", files)))
    assert own.fingerprint == plain.fingerprint and own.read(0, own.tokens).tolist() == plain.read(0, plain.tokens).tolist()
    for stream in (False, True):
        data = Data(sequence_length=8, sources=[type(web)(path=str(tmp_path), stream=stream)], tokenizer=Bytes())
        opened = open_stream(data, workspace=tmp_path / "run", seed=0, global_batch=2, micro_batch=2)
        assert opened.describe()["sources"][0]["label"] == "web"
        next(opened.from_cursor(opened.start()))


FINE = '{"text": "fine", "ids": [1, 2]}'


def documents(component: Any) -> list[Document]:
    records = component.records() if hasattr(component, "records") else component.texts()
    skips = Skips(records.skip)
    return [document for part in records.parts(1 << 20) for document in read_part(part, records.wanted, skips)]


@pytest.mark.parametrize(
    ("line", "ids", "message"),
    [
        ('{"text": "a \\ud800 b"}', None, "'text' holds the lone surrogate U[+]D800 at character 2"),
        ("[" * 100_000, None, "is not valid JSON: brackets are nested too deeply"),
        ('{"text": ' + "[" * 100_000, None, "is not valid JSON: brackets are nested too deeply"),
        ('{"ids": [[1, 2], [3]]}', "ids", "'ids' holds a list at index 0, not a token id"),
        ('{"ids": [[1, 2], [3, 4]]}', "ids", "'ids' holds a list at index 0, not a token id"),
        ('{"ids": [1, [2]]}', "ids", "'ids' holds a list at index 1, not a token id"),
        ('{"ids": [1, 2, null]}', "ids", "'ids' holds a null at index 2, not a token id"),
        ('{"ids": [1, "2"]}', "ids", "'ids' holds a str at index 1, not a token id"),
        ('{"ids": [1, 2.0]}', "ids", "'ids' holds a float at index 1, not a token id"),
        ('{"ids": [1, true]}', "ids", "'ids' holds a bool at index 1, not a token id"),
        ('{"ids": [4, 9223372036854775813]}', "ids", "'ids' holds 9223372036854775813 at index 1, larger than any token id"),
        ('{"ids": [4, 1e400]}', "ids", "'ids' holds a float at index 1, not a token id"),
        ('{"ids": [4, -1]}', "ids", "'ids' holds the negative id -1 at index 1"),
        ('{"ids": {"a": 1}}', "ids", "'ids' is a dict, not a list of token ids"),
        ('{"ids": 7}', "ids", "'ids' is a int, not a list of token ids"),
        ('{"text": ["a"]}', None, "'text' is a list, not text"),
    ],
)
def test_h11_a_record_that_cannot_be_read_is_named_and_skipped(tmp_path: Path, line: str, ids: str | None, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{FINE}\n\n{line}\n{FINE}\n")
    strict = JsonLines(path=str(tmp_path), ids=ids)
    with pytest.raises(DataError, match=rf"a\.jsonl at byte {len(FINE) + 2} \(line 3\):? {message}"):
        strict.build(context(tmp_path / "w"))
    for stream in (False, True):
        source = JsonLines(path=str(tmp_path), ids=ids, skip=1, stream=stream).build(context(tmp_path / "w"))
        read_ids = np.concatenate(list(source.stream(0))) if stream else source.read(0, source.tokens)  # type: ignore[union-attr]
        assert read_ids.tolist() == ([1, 2] * 2 if ids else [*b"fine", 256] * 2)


def test_h11_lines_are_counted_in_every_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([FINE] * 40 + ["nothing"]))
    records = JsonLines(path=str(tmp_path)).records()
    last = records.parts(100)[-1]
    assert last.start > 0
    with pytest.raises(DataError, match=r"a\.jsonl at byte \d+ \(line 41\)"):
        list(read_part(last, records.wanted, Skips()))


def test_w10_ids_that_do_not_fit_are_refused_and_not_cut(tmp_path: Path) -> None:
    column = pa.array([[1, 2], [3, 2**63 + 5]], type=pa.list_(pa.uint64()))
    parquet.write_table(pa.table({"ids": column}), tmp_path / "a.parquet")
    for kind in (pa.large_list(pa.uint64()), pa.list_(pa.uint64(), 2)):
        parquet.write_table(pa.table({"ids": column.cast(kind)}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="group 0, row 1: 'ids' holds 9223372036854775813 at index 1, larger than any"):
            Parquet(path=str(tmp_path), ids="ids").build(context(tmp_path / "w"))
    assert documents(Parquet(path=str(tmp_path), ids="ids", skip=1))[0][1].tolist() == [1, 2]  # type: ignore[union-attr]
    parquet.write_table(pa.table({"ids": pa.array([[1, 2**40]], type=pa.list_(pa.uint64()))}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"token id {2**40}, but the vocabulary has only"):
        Parquet(path=str(tmp_path), ids="ids").build(context(tmp_path / "w"))


def test_m5_a_null_inside_a_list_is_named(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"ids": pa.array([[1], [2, None]], type=pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="group 0, row 1: 'ids' holds a null at index 1, not a token id"):
        Parquet(path=str(tmp_path), ids="ids").build(context(tmp_path / "w"))


def test_h11_text_of_a_column_that_is_not_utf8(tmp_path: Path) -> None:
    wrong = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 4], dtype="<i4")), pa.py_buffer(b"ok\xff\xfe"))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, pa.schema({"text": pa.string()})) as writer:
        writer.write(pa.record_batch({"text": wrong}))
    with pytest.raises(DataError, match="group 0, row 1: 'text' is not UTF-8: invalid start byte at byte 0"):
        Arrow(path=str(tmp_path)).build(context(tmp_path / "w"))
    assert [text for _, text in documents(Arrow(path=str(tmp_path), skip=1))] == ["ok"]


def test_m6_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "Hündin".encode())
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8)
    assert documents(TextFiles(path=str(tmp_path / "*.txt"))) == [("a.txt", "Hündin")]
    for content in (codecs.BOM_UTF8 + FINE.encode(), codecs.BOM_UTF8 + b"\n" + FINE.encode()):
        (tmp_path / "a.jsonl").write_bytes(content)
        assert [text for _, text in documents(JsonLines(path=str(tmp_path / "a.jsonl")))] == ["fine"]
    (tmp_path / "a.jsonl").write_bytes(FINE.encode() + b"\n" + codecs.BOM_UTF8 + FINE.encode())
    with pytest.raises(DataError, match="line 2"):
        documents(JsonLines(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_m6_other_unicode_is_named(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    name = encoding.upper().removesuffix("-BE")
    (tmp_path / "a.txt").write_text(f"{mark}text", encoding=encoding)
    with pytest.raises(DataError, match=rf"a\.txt is {name} text .*; convert it to UTF-8"):
        documents(TextFiles(path=str(tmp_path / "a.txt")))
    (tmp_path / "b.txt").write_text("fine")
    assert documents(TextFiles(path=str(tmp_path / "*.txt"), skip=1)) == [("b.txt", "fine")]
    (tmp_path / "a.jsonl").write_text(f"{mark}{FINE}\n", encoding=encoding)
    with pytest.raises(DataError, match=rf"a\.jsonl is {name} text .*; convert it to UTF-8"):
        documents(JsonLines(path=str(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text(f"{FINE}\n", encoding="utf-16-le")  # without a mark
    with pytest.raises(DataError, match="line 1"):
        documents(JsonLines(path=str(tmp_path / "a.jsonl")))


def test_a_read_of_a_whole_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives at most 2 GiB at a time, and may give less."""
    import os

    (tmp_path / "a.txt").write_text("0123456789")
    (file,) = find(str(tmp_path / "a.txt"), (".txt",), "text")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: real(descriptor, min(size, 3), offset))
    assert read_bytes(file, 0, 10) == b"0123456789" and read_bytes(file, 4, 99) == b"456789"


def test_examples_of_evaluation_sets_name_their_line(tmp_path: Path) -> None:
    from forge_data.sources import jsonl

    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "b"}) + "\n" + "[" * 100_000)
    (file,) = find(str(tmp_path / "a.jsonl"), jsonl.SUFFIXES, "evaluation")
    with pytest.raises(DataError, match="line 2"):
        list(jsonl.records(file))
