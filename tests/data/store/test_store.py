"""Stores: written whole or not at all, opened without being read, and never mistaken for something else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Tokens
from forge_data.sources.arrays import open_tokens
from forge_data.sources.store import StoreSource, open_store
from forge_data.sources.store_writer import StoreWriter
from forge_data.tokenizers.bytes import ByteTokenizer


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("shard_tokens", [10, 64, 10_000])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_what_was_written_is_read(make_store: Any, shard_tokens: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, 60_000, size=size).tolist() for size in rng.integers(0, 40, size=50)]
    store = StoreSource(make_store("store", documents, dtype=dtype, shard_tokens=shard_tokens))
    stream = np.concatenate([[*document, 0] for document in documents])
    assert store.read(0, store.tokens).tolist() == stream.tolist()
    assert store.ends().tolist() == np.cumsum([len(document) + 1 for document in documents]).tolist()
    assert store.max_id == stream.max() and store.documents == 50
    assert np.array_equal(store.counts(), np.bincount(stream))
    assert store.verify() == []
    for start, stop in rng.integers(0, store.tokens, size=(40, 2)).tolist():
        start, stop = min(start, stop), max(start, stop)
        assert store.read(start, stop).tolist() == stream[start:stop].tolist()
        assert store.ends(start, stop).tolist() == [end for end in store.ends().tolist() if start < end <= stop]


def test_every_shard_is_whole_by_itself(make_store: Any) -> None:
    path = make_store("store", [[1] * 5, [2] * 30, [3] * 4], shard_tokens=12)
    for shard in StoreSource(path).manifest.shards:
        data = np.fromfile(path / shard.data.file, dtype="<u2")
        assert np.load(path / shard.ends.file)[-1] == len(data) and data[-1] == 0


def test_opening_reads_no_shard(make_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store("store", [[1, 2, 3]] * 100, shard_tokens=40)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(np, "memmap", refuse)
    monkeypatch.setattr(np, "load", refuse)
    assert StoreSource(path).tokens == 400


@pytest.mark.parametrize("name", ["shard-00001.bin", "counts.npy"])
def test_a_flipped_byte_is_found(make_store: Any, name: str) -> None:
    path = make_store("store", [[1, 2, 3]] * 100, shard_tokens=40)
    flip(path / name, -2)
    faults = StoreSource(path).verify()
    assert faults and all(name in fault for fault in faults)


def test_wrong_claims_with_right_checksums_are_found(make_store: Any) -> None:
    path = make_store("store", [[1, 2, 900]] * 10)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["shards"][0]["max_id"] = 800
    (path / "manifest.json").write_text(json.dumps(manifest))
    (fault,) = StoreSource(path).verify()
    assert "byte 4" in fault and "max_id = 800" in fault


@pytest.mark.parametrize(("size", "word"), [(0, "empty"), (13, "truncated"), (5000, "too long")])
def test_a_shard_of_another_size_is_refused_with_its_name_and_offset(make_store: Any, size: int, word: str) -> None:
    path = make_store("store", [[1, 2, 3]] * 100)
    content = (path / "shard-00000.bin").read_bytes()
    (path / "shard-00000.bin").write_bytes((content * 10)[:size])
    with pytest.raises(DataError, match=rf"shard-00000.bin is {word}: it ends at byte {size}"):
        StoreSource(path)


def test_missing_files_are_refused(make_store: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        StoreSource(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a token store"):
        StoreSource(tmp_path)
    path = make_store("store", [[1]])
    (path / "shard-00000.bin").unlink()
    with pytest.raises(DataError, match="is missing"):
        StoreSource(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "unknown dtype"),
        ({"version": 99}, "version 99"),
        ({"shards": None}, "damaged"),
        ({"format": "other"}, "has format other"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(make_store: Any, change: dict[str, Any], message: str) -> None:
    path = make_store("store", [[1]])
    manifest = json.loads((path / "manifest.json").read_text()) | change
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=message):
        StoreSource(path)


def test_a_manifest_cannot_name_files_elsewhere(make_store: Any) -> None:
    path = make_store("store", [[1]])
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["shards"][0]["data"]["file"] = "../store/shard-00000.bin"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="not inside the store"):
        StoreSource(path)


def test_a_store_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "store", dtype="uint16") as writer:
        writer.add(np.array([1, 2]), np.array([2]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_never_overwritten(make_store: Any, tmp_path: Path) -> None:
    path = make_store("store", [[1]])
    with pytest.raises(DataError, match="not empty"):
        StoreWriter(path, dtype="uint16")


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for ids in ([65_536], [-1]):
        with StoreWriter(tmp_path / "store", dtype="uint16") as writer, pytest.raises(DataError, match="does not fit uint16"):
            writer.add(np.array(ids), np.array([1]))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", dtype="uint16") as writer, pytest.raises(DataError, match="no document"):
        writer.commit()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    with StoreWriter(tmp_path / "store", dtype="uint16", tokenizer=tokenizer) as writer:
        writer.add(np.array([65, 256]), np.array([2]))
        writer.commit()
    assert open_store(tmp_path / "store", tokenizer).vocab_size == 257
    tokenizer.fingerprint = "0" * 64
    with pytest.raises(DataError, match="written with tokenizer bytes"):
        open_store(tmp_path / "store", tokenizer)


def tokens_of(path: Path, **fields: Any) -> Any:
    return Tokens(path=str(path), **fields).build(SourceContext(path.parent, None, 1, print))


def test_a_dtype_is_never_guessed(tmp_path: Path) -> None:
    """An even number of uint16 tokens is also a number of uint32 tokens: known failure A17."""
    ids = np.array([1, 2, 3, 4, 0, 5], dtype="<u2")
    ids.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(DataError, match="dtype is unknown"):
        tokens_of(tmp_path / "raw.bin")
    raw, npy = tokens_of(tmp_path / "raw.bin", dtype="uint16", eos=0), tokens_of(tmp_path / "ids.npy")
    assert raw.read(0, 6).tolist() == npy.read(0, 6).tolist() == ids.tolist()
    assert raw.ends().tolist() == [5, 6] and npy.ends().tolist() == [6]
    with pytest.raises(DataError, match="header says uint16"):
        tokens_of(tmp_path / "ids.npy", dtype="uint32")


def test_a_store_says_its_dtype(make_store: Any) -> None:
    path = make_store("store", [[1, 2, 3], [4]])
    assert StoreSource(path).read(0, 6).dtype == np.uint16
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"dtype": "uint32"}))
    with pytest.raises(DataError, match="12 bytes for 6 tokens"):
        StoreSource(path)


def test_bad_token_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"\1\2\3")
    with pytest.raises(DataError, match="not a multiple of 2"):
        tokens_of(tmp_path / "odd.bin", dtype="uint16")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        tokens_of(tmp_path / "empty.bin", dtype="uint16")
    with pytest.raises(DataError, match=r"none.bin does not exist"):
        tokens_of(tmp_path / "none.bin", dtype="uint16")
    np.save(tmp_path / "float.npy", np.zeros(3))
    with pytest.raises(DataError, match="integers"):
        tokens_of(tmp_path / "float.npy")
    np.save(tmp_path / "signed.npy", np.array([1, -5]))
    with pytest.raises(DataError, match=r"at byte 136 .token 1.: negative"):
        open_tokens(str(tmp_path / "signed.npy"))
