"""What a file holds: ids, sizes and checksums are looked at as it is read, and a fingerprint follows the content alone.

A fingerprint does not depend on times, on places, or on what a manifest says of the files.
"""

import itertools
import json
import os
import signal
import threading
import time
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
from forge_data import evaluation
from forge_data.commands.inspect import verify_tokens
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
from forge_data.sources.store import StoreSource, open_store
from forge_data.sources.store_writer import StoreWriter
from forge_data.storage import checksums, shards
from forge_data.storage.checksums import digest_of, sampled_ranges
from forge_data.storage.files import find
from forge_data.tokenizers.bytes import ByteTokenizer

LENGTH, ROWS = 16, 40
IDS = [number % 90 + 1 for number in range(LENGTH * ROWS)] + [0]


def as_store(folder: Path, dtype: str) -> tuple[Any, Path, int]:
    with StoreWriter(folder / "s", dtype=dtype) as writer:
        writer.add(np.array(IDS), np.array([len(IDS)]))
        writer.commit()
    return TokenStore(path=str(folder / "s")), folder / "s" / "shard-00000.bin", 0


def as_npy(folder: Path, dtype: str) -> tuple[Any, Path, int]:
    np.save(folder / "a.npy", np.array(IDS, dtype=dtype))
    return Tokens(path=str(folder / "a.npy")), folder / "a.npy", 128


def as_raw(folder: Path, dtype: Any) -> tuple[Any, Path, int]:
    np.array(IDS, dtype=dtype).tofile(folder / "a.bin")
    return Tokens(path=str(folder / "a.bin"), dtype=dtype), folder / "a.bin", 0


def as_llmc(folder: Path, dtype: str) -> tuple[Any, Path, int]:
    magic = (20240520, 1) if dtype == "uint16" else (20240801, 7)
    return Llmc(path=str(foreign.llmc(folder / "a.bin", IDS, *magic))), folder / "a.bin", 1024


def as_megatron(folder: Path, dtype: str) -> tuple[Any, Path, int]:
    return Megatron(path=str(foreign.megatron(folder / "m", [[IDS]], dtype))), folder / "m.bin", 0


def as_datatrove(folder: Path, dtype: str) -> tuple[Any, Path, int]:
    path = foreign.datatrove(folder / "a.ds", [IDS], "H" if dtype == "uint16" else "I")
    return Datatrove(path=str(path)), path, 0


WRITERS = [as_store, as_npy, as_raw, as_llmc, as_megatron, as_datatrove]


def write_id(path: Path, offset: int, dtype: str, token: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset + token * np.dtype(dtype).itemsize)
        file.write(np.array(value).astype(dtype).tobytes())


def stream(component: Any, *, vocab_size: int | None = None, batch: int = 4, **more: Any) -> Any:
    options = {"shuffle": "none", "verify": False} | more
    data = Data(sequence_length=LENGTH, sources=[component], **options)  # type: ignore[arg-type]
    return open_stream(data, workspace=Path("unused"), seed=1, global_batch=batch, micro_batch=batch, vocab_size=vocab_size)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("dtype", "wrong"), [("uint16", 65535), ("uint32", 4_000_000_000), ("int32", -2), ("uint16", 95)])
def test_fault_41_w8_an_id_is_looked_at_where_it_is_read(tmp_path: Path, write: Any, dtype: str, wrong: int) -> None:
    """Written into the file after it was opened, so that nothing but the read can see it; with and without a vocabulary."""
    if (write, dtype) in ((as_llmc, "int32"), (as_datatrove, "int32"), (as_megatron, "uint32")):
        return
    component, path, offset = write(tmp_path, dtype)
    for vocab_size in (91, 32_000, None):
        opened = stream(component, vocab_size=vocab_size)
        reading = opened.from_cursor(opened.start())
        next(reading)
        token = 4 * LENGTH + 5  # of the second step
        write_id(path, offset, dtype, token, wrong)
        at = offset + token * np.dtype(dtype).itemsize
        limit = "no id is negative" if wrong < 0 else "the largest id (in its manifest|when it was opened) was 90"
        with pytest.raises(DataError, match=rf"at token {token} \({path} at byte {at}\): id {wrong}, but ({limit})"):
            next(reading)
        write_id(path, offset, dtype, token, IDS[token])


def test_w8_an_id_outside_the_tokenizer_is_refused_though_the_model_has_room(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", dtype="uint16", tokenizer=ByteTokenizer()) as writer:
        writer.add(np.array([256] * 200), np.array([200]))
        writer.commit()
    write_id(tmp_path / "s" / "shard-00000.bin", 0, "uint16", 70, 257)
    opened = stream(TokenStore(path=str(tmp_path / "s")), vocab_size=512)
    reading = opened.from_cursor(opened.start())
    next(reading)
    with pytest.raises(DataError, match=r"at token 70 .*: id 257, but its tokenizer has 257 ids"):
        next(reading)


def test_w8_ids_of_held_out_sets_are_looked_at(tmp_path: Path) -> None:
    component, path, offset = as_store(tmp_path, "uint16")
    write_id(path, offset, "uint16", len(IDS) - 1, 65535)
    data = Data(sequence_length=LENGTH - 3, evaluation={"held_out": component})
    (held_out,) = evaluation(data, workspace=tmp_path, vocab_size=32_000).values()
    with pytest.raises(DataError, match=rf"at token {len(IDS) - 1} .*: id 65535"):
        list(held_out.batches(0, 1, 4))


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_w8_ids_of_planned_rows_are_looked_at(tmp_path: Path, packing: Any, make_store: Any) -> None:
    path = make_store("s", [[3] * 9] * 50)
    data = Data(sequence_length=32, sources=[TokenStore(path=str(path))], packing=packing, verify=False)
    opened = open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1)
    write_id(path / "shard-00000.bin", 0, "uint16", 123, 65535)
    with pytest.raises(DataError, match=r"at token 123 .*: id 65535"):
        for _ in itertools.islice(opened.from_cursor(opened.start()), 100):
            pass


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_fault_41_h10_a_file_that_shrinks_while_it_is_mapped_is_named(
    tmp_path: Path, write: Any, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of the end reads as zeros, those behind it end the process."""
    monkeypatch.setattr(shards, "READS", 3)
    component, path, _ = write(tmp_path, "uint16")
    data = Data(sequence_length=LENGTH, sources=[component], packing=packing, verify=False)
    opened = open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=4, micro_batch=4)
    reading = opened.from_cursor(opened.start())
    next(reading)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 2)
    with pytest.raises(DataError, match=rf"{path.name} was truncated to {size - 2} bytes while it was read, {size} are needed"):
        next(reading)


@pytest.mark.parametrize("write", [as_store, as_datatrove, as_megatron])
def test_h10_an_index_that_shrinks_is_named(tmp_path: Path, write: Any) -> None:
    component, _, _ = write(tmp_path, "uint16")
    lists = {as_store: "s/shard-00000.doc.npy", as_datatrove: "a.ds.index", as_megatron: "m.idx"}
    index = tmp_path / lists[write]
    opened = stream(component)
    reading = opened.from_cursor(opened.start())
    next(reading)
    with index.open("r+b") as file:
        file.truncate(4)
    with pytest.raises(DataError, match=rf"{index.name} was truncated to 4 bytes"):
        next(reading)


def test_h10_a_loader_worker_that_a_truncated_file_kills_says_so() -> None:
    from forge_data.loading.worker_pool import ended_how

    assert "signal 7 (SIGBUS): a mapped file was truncated" in ended_how(-signal.SIGBUS)
    assert "signal 9, perhaps because memory ran out" in ended_how(-signal.SIGKILL)
    assert "code 3" in ended_how(3)


def many_shards(folder: Path) -> Path:
    """Ten shards of 64 tokens and two documents, four rows each."""
    with StoreWriter(folder / "s", dtype="uint16", shard_tokens=64) as writer:
        for number in range(10):
            writer.add(np.arange(64) + number, np.array([32, 64]))
        writer.commit()
    return folder / "s"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def until_refused(reading: Any, steps: int) -> int:
    """Steps that were read before the refusal."""
    for step in range(steps):
        try:
            next(reading)
        except DataError:
            return step
        time.sleep(0.05)
    return steps


@pytest.mark.parametrize(("shard", "name"), [(0, "shard-00000.bin"), (4, "shard-00004.bin"), (4, "shard-00004.doc.npy")])
def test_w8_checksums_are_compared_while_the_first_epoch_is_read(
    tmp_path: Path, shard: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many_shards(tmp_path)
    size = (path / name).stat().st_size
    opened = stream(TokenStore(path=str(path)), verify=True)
    flip(path / name, size - 6 if name.endswith("bin") else size - 16)  # to another valid id, or another valid end
    reading = opened.from_cursor(opened.start())
    steps = until_refused(reading, 10)
    assert shard <= steps <= shard + 4, steps  # a step reads as many tokens as a shard has
    reading.close()
    unchecked = stream(TokenStore(path=str(path)), verify=False)
    reading = unchecked.from_cursor(unchecked.start())
    assert until_refused(reading, 9) == 9
    reading.close()


def test_w8_the_message_of_a_wrong_checksum_names_the_file(tmp_path: Path) -> None:
    path = many_shards(tmp_path)
    flip(path / "shard-00000.bin", 20)
    opened = stream(TokenStore(path=str(path)), verify=True)
    message = r"shard-00000\.bin: content differs from its checksum .*restore it or write the store again"
    with pytest.raises(DataError, match=message):
        for _ in opened.from_cursor(opened.start()):
            time.sleep(0.02)


def files_compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(checksums.FirstEpoch, "_compare", lambda _, entry: seen.append(entry.path.name))
    return seen


def test_w8_a_resume_goes_on_comparing_where_the_run_was_and_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file once in the first epoch, whoever reads it, and none in the second."""
    component = TokenStore(path=str(many_shards(tmp_path)))
    seen = files_compared(monkeypatch)
    cursor: Any = None

    def read(first: int, count: int, ranks: int) -> Any:
        found = None
        for rank in range(ranks):
            data = Data(sequence_length=LENGTH, sources=[component])
            opened = open_stream(data, workspace=tmp_path, seed=1, global_batch=4, micro_batch=4 // ranks, rank=rank, ranks=ranks)
            reading = opened.from_cursor(cursor or opened.start())
            for _ in range(count):
                _, found = next(reading)
            reading.close()
        return json.loads(json.dumps(found))

    cursor = read(0, 3, ranks=1)
    first = set(seen)
    assert {"shard-00000.bin", "shard-00002.doc.npy"} <= first and "shard-00009.bin" not in first
    seen.clear()
    cursor = read(3, 7, ranks=2)
    assert len(seen) == len(set(seen)), sorted(seen)
    everything = {f"shard-0000{number}.{kind}" for number in range(10) for kind in ("bin", "doc.npy")}
    assert first | set(seen) == everything
    seen.clear()
    read(10, 5, ranks=1)
    assert seen == []


def test_w8_verify_on_request_reads_everything(tmp_path: Path) -> None:
    path = many_shards(tmp_path)
    flip(path / "shard-00004.bin", 20)
    (fault,) = verify_tokens(StoreSource(path), None, lambda _: None)["faults"]
    assert "shard-00004.bin: content differs from its checksum" in fault


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 641}, "says 641 tokens, its shards hold 640"),
        ({"documents": 9}, "says 9 documents, its shards hold 20"),
        ({"tokens": "640"}, "is damaged"),
    ],
)
def test_w8_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = many_shards(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(DataError, match=message):
        StoreSource(path)


@pytest.mark.parametrize(("change", "what"), [("unlink", "is missing"), ("empty", "is empty"), ("long", "is too long")])
def test_w8_the_counts_of_a_store_are_checked_when_it_is_opened(tmp_path: Path, change: str, what: str) -> None:
    counts = many_shards(tmp_path) / "counts.npy"
    if change == "unlink":
        counts.unlink()
    else:
        counts.write_bytes(b"" if change == "empty" else counts.read_bytes() + b"1")
    with pytest.raises(DataError, match=rf"counts\.npy {what}"):
        StoreSource(tmp_path / "s")


def test_threads_of_checks_end_with_their_stream_and_hold_up_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = stream(TokenStore(path=str(many_shards(tmp_path))), verify=True)
    begun = threading.Event()

    def slow(path: Path, xxh3: str, stop: threading.Event) -> None:
        begun.set()
        assert stop.wait(30)

    monkeypatch.setattr(checksums, "fault_of", slow)
    reading = opened.from_cursor(opened.start())
    next(reading)
    assert begun.wait(30)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checksums")
    assert thread.daemon
    reading.close()
    thread.join(30)
    assert not thread.is_alive()


def test_the_thread_of_checks_ends_after_the_last_file(tmp_path: Path) -> None:
    opened = stream(TokenStore(path=str(many_shards(tmp_path))), verify=True)
    reading = opened.from_cursor(opened.start())
    for _ in range(12):
        next(reading)
    for thread in [thread for thread in threading.enumerate() if thread.name == "checksums"]:
        thread.join(30)
        assert not thread.is_alive()
    reading.close()


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
