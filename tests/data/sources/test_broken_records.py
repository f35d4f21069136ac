"""Records that cannot be what they are taken for: each is named by file and line, and `skip` may leave it out."""

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Arrow, JsonLines, Parquet, TextFiles
from forge_data.sources.records import Document, Skips, read_part
from forge_data.storage.files import find, read_bytes
from forge_data.tokenizers.bytes import ByteTokenizer

FINE = '{"text": "fine", "ids": [1, 2]}'


def context(workspace: Path) -> SourceContext:
    return SourceContext(workspace, ByteTokenizer(), 16, lambda _: None)


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
    with pytest.raises(DataError, match=f"token id {2**40}, but the vocabulary has"):
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
