"""Readers and writers of tokens at the edges of their rules: the largest id, the last entry of a block, a full group."""

from pathlib import Path

import numpy as np
import pytest

from forge_core.errors import DataError
from forge_data.sources import megatron
from forge_data.sources.arrays import ArrayWriter, open_tokens
from forge_data.sources.megatron import HEAD, MAGIC, Index, open_megatron, pairs
from forge_data.sources.records import grouped, ids_of, in_split
from forge_data.sources.text import stdlib_files
from forge_data.storage import shards
from forge_data.storage.files import find_one


def test_a_stated_dtype_that_is_not_the_headers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(8, dtype="<u2"))
    assert open_tokens(str(path), dtype="uint16", eos=0).tokens == 8
    with pytest.raises(DataError, match=r"the header says uint16, but the recipe sets dtype = 'uint32'; remove `dtype`"):
        open_tokens(str(path), dtype="uint32", eos=0)


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16 - 1), ("int32", 2**31 - 1), ("uint8", 255)])
def test_the_largest_id_of_a_dtype_is_written_and_the_next_refused(tmp_path: Path, dtype: str, largest: int) -> None:
    with ArrayWriter(tmp_path / "a.npy", dtype, header=True, lose_documents=False) as writer:
        writer.add(np.array([largest, 0]), np.array([2]))
        for wrong in (largest + 1, -1):
            with pytest.raises(DataError, match=rf"token id {wrong} does not fit {dtype}"):
                writer.add(np.array([wrong, 0]), np.array([2]))
        assert writer.commit() == 0
    assert np.load(tmp_path / "a.npy").tolist() == [largest, 0]


@pytest.mark.parametrize("ids", [[5, 0, 0, 6, 0], [5, 0, 7, 6, 6], [0, 0, 1, 2, 0]])
def test_an_end_that_also_occurs_within_a_document_is_refused(tmp_path: Path, ids: list[int]) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", "uint16", header=True, lose_documents=False)
    with writer, pytest.raises(DataError, match="cannot record where documents end"):
        writer.add(np.array(ids), np.array([2, 5]))


def dataset(folder: Path, lengths: list[int], documents: list[int], pointers: list[int] | None = None) -> str:
    """A Megatron dataset of uint16 ids, written by its description."""
    starts = (np.cumsum([0, *lengths])[:-1] * 2).tolist() if pointers is None else pointers
    index = HEAD.pack(MAGIC, 1, 8, len(lengths), len(documents))
    index += np.array(lengths, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(documents, "<i8").tobytes()
    (folder / "m.idx").write_bytes(index)
    np.arange(sum(lengths), dtype="<u2").tofile(folder / "m.bin")
    return str(folder / "m")


@pytest.mark.parametrize("at", range(1, 12))
def test_a_document_of_two_sequences_is_seen_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(megatron, "_BLOCK", 4)
    whole = list(range(13))
    single = open_megatron(dataset(tmp_path, [3] * 12, whole))
    assert single.described.joins is not None and not single.described.joins()
    joined = open_megatron(dataset(tmp_path, [3] * 12, [number for number in whole if number != at]))
    assert joined.described.joins is not None and joined.described.joins()


def test_the_list_of_documents_ends_with_the_last_sequence(tmp_path: Path) -> None:
    (pair,) = pairs(dataset(tmp_path, [3, 3, 3], [0, 1, 3]))
    assert Index(pair).faults(True) == []
    index = tmp_path / "m.idx"
    content = bytearray(index.read_bytes())
    content[-16:-8] = np.array([4], "<i8").tobytes()
    index.write_bytes(bytes(content))
    assert any("document 1 begins after the last sequence" in fault for fault in Index(pair).faults(True))


@pytest.mark.parametrize("number", [1, 2, 5, 9])
def test_a_sequence_that_begins_elsewhere_is_found_in_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(shards, "_PART", 5)
    pointers = [6 * each for each in range(10)]
    pointers[number] += 2
    path = dataset(tmp_path, [3] * 10, list(range(11)), [6 * each for each in range(10)])
    (pair,) = pairs(path)
    dataset(tmp_path, [3] * 10, list(range(11)), pointers)
    (fault, *_) = Index(pair).faults(True)
    assert f"sequence {number} does not begin where sequence {number - 1} ends" in fault


def test_groups_of_files_are_full_at_their_size(tmp_path: Path) -> None:
    files = []
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"12345")
        files.append(find_one(str(tmp_path / str(number))))
    found = [len(part.files) for part in grouped([file for file in files if file is not None], 10)]
    assert found == [2, 2, 1]
    assert [part.size for part in grouped([file for file in files if file is not None], 5)] == [5] * 5


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([1, -(2**70)], f"holds the negative id {-(2**70)} at index 1"),
        ([1, 2**63], f"holds {2**63} at index 1, larger than any token id"),
        ([1, True], "holds a bool at index 1, not a token id"),
        ([1, None], "holds a null at index 1, not a token id"),
        (np.array([1, 2**63], dtype=np.uint64), f"holds {2**63} at index 1, larger than any token id"),
        (np.array([[1]]), "is a ndarray, not a list of token ids"),
    ],
)
def test_ids_that_no_vocabulary_has_are_named(value: object, fault: str) -> None:
    assert ids_of(value) == (None, fault)


def test_nothing_is_held_out_of_nothing_and_everything_of_everything() -> None:
    names = [f"file:{number}" for number in range(200)]
    for held_out, count in ((0.0, 0), (1.0, 200)):
        assert sum(in_split(name, "held_out", held_out) for name in names) == count
        assert sum(in_split(name, "train", held_out) for name in names) == 200 - count


def test_a_link_that_leads_nowhere_is_no_document_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's `sitecustomize.py` is a link to `/etc`, and a directory may be called like a module."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    (tmp_path / "os.py").write_text("first\n")
    (tmp_path / "zone.py").mkdir()
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "etc/sitecustomize.py")
    assert [file.name for file in stdlib_files().files] == ["os.py"]
