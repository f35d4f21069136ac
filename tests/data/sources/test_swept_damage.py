"""Every cut and every flipped byte of a small file, in each format: it is read or refused, and nothing else comes out."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import xxhash
import zstandard

from data import foreign
from forge_core.errors import DataError, ForgeError
from forge_core.protocols.data import SourceContext
from forge_data.components import Arrow, Datatrove, HuggingFace, JsonLines, Llmc, Megatron, Parquet, Tokens, TokenStore
from forge_data.preparation.job import Done, content_of
from forge_data.tokenizers.bytes import ByteTokenizer

RECORDS = [{"text": f"document {number} is here"} for number in range(8)]
NO_LITERALS = [
    "(" * 90,
    "{",
    "{[]: 1}",
    "-" * 5000 + "1",
    "[" * 2000,
    "'",
    " " * 9000,
    "\x00{}",
    "{'descr': 1, 'fortran_order': 2}",
]
TYPES = ["|O", "<q9", "", "<f4", "|b1", "<u2,<u2", "(2,)<u2", "|S2", "<m8[s]", "|V2"]


def consume(component: Any) -> None:
    """Reads all of a source through each of its functions."""
    source = component.build(SourceContext(Path("unused"), ByteTokenizer(), 16, lambda _: None))
    if hasattr(source, "stream"):
        list(source.stream(0))
        return
    length, starts = min(4, source.tokens), np.zeros(1, dtype=np.uint64)
    source.read(0, source.tokens)
    source.ends()
    source.windows(starts, length)
    source.borders(starts, length)
    if isinstance(component, TokenStore):
        source.counts()
        source.verify()


def damages(whole: bytes, step: int = 1, flips: tuple[int, ...] = (0x01, 0x80)) -> Iterator[bytes]:
    """The file cut at every byte of the first 200, and with every byte changed; `step` of more than 1 leaves bytes out."""
    for at in range(0, min(len(whole), 200), step):
        yield whole[:at]
    for at in range(0, len(whole), step):
        for flip in flips:
            yield whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]


def sweep(path: Path, component: Any, **options: Any) -> int:
    """How many damages were refused; any error that is not Forge's ends the test."""
    consume(component)
    whole, refused = path.read_bytes(), 0
    for content in damages(whole, **options):
        path.write_bytes(content)
        try:
            consume(component)
        except ForgeError as error:
            refused += 1
            assert path.stem.split(".")[0] in str(error)
    path.write_bytes(whole)
    consume(component)
    return refused


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_a_damaged_npy_file_is_read_or_refused(tmp_path: Path, version: tuple[int, int]) -> None:
    path = tmp_path / "ids.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.arange(1, 40, dtype="<u2"), version=version)
    assert sweep(path, Tokens(path=str(path), eos=3), step=1 if version == (1, 0) else 7) > 20


def with_header(path: Path, text: str, version: tuple[int, int] = (1, 0)) -> Path:
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text) + 1)
    path.write_bytes(b"\x93NUMPY" + bytes(version) + length + text.encode() + b"\n" + np.arange(5, dtype="<u2").tobytes())
    return path


@pytest.mark.parametrize("text", [pytest.param(text, id=str(at)) for at, text in enumerate(NO_LITERALS)])
def test_a_header_that_is_no_literal_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"h\.npy is a damaged \.npy file: .*; restore the file"):
        consume(Tokens(path=str(with_header(tmp_path / "h.npy", text))))


@pytest.mark.parametrize("descr", TYPES)
def test_a_dtype_that_ids_cannot_have_is_refused(tmp_path: Path, descr: str) -> None:
    path = with_header(tmp_path / "h.npy", f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': (5,), }}")
    with pytest.raises(DataError, match=r"h\.npy"):
        consume(Tokens(path=str(path)))


def test_shapes_orders_and_versions_of_a_header(tmp_path: Path) -> None:
    path, head = tmp_path / "h.npy", "{{'descr': '<u2', 'fortran_order': {}, 'shape': {}, }}"
    for shape in ("(-5,)", "5", "(True,)", "(99999999999999999999999,)", "()", "(5, 1)", "('5',)", "(5.0,)"):
        with pytest.raises(DataError, match=r"h\.npy"):
            consume(Tokens(path=str(with_header(path, head.format(False, shape)))))
    with_header(path, head.format(True, "(5,)"))  # of one dimension both orders are the same
    assert Tokens(path=str(path)).build(SourceContext(tmp_path, None, 4, print)).read(0, 5).tolist() == [0, 1, 2, 3, 4]
    for version in ((1, 1), (4, 0), (0, 0)):
        with pytest.raises(DataError, match=rf"version {version[0]}\.{version[1]} of the format is unknown; restore"):
            consume(Tokens(path=str(with_header(path, head.format(False, "(5,)"), version))))
    path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(300))
    with pytest.raises(DataError, match="its header claims 4294967295 bytes, more than 10000; restore the file"):
        consume(Tokens(path=str(path)))


def raw(folder: Path) -> tuple[Any, list[str]]:
    np.arange(1, 60, dtype="<u2").tofile(folder / "ids.bin")
    return Tokens(path=str(folder / "ids.bin"), dtype="uint16"), ["ids.bin"]


def llmc(folder: Path) -> tuple[Any, list[str]]:
    return Llmc(path=str(foreign.llmc(folder / "ids.bin", [50256, 1, 2, 50256, 3, 4]))), ["ids.bin"]


def megatron(folder: Path) -> tuple[Any, list[str]]:
    foreign.megatron(folder / "ids", [[[5, 6, 7, 0]], [[8, 0]], [[9, 9, 0]]])
    return Megatron(path=str(folder / "ids")), ["ids.idx", "ids.bin"]


def datatrove(folder: Path) -> tuple[Any, list[str]]:
    path = foreign.datatrove(folder / "ids.ds", [[1, 2, 0], [3, 0]])
    return Datatrove(path=str(path)), ["ids.ds", "ids.ds.index", "ids.ds.metadata"]


@pytest.mark.parametrize("write", [raw, llmc, megatron, datatrove])
def test_damaged_files_of_ids_are_read_or_refused(tmp_path: Path, write: Callable[[Path], tuple[Any, list[str]]]) -> None:
    component, names = write(tmp_path)
    for name in names:
        assert sweep(tmp_path / name, component, step=11 if write is llmc else 1) > 0


def test_a_damaged_store_is_read_or_refused(tmp_path: Path, make_store: Any) -> None:
    path = make_store("store", [[1] * 5, [2] * 9, [3] * 12], shard_tokens=20)
    for name in ("counts.npy", "manifest.json", "shard-00000.bin", "shard-00001.doc.npy"):
        consume(TokenStore(path=str(path)))
        whole = (path / name).read_bytes()
        for content in damages(whole, step=17 if name == "manifest.json" else 3):
            (path / name).write_bytes(content)
            try:
                consume(TokenStore(path=str(path)))
            except ForgeError as error:
                assert str(path) in str(error)
        (path / name).write_bytes(whole)


def test_parts_that_a_crash_damaged_are_made_again(tmp_path: Path) -> None:
    np.arange(4, dtype="<u2").tofile(tmp_path / "000000.ids")
    np.save(tmp_path / "000000.ends.npy", np.array([2, 4], dtype="<u8"))
    ids, ends = (
        xxhash.xxh3_128_hexdigest(array.tobytes()) for array in (np.arange(4, dtype="<u2"), np.array([2, 4], dtype="<u8"))
    )
    done = Done(4, 2, 8, 0, [], ids, ends)
    found = content_of(tmp_path, 0, "uint16", done)
    assert found is not None and found[1].tolist() == [2, 4]
    for content in damages((tmp_path / "000000.ends.npy").read_bytes()):
        (tmp_path / "000000.ends.npy").write_bytes(content)
        found = content_of(tmp_path, 0, "uint16", done)
        assert found is None or found[1].tolist() == [2, 4]  # the spaces of a header mean nothing
    (tmp_path / "000000.ends.npy").unlink()
    assert content_of(tmp_path, 0, "uint16", done) is None


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "jsonl.gz": lambda content: gzip.compress(content, mtime=0),
    "jsonl.zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_damaged_lines_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lines.{suffix}"
    path.write_bytes(COMPRESSIONS[suffix]("".join(f"{json.dumps(record)}\n" for record in RECORDS).encode()))
    assert sweep(path, JsonLines(path=str(path), stream=True), step=3) > 20


def test_a_damaged_block_of_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl.gz"
    content = bytearray(gzip.compress(b'{"text": "a"}\n', mtime=0))
    content[10] |= 0b110  # a block of a kind that there is not
    with pytest.raises(zlib.error):
        gzip.decompress(bytes(content))
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"lines\.jsonl\.gz is damaged after byte 0 of its content: .*; restore the file"):
        consume(JsonLines(path=str(path), stream=True))


def write_columns(path: Path, kind: str) -> Any:
    table = pa.table({"text": [record["text"] for record in RECORDS]})
    if kind == "parquet":
        parquet.write_table(table, path)
        return Parquet(path=str(path), stream=True)
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table)
    return Arrow(path=str(path), stream=True)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_damaged_columns_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Arrow follows offsets of texts wherever they point: before they were checked, some of these ended the process."""
    path = tmp_path / ("columns.parquet" if kind == "parquet" else "columns.arrow")
    assert sweep(path, write_columns(path, kind), step=5, flips=(0x01, 0xFF)) > 80


def test_offsets_of_ids_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"ids": [[1, 2], [3], [4]]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    whole, offsets = path.read_bytes(), struct.pack("<4i", 0, 2, 3, 4)
    assert whole.count(offsets) == 1
    consume(Arrow(path=str(path), ids="ids", stream=True))
    for wrong in ((0, -1, 3, 4), (0, 2, 1 << 30, 4), (0, 3, 2, 4), (0, 2, 3, 1 << 20)):
        path.write_bytes(whole.replace(offsets, struct.pack("<4i", *wrong)))
        with pytest.raises(DataError, match=r"a\.arrow is damaged, or is not a Parquet or Arrow file: .*; restore the file"):
            consume(Arrow(path=str(path), ids="ids", stream=True))


def test_damaged_rows_of_a_dataset_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "set"))
    (path,) = (tmp_path / "set").glob("*.arrow")
    whole = path.read_bytes()
    at = whole.index(struct.pack("<9i", *np.cumsum([0, *(len(record["text"]) for record in RECORDS)])))
    for place, value in ((1, -1), (3, 1 << 30), (8, 1 << 20)):
        path.write_bytes(whole[: at + 4 * place] + struct.pack("<i", value) + whole[at + 4 * place + 4 :])
        records = HuggingFace(path=str(tmp_path / "set")).records()
        with pytest.raises(DataError, match=r"set is damaged in rows 0 to 8: .*; restore it"):
            from forge_data.sources.records import Skips, read_part

            list(read_part(records.parts(1 << 20)[0], records.wanted, Skips()))
