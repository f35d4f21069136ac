"""A fingerprint follows the content and nothing else: not times, not places, not what a manifest says of the files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data import foreign
from forge_core.errors import DataError
from forge_data.components import (
    Arrow,
    Bytes,
    Datatrove,
    HuggingFace,
    JsonLines,
    Llmc,
    Megatron,
    Parquet,
    TextFiles,
    Tokens,
    TokenStore,
)
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.sources.store import open_store
from forge_data.storage import checksums
from forge_data.storage.checksums import digest_of, sampled_ranges
from forge_data.storage.files import find

LINES = [json.dumps({"text": f"document {number:04d} of a corpus"}) for number in range(200)]
Rewrite = Callable[[], object]


def keeping_times(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Writes a file anew with the same size and the same times."""
    stat, content = path.stat(), path.read_bytes()
    changed = change(content)
    assert len(changed) == len(content) and changed != content
    path.write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def other_digits(content: bytes) -> bytes:
    return content.replace(b"0107", b"9107")


def as_jsonl(folder: Path) -> tuple[Any, Path]:
    (folder / "a.jsonl").write_text("\n".join(LINES))
    return JsonLines(path=str(folder / "a.jsonl")), folder / "a.jsonl"


def as_text(folder: Path) -> tuple[Any, Path]:
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n".join(LINES[50 * number :]))
    return TextFiles(path=str(folder)), folder / "1.txt"


def as_parquet(folder: Path) -> tuple[Any, Path]:
    table = pa.table({"text": [json.loads(line)["text"] for line in LINES]})
    parquet.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False)
    return Parquet(path=str(folder / "a.parquet")), folder / "a.parquet"


def as_arrow(folder: Path) -> tuple[Any, Path]:
    table = pa.table({"text": [json.loads(line)["text"] for line in LINES]})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return Arrow(path=str(folder / "a.arrow")), folder / "a.arrow"


def as_saved_dataset(folder: Path) -> tuple[Any, Path]:
    datasets.Dataset.from_dict({"text": [json.loads(line)["text"] for line in LINES]}).save_to_disk(folder / "set")
    return HuggingFace(path=str(folder / "set")), folder / "set" / "data-00000-of-00001.arrow"


def as_data_files(folder: Path) -> tuple[Any, Path]:
    (folder / "files").mkdir()
    (folder / "files" / "a.jsonl").write_text("\n".join(LINES))
    return HuggingFace(path=str(folder / "files")), folder / "files" / "a.jsonl"


RECORDS = [as_jsonl, as_text, as_parquet, as_arrow, as_saved_dataset, as_data_files]


def stream_of(component: Any, workspace: Path) -> Any:
    data = Data(sequence_length=16, sources=[component], tokenizer=Bytes())
    return open_stream(data, workspace=workspace, seed=1, global_batch=4, micro_batch=4)


def cursor_after_a_step(component: Any, workspace: Path) -> Any:
    stream = stream_of(component, workspace)
    _, cursor = next(iter(stream.from_cursor(stream.start())))
    return json.loads(json.dumps(cursor))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("write", RECORDS)
def test_fault_21_w11_other_content_of_the_same_size_and_time_is_another_corpus(
    tmp_path: Path, write: Any, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    component, path = write(tmp_path)
    if streamed:
        if write is as_text:
            return
        component = type(component)(path=component.path, stream=True)
    cursor = cursor_after_a_step(component, tmp_path / "w")
    os.utime(path, (1, 1))  # what `touch`, a copy or a restored backup does
    next(iter(stream_of(component, tmp_path / "w").from_cursor(cursor)))
    keeping_times(path, other_digits)
    if write is as_data_files and not streamed:
        return  # the library's own cache of the files, which it keys by their times, is what is read
    with pytest.raises(DataError, match=r"sources\.\w+\.fingerprint was"):
        stream_of(component, tmp_path / "w").from_cursor(cursor)


@pytest.mark.parametrize("kind", ["store", "npy", "raw", "megatron", "datatrove", "llmc"])
def test_fault_21_w11_token_files_are_known_by_their_content(tmp_path: Path, kind: str, make_store: Any) -> None:
    documents = [[number % 500 + 1, 7, 8, 0] for number in range(100)]
    ids = [token for document in documents for token in document]
    path = tmp_path / "a.bin"
    if kind == "store":
        component: Any = TokenStore(path=str(make_store("s", [document[:-1] for document in documents])))
        path = tmp_path / "s" / "shard-00000.bin"
    elif kind == "npy":
        np.save(tmp_path / "a.npy", np.array(ids, dtype=np.uint16))
        component, path = Tokens(path=str(tmp_path / "a.npy")), tmp_path / "a.npy"
    elif kind == "raw":
        np.array(ids, dtype=np.uint16).tofile(path)
        component = Tokens(path=str(path), dtype="uint16")
    elif kind == "megatron":
        component = Megatron(path=str(foreign.megatron(tmp_path / "m", [[document] for document in documents])))
        path = tmp_path / "m.bin"
    elif kind == "datatrove":
        path = foreign.datatrove(tmp_path / "a.ds", documents)
        component = Datatrove(path=str(path))
    else:
        component = Llmc(path=str(foreign.llmc(path, ids)), bos=0)
    data = Data(sequence_length=16, sources=[component])

    def stream() -> Any:
        return open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=4, micro_batch=4)

    _, cursor = next(iter(stream().from_cursor(stream().start())))
    os.utime(path, (1, 1))
    next(iter(stream().from_cursor(cursor)))
    keeping_times(path, lambda content: content[:-300] + bytes([content[-300] ^ 1]) + content[-299:])
    with pytest.raises(DataError, match=r"sources\.\w+\.fingerprint was"):
        stream().from_cursor(cursor)


def test_w11_the_borders_of_a_store_are_part_of_its_content(make_store: Any, tmp_path: Path) -> None:
    path = make_store("s", [[1, 2, 3]] * 40)
    before = open_store(path).fingerprint
    keeping_times(path / "shard-00000.doc.npy", lambda content: content[:-24] + (151).to_bytes(8, "little") + content[-16:])
    assert open_store(path).fingerprint != before


def test_places_are_fixed_cover_the_ends_and_lie_in_every_stretch() -> None:
    assert sampled_ranges(100, 16, 64) == [(0, 100)]
    for total in (10_000_000, 10**13):
        found = sampled_ranges(total, 4096, 64)
        assert found == sampled_ranges(total, 4096, 64) and found[0] == (0, 4096) and found[-1] == (total - 4096, total)
        assert all(start >= 0 and stop <= total and stop - start == 4096 for start, stop in found)
        assert sorted(found) == found and len(found) == 66
        starts = np.array([start for start, _ in found[1:-1]])
        assert (starts // (total // 64 + 1) == np.arange(64)).all()
        assert (
            len({int(start - number * (total // 64)) for number, start in enumerate(starts.tolist())}) > 60
        )  # not at even places
    assert sampled_ranges(10_000_000, 4096, 64)[5] != sampled_ranges(10_000_001, 4096, 64)[5]


def test_a_large_corpus_is_known_by_its_sizes_edges_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file's head and tail, and blocks of all together; not the whole."""
    monkeypatch.setattr(checksums, "WHOLE", 1000)
    monkeypatch.setattr(checksums, "EDGE", 16)
    rng = np.random.default_rng(0)
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_bytes(rng.integers(32, 127, size=5000, dtype=np.uint8).tobytes())

    def digest() -> str:
        return digest_of(find(str(tmp_path), (".txt",), "text"), blocks=8, block=64)

    first = digest()
    assert digest() == first
    target = tmp_path / "07.txt"
    for at in (0, 15, 4984, 4999):
        content = bytearray(target.read_bytes())
        content[at] ^= 1
        target.write_bytes(content)
        assert digest() != first
        content[at] ^= 1
        target.write_bytes(content)
    assert digest() == first
    seen = 0
    for number in range(20):  # some places are seen, most are not: 8 blocks of 64 bytes of 100,000
        path = tmp_path / f"{number:02d}.txt"
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes(800) + content[900:])
        seen += digest() != first
        path.write_bytes(content)
    assert 0 < seen < 20
    target.rename(tmp_path / "07b.txt")
    assert digest() != first
