"""A token file that is damaged, cut off, of another format or of an unknown dtype is refused, with its name and the byte."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import foreign
from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceContext
from forge_data.components import Datatrove, Llmc, Megatron, Tokens
from forge_data.storage import shards

BOS = 50256


def opened(component: Any) -> Source:
    return component.build(SourceContext(Path("unused"), None, 16, lambda _: None))


DOCUMENTS = [[[5, 6, 7, 0]], [[8, 0]], [[9, 9, 0]]]


def damaged(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def put(offset: int, content: bytes) -> Callable[[bytearray], object]:
    return lambda whole: whole.__setitem__(slice(offset, offset + len(content)), content)


# 34 bytes of header, lengths at 34, pointers at 46, documents at 70, end at 102
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("m.idx", put(0, b"MMIDIDY"), r"m\.idx is not a Megatron index"),
        ("m.idx", lambda c: c.__delitem__(slice(20, None)), r"m\.idx is truncated: it ends at byte 20, inside its header"),
        ("m.idx", lambda c: c.__delitem__(slice(-8, None)), r"m\.idx is truncated: it ends at byte 94, its header says 102"),
        ("m.idx", lambda c: c.extend(b"12"), r"m\.idx is too long: it ends at byte 104"),
        ("m.idx", lambda c: c.extend(b"\1\1\1"), "multimodal"),
        ("m.idx", put(9, b"\2"), "version 2"),
        ("m.idx", put(17, b"\x09"), "dtype code 9"),
        ("m.idx", put(17, b"\7"), "token ids are integers, found float32"),
        ("m.idx", put(17, b"\4"), r"m\.bin is truncated: it ends at byte 18, its index says 24 \(int32\)"),
        ("m.idx", put(46, struct.pack("<q", 2)), "at byte 46: the first sequence begins at byte 2"),
        ("m.idx", put(54, struct.pack("<q", 6)), "at byte 54: sequence 1 does not begin where the one before it ends"),
        ("m.idx", put(34, struct.pack("<i", -4)), "at byte 34: sequence 0 has a negative length"),
        ("m.idx", put(70, struct.pack("<q", 1)), "at byte 70: documents begin at sequence 1 and end at 3"),
        ("m.idx", put(78, struct.pack("<q", 3)), "at byte 86: document 2 begins before the one before it"),
        ("m.bin", lambda c: c.clear(), r"m\.bin is empty: it ends at byte 0, its index says 18"),
        ("m.bin", lambda c: c.pop(), r"m\.bin is truncated: it ends at byte 17"),
        ("m.bin", lambda c: c.extend(b"1"), r"m\.bin is too long"),
    ],
)
def test_fault_41_a_damaged_megatron_pair_is_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    foreign.megatron(tmp_path / "m", DOCUMENTS)
    assert opened(Megatron(path=str(tmp_path / "m"))).tokens == 9
    damaged(tmp_path / name, change)
    with pytest.raises(DataError, match=message):
        opened(Megatron(path=str(tmp_path / "m")))


def test_megatron_paths(tmp_path: Path) -> None:
    foreign.megatron(tmp_path / "m", DOCUMENTS)
    for path in ("m", "m.idx", "m.bin", "", "*.idx"):
        assert opened(Megatron(path=str(tmp_path / path))).tokens == 9
    for name, message in [("m.idx", r"m\.bin has no index .*m\.idx"), ("m.bin", r"m\.idx has no ids file .*m\.bin")]:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        with pytest.raises(DataError, match=message):
            opened(Megatron(path=str(tmp_path / "m")))
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="nowhere does not exist"):
        opened(Megatron(path=str(tmp_path / "nowhere")))
    empty = foreign.megatron(tmp_path / "empty", [])
    with pytest.raises(DataError, match="lists 0 sequences and 0 documents"):
        opened(Megatron(path=str(empty)))
    foreign.megatron(tmp_path / "wide", DOCUMENTS, "int32")
    with pytest.raises(DataError, match=r"holds (uint16|int32) and .* (uint16|int32)"):
        opened(Megatron(path=f"{tmp_path}/[mw]*.idx"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(0, b"\0"), "is not a token file of llm.c: magic"),
        (put(4, b"\2"), "version 2"),
        (put(0, struct.pack("<i", 20240522)), "multiple-choice"),
        (put(8, b"\7"), "is truncated: it ends at byte 1036, its header says 1038"),
        (lambda c: c.extend(b"12"), "is too long"),
        (lambda c: c.__delitem__(slice(5, None)), "is truncated: it ends at byte 5"),
        (lambda c: c.clear(), "is empty"),
        (lambda c: (put(8, b"\0")(c), c.__delitem__(slice(1024, None))), "has no tokens"),
    ],
)
def test_a_damaged_llmc_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = foreign.llmc(tmp_path / "a.bin", [BOS, 1, 2, BOS, 3, 4])
    assert opened(Llmc(path=str(path))).ends().tolist() == [3, 6]
    damaged(path, change)
    with pytest.raises(DataError, match=message):
        opened(Llmc(path=str(path)))


def test_llama_files_of_llmc(tmp_path: Path) -> None:
    path = foreign.llmc(tmp_path / "a.bin", [128000, 1, 128000, 70_000], 20240801, 7)
    source = opened(Llmc(path=str(path)))
    assert source.read(0, 4).tolist() == [128000, 1, 128000, 70_000] and source.ends().tolist() == [2, 4]
    assert opened(Llmc(path=str(path), bos=1)).ends().tolist() == [1, 4]


def test_files_of_other_formats_are_not_read_as_raw_ids(tmp_path: Path) -> None:
    foreign.llmc(tmp_path / "a.bin", [1, 2, 3])
    with pytest.raises(DataError, match="use source 'llmc'"):
        opened(Tokens(path=str(tmp_path / "a.bin"), dtype="uint16"))
    foreign.megatron(tmp_path / "m", DOCUMENTS)
    with pytest.raises(DataError, match="use source 'megatron'"):
        opened(Tokens(path=str(tmp_path / "m.bin"), dtype="uint16"))
    np.save(tmp_path / "b.npy", np.arange(3, dtype=np.uint16))
    with pytest.raises(DataError, match="mixes files with and without"):
        opened(Tokens(path=str(tmp_path / "[ab].*"), dtype="uint16"))
    np.save(tmp_path / "c.npy", np.arange(3, dtype=np.uint32))
    with pytest.raises(DataError, match=r"b\.npy holds uint16 and .*c\.npy uint32"):
        opened(Tokens(path=str(tmp_path / "?.npy")))
    with pytest.raises(ValueError, match="not both"):
        Tokens(path="x", eos=1, bos=2)


def test_fault_41_headerless_npy_needs_a_dtype(tmp_path: Path) -> None:
    np.arange(4, dtype="<u4").tofile(tmp_path / "part-0.npy")
    with pytest.raises(DataError, match="dtype is unknown"):
        opened(Tokens(path=str(tmp_path)))
    assert opened(Tokens(path=str(tmp_path), dtype="uint32")).read(0, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.__delitem__(slice(-1, None)), r"is truncated: it ends at byte 137, its header says 138"),
        (lambda c: c.extend(b"1"), "is too long"),
        (lambda c: c.__delitem__(slice(60, None)), "is a damaged .npy file"),
    ],
)
def test_fault_41_a_damaged_npy_file_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    damaged(tmp_path / "a.npy", change)
    with pytest.raises(DataError, match=message):
        opened(Tokens(path=str(tmp_path / "a.npy")))


def test_npy_files_with_long_headers_and_other_byte_order(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5, dtype=">i4"))
    assert opened(Tokens(path=str(tmp_path / "a.npy"))).read(1, 3).tolist() == [1, 2]
    with (tmp_path / "b.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(5, dtype="<u2"), version=(2, 0))
    assert opened(Tokens(path=str(tmp_path / "b.npy"))).read(1, 3).tolist() == [1, 2]
    np.save(tmp_path / "c.npy", np.zeros((2, 2), dtype=np.uint16))
    with pytest.raises(DataError, match=r"an array of shape \(2, 2\)"):
        opened(Tokens(path=str(tmp_path / "c.npy")))
    np.save(tmp_path / "d.npy", np.zeros(0, dtype=np.uint16))
    with pytest.raises(DataError, match="has no tokens"):
        opened(Tokens(path=str(tmp_path / "d.npy")))


def test_datatrove_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = foreign.datatrove(tmp_path / "a.ds", [[1, 2, 0], [3, 0]])
    assert opened(Datatrove(path=str(path), dtype="uint16")).ends().tolist() == [3, 5]
    with pytest.raises(DataError, match="10 bytes for 5 tokens are uint16"):
        opened(Datatrove(path=str(path), dtype="uint32"))
    (tmp_path / "a.ds.metadata").write_text("gpt2\n6\n")
    with pytest.raises(DataError, match="metadata says 6 tokens, the index 5"):
        opened(Datatrove(path=str(path)))
    (tmp_path / "a.ds.metadata").unlink()
    assert opened(Datatrove(path=str(path))).tokens == 5
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="ends at byte 9, but its index says 5 tokens"):
        opened(Datatrove(path=str(path)))
    (tmp_path / "a.ds.index").write_bytes(b"123")
    with pytest.raises(DataError, match="3 bytes, which is not a list of uint64"):
        opened(Datatrove(path=str(path)))
    (tmp_path / "a.ds.index").unlink()
    with pytest.raises(DataError, match=r"has no a\.ds\.index in its directory"):
        opened(Datatrove(path=str(path)))


def test_a_mask_of_the_loss_is_not_forgotten(tmp_path: Path) -> None:
    path = foreign.datatrove(tmp_path / "a.ds", [[1, 2, 0]])
    (tmp_path / "a.ds.loss").write_bytes(b"\1\0\1")
    with pytest.raises(DataError, match="masks the loss of some tokens"):
        opened(Datatrove(path=str(path)))
    assert opened(Datatrove(path=str(path), ignore_loss_mask=True)).tokens == 3


def test_a_file_that_shrinks_after_opening_is_a_message_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.arange(500, dtype=np.uint16))
    monkeypatch.setattr(shards, "open_files", lambda: 1)
    source = opened(Tokens(path=str(tmp_path)))
    source.read(500, 510)
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:300])
    with pytest.raises(DataError, match=r"a\.npy is truncated: it ends at byte 300, 1128 are needed"):
        source.read(0, 5)
