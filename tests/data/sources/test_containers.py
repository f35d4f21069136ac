"""What is not raw token ids is not read as raw token ids: other containers are named, and which source reads them."""

import bz2
import gzip
import io
import lzma
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from safetensors.numpy import save

from data import foreign
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.commands.convert import convert
from forge_data.commands.inspect import verify_tokens
from forge_data.components import Datatrove, Megatron, Tokens
from forge_data.sources.formats import detect, open_any

IDS = np.arange(5000, dtype="<u2")


def opened(component: Any) -> Any:
    return component.build(SourceContext(Path("unused"), None, 16, lambda _: None))


def written(write: Any) -> bytes:
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def _arrow(new: Any) -> bytes:
    table = pa.table({"ids": IDS})

    def write(file: Any) -> None:
        with new(file, table.schema) as writer:
            writer.write_table(table)

    return written(write)


def _zip(file: Any) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("weights.txt", "x" * 1000)


FOREIGN = {
    "npz": (written(lambda file: np.savez(file, ids=IDS)), r"a \.npz archive of numpy; .* source 'tokens'"),
    "zip": (written(_zip), r"a zip archive; unpack it"),
    "gzip": (gzip.compress(IDS.tobytes()), "compressed with gzip; unpack it"),
    "zstd": (zstandard.ZstdCompressor().compress(IDS.tobytes()), "compressed with zstandard; unpack it"),
    "bz2": (bz2.compress(IDS.tobytes()), "compressed with bzip2; unpack it"),
    "xz": (lzma.compress(IDS.tobytes()), "compressed with xz; unpack it"),
    "parquet": (written(lambda file: parquet.write_table(pa.table({"ids": IDS}), file)), "a Parquet file; use source 'parquet'"),
    "arrow": (_arrow(pa.ipc.new_file), "an Arrow file; use source 'arrow'"),
    "arrow stream": (_arrow(pa.ipc.new_stream), "an Arrow stream; use source 'arrow'"),
    "safetensors": (save({"ids": IDS}), "a safetensors file of weights"),
    "gguf": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(100), "a GGUF file of weights"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    "index": (b"MMIDIDX\x00\x00" + bytes(101), "an index of Megatron; use source 'megatron'"),
    "json": (b'{"text": "a document of words"}\n' * 40, "text, not token ids; use source 'text' or 'jsonl'"),
    "llmc": (None, "the header of llm.c; use source 'llmc'"),
    "store": (None, "a shard of the token store .*; use source 'store'"),
    "datatrove": (None, "a document index of datatrove; use source 'datatrove'"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint8"])
def test_w10_another_container_is_not_read_as_raw_ids(tmp_path: Path, kind: str, dtype: Any, make_store: Any) -> None:
    content, message = FOREIGN[kind]
    path = tmp_path / "a.bin"
    if kind == "llmc":
        foreign.llmc(path, IDS.tolist())
    elif kind == "store":
        path = make_store("store", [IDS.tolist()]) / "shard-00000.bin"
    elif kind == "datatrove":
        path = foreign.datatrove(tmp_path / "a.ds", [IDS.tolist()])
    else:
        assert content is not None
        path.write_bytes(content + bytes(-len(content) % 4))  # a size that fits every width
    if kind == "json" and dtype == "uint8":
        assert opened(Tokens(path=str(path), dtype=dtype)).read(0, 2).tolist() == [ord("{"), ord('"')]  # bytes as tokens
        return
    with pytest.raises(DataError, match=rf"{path.name} (is|begins with|has) {message}"):
        opened(Tokens(path=str(path), dtype=dtype))


@pytest.mark.parametrize("count", [7, 5000, -1])
def test_w10_a_header_of_llmc_with_a_wrong_count_is_a_header(tmp_path: Path, count: int) -> None:
    path = foreign.llmc(tmp_path / "a.bin", [1, 2, 3])
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<i", count)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"begins with the header of llm\.c; use source 'llmc'"):
        opened(Tokens(path=str(path), dtype="uint16"))
    assert detect(str(path)) == "llmc"
    with pytest.raises(DataError, match=r"is (truncated|too long): it ends at byte 1030, its header says"):
        open_any(str(path))


def test_ids_that_look_like_the_beginning_of_a_container_are_ids(tmp_path: Path) -> None:
    """Two bytes of gzip or a length as in safetensors are no container: the rest has to fit too."""
    gzip_like = (b"\x1f\x8b\x05\x00", b"\x1f\x8b\x08\x00" + b"\xff" * 12)
    for head in (*gzip_like, b"\x08\0\0\0\0\0\0\0[[", b"\xff\xff\xff\xff\x07\0\0\0", b"BZh0"):
        (tmp_path / "a.bin").write_bytes(head + bytes(-len(head) % 2) + IDS.tobytes())
        assert opened(Tokens(path=str(tmp_path / "a.bin"), dtype="uint16")).tokens >= 5000


def test_m5_mixed_byte_order_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS)
    np.save(tmp_path / "b.npy", IDS.astype(">u2"))
    with pytest.raises(DataError, match=r"a\.npy holds uint16, but .*b\.npy holds big-endian uint16"):
        opened(Tokens(path=str(tmp_path)))


def test_m5_empty_megatron_documents_are_no_sequences_to_join(tmp_path: Path) -> None:
    """A document without a sequence: `end_document` twice."""
    foreign.megatron(tmp_path / "m", [[[1, 0]], [], [[2, 0]]])
    source = opened(Megatron(path=str(tmp_path / "m")))
    assert (source.described.documents, source.described.more["sequences"]) == (3, 2)
    with pytest.raises(DataError, match=r"has 1 documents without tokens, .* --skip-empty"):
        convert(source, tmp_path / "out", "store", report=lambda _: None)
    found = convert(source, tmp_path / "out", "store", skip_empty=True, report=lambda _: None)
    assert found["documents"] == 2 and found["empty_documents_skipped"] == 1
    foreign.megatron(tmp_path / "n", [[[1], [0]], [], [[2, 0]]])  # as many sequences as documents, and yet some to join
    with pytest.raises(DataError, match=r"has 3 sequences in 3 documents.* --join-sequences"):
        convert(opened(Megatron(path=str(tmp_path / "n"))), tmp_path / "two", "store", skip_empty=True, report=lambda _: None)


def test_m5_empty_documents_are_counted_and_no_damage(tmp_path: Path) -> None:
    foreign.megatron(tmp_path / "m", [[[1, 0]], [[]], [], [[2, 0]]])
    foreign.datatrove(tmp_path / "a.ds", [[], [1, 0], [], [2, 0]])
    for component in (Megatron(path=str(tmp_path / "m")), Datatrove(path=str(tmp_path / "a.ds"))):
        source = opened(component)
        assert source.ends().tolist() == [2, 4]
        rows, columns = source.borders(np.array([0, 1], dtype=np.uint64), 3)
        assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [2, 1, 3])
        found = verify_tokens(source, None, lambda _: None)
        assert found["faults"] == [] and found["empty_documents"] == 2 and found["documents"] == 2
