"""Every format of tokens is read as a plain loop reads it, and a file that is not what it claims to be is refused."""

import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import foreign
from data.steps import steps_of
from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceComponent, SourceContext
from forge_data.components import Datatrove, Llmc, Megatron, Tokens, TokenStore
from forge_data.section import Data
from forge_data.sources.megatron import Index, pairs, search
from forge_data.sources.store_writer import StoreWriter
from forge_data.storage import shards

EOS, BOS = 0, 50256
Corpus = list[list[list[int]]]


def opened(component: Any) -> Source:
    return component.build(SourceContext(Path("unused"), None, 16, lambda _: None))


def as_store(folder: Path, files: Corpus) -> SourceComponent:
    with StoreWriter(folder / "store", dtype="uint16", shard_tokens=50) as writer:
        for document in (document for file in files for document in file):
            writer.add(np.array(document), np.array([len(document)]))
        writer.commit()
    return TokenStore(path=str(folder / "store"))


def as_npy(folder: Path, files: Corpus) -> SourceComponent:
    for number, file in enumerate(files):
        np.save(folder / f"{number:03d}.npy", np.concatenate(file).astype("<u2"))
    return Tokens(path=str(folder), eos=EOS)


def as_raw(folder: Path, files: Corpus) -> SourceComponent:
    for number, file in enumerate(files):
        np.concatenate(file).astype("<u4").tofile(folder / f"{number:03d}.bin")
    return Tokens(path=f"{folder}/0*.bin", eos=EOS, dtype="uint32")


def as_raw_bos(folder: Path, files: Corpus) -> SourceComponent:
    for number, file in enumerate(files):
        np.concatenate([[BOS, *document[:-1]] for document in file]).astype("<u2").tofile(folder / f"{number:03d}.bin")
    return Tokens(path=str(folder), bos=BOS, dtype="uint16")


def as_megatron(folder: Path, files: Corpus) -> SourceComponent:
    for number, file in enumerate(files):
        # Some documents in two sequences, which says nothing about where documents end.
        split = [[document[:3], document[3:]] if len(document) > 5 else [document] for document in file]
        foreign.megatron(folder / f"{number:03d}", split, "int32" if len(files) % 2 else "uint16")
    return Megatron(path=str(folder))


def as_llmc(folder: Path, files: Corpus) -> SourceComponent:
    stream = np.concatenate([[BOS, *document[:-1]] for file in files for document in file]).tolist()
    for number in range(0, len(stream), 70):  # cut anywhere: documents go on in the next file
        foreign.llmc(folder / f"{number:05d}.bin", stream[number : number + 70])
    return Llmc(path=str(folder))


def as_datatrove(folder: Path, files: Corpus) -> SourceComponent:
    for number, file in enumerate(files):
        foreign.datatrove(folder / f"{number:03d}_shuffled.ds", file, "HI"[len(files) % 2])
    return Datatrove(path=str(folder))


FORMATS: list[Callable[[Path, Corpus], SourceComponent]] = [
    as_store,
    as_npy,
    as_raw,
    as_raw_bos,
    as_megatron,
    as_llmc,
    as_datatrove,
]
lengths = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=8), min_size=1, max_size=5)


@pytest.mark.parametrize("write", FORMATS)
@given(sizes=lengths, length=st.integers(1, 40), kept=st.sampled_from([1, 100]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_format_gives_the_tokens_and_borders_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, write: Any, sizes: list[list[int]], length: int, kept: int
) -> None:
    marked = write in (as_raw_bos, as_llmc)
    counter = iter(range(1, 10**6))
    files = [[[*(next(counter) for _ in range(size - 1)), EOS] for size in file] for file in sizes]
    source = opened(write(tmp_path_factory.mktemp("corpus"), files))
    for own in (getattr(source, name, None) for name in ("shards", "_tokens")):
        if own is not None:
            own._data._limit = kept
    stream: list[int] = []
    ends: list[int] = []
    for document in (document for file in files for document in file):
        stream += [BOS, *document[:-1]] if marked else document
        ends.append(len(stream))
    assert source.tokens == len(stream) and source.max_id == max(stream)
    assert source.read(0, source.tokens).tolist() == stream
    assert source.ends().tolist() == ends
    rng = np.random.default_rng(length)
    for start, stop in np.sort(rng.integers(0, source.tokens + 1, size=(12, 2))).tolist():
        assert source.read(start, stop).tolist() == stream[start:stop]
        assert source.ends(start, stop).tolist() == [end for end in ends if start < end <= stop]
    starts = rng.integers(0, source.tokens, size=9).astype(np.uint64)
    rows, columns = source.borders(starts, length)
    found = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == [
        (row, end - start) for row, start in enumerate(starts.tolist()) for end in ends if start < end <= start + length
    ]
    assert [len(part) for part in source.borders(starts[:0], length)] == [0, 0]
    if length <= len(stream):
        inside = rng.integers(0, len(stream) - length + 1, size=9)
        assert source.windows(inside, length).tolist() == [stream[start : start + length] for start in inside.tolist()]
        for outside in ([len(stream) - length + 1], [0, -1]):
            with pytest.raises(IndexError, match=f"not inside the {len(stream)} tokens"):
                source.windows(np.array(outside), length)
    copied = pickle.loads(pickle.dumps(source))  # noqa: S301 (our own)
    assert copied.read(0, source.tokens).tolist() == stream and copied.ends().tolist() == ends


@pytest.mark.parametrize("write", FORMATS)
def test_every_window_of_a_small_corpus_has_the_borders_of_a_loop(tmp_path: Path, write: Any) -> None:
    """All starts and lengths, so that every way to cross from one file into others is there."""
    files = [[[1, 0], [2, 0]], [[0], [3, 0], [4, 5, 6, 0]], [[0]], [[7, 0], [0], [8, 9, 0]]] * 3
    source = opened(write(tmp_path, files))
    ends = np.cumsum([len(document) for file in files for document in file]).tolist()
    assert source.ends().tolist() == ends
    starts = np.arange(source.tokens, dtype=np.uint64)
    for length in range(1, 12):
        rows, columns = source.borders(starts, length)
        found = list(zip(rows.tolist(), columns.tolist(), strict=True))
        assert found == [(start, end - start) for start in starts.tolist() for end in ends if start < end <= start + length]


def test_a_copy_for_another_process_has_no_tokens_in_it(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100_000, dtype=np.uint32))
    foreign.megatron(tmp_path / "m", [[[number % 7, 0]] for number in range(5_000)])
    for component in (Tokens(path=str(tmp_path / "a.npy")), Megatron(path=str(tmp_path / "m"))):
        source = opened(component)
        source.ends(0, 500)
        assert len(pickle.dumps(source)) < 5_000


@pytest.mark.parametrize("write", FORMATS)
def test_fingerprints_follow_the_content(tmp_path: Path, write: Any) -> None:
    """Equal wherever the files lie; another token, another border or another order of files is another corpus."""
    files = [[[3, 4, 5, 0], [6, 0]], [[7, 8, 0], [9, 1, 0], [2, 2, 0]]]
    changed = {
        "same": files,
        "token": [[[3, 4, 5, 0], [6, 0]], [[7, 8, 0], [9, 2, 0], [2, 2, 0]]],
        "border": [[[3, 0], [4, 5, 6, 0]], [[7, 8, 0], [9, 1, 0], [2, 2, 0]]],
        "order": [files[1], files[0]],
        "more": [*files, [[1, 0]]],
    }
    fingerprints = {"first": opened(write(_made(tmp_path / "first"), files)).fingerprint}
    for name, corpus in changed.items():
        fingerprints[name] = opened(write(_made(tmp_path / name), corpus)).fingerprint
    assert fingerprints.pop("same") == fingerprints["first"]
    assert len(set(fingerprints.values())) == len(fingerprints), fingerprints


def test_fault_21_files_that_are_cut_elsewhere_are_another_corpus(tmp_path: Path) -> None:
    """Each file is a document here, so the same tokens have other borders."""
    found = {}
    for name, cut in (("one", 3), ("same", 3), ("other", 5)):
        _made(tmp_path / name)
        for number, part in enumerate(np.split(np.arange(8, dtype=np.uint16), [cut])):
            np.save(tmp_path / name / f"{number}.npy", part)
        found[name] = opened(Tokens(path=str(tmp_path / name))).fingerprint
    assert found["one"] == found["same"] != found["other"]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_run_over_every_format_resumes_anywhere_on_other_ranks(tmp_path: Path, write: Any, packing: Any) -> None:
    rng = np.random.default_rng(5)
    counter = iter(range(1, 10**6))
    files = [[[*(next(counter) for _ in range(int(size))), EOS] for size in rng.integers(1, 30, size=20)] for _ in range(3)]
    data = Data(sequence_length=8, sources=[write(tmp_path, files)], packing=packing)
    whole, _ = steps_of(data, 8, batch=8, workspace=tmp_path / "w")
    before, cursor = steps_of(data, 3, batch=8, ranks=2, micro=2, workspace=tmp_path / "w")
    after, _ = steps_of(data, 5, batch=8, ranks=4, cursor=json.loads(json.dumps(cursor)), workspace=tmp_path / "other")
    assert before + after == whole


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_ten_thousand_shards_open_without_being_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their headers are read, 64 blocks of the corpus are, and no more files stay open than allowed."""
    np.arange(800, dtype="<u2").tofile(tmp_path / "00000.bin")
    for number in range(1, 10_000):
        os.link(tmp_path / "00000.bin", tmp_path / f"{number:05d}.bin")
    mapped = []
    real = shards.map_file
    monkeypatch.setattr(shards, "map_file", lambda *given: mapped.append(given) or real(*given))
    monkeypatch.setattr("forge_data.sources.token_files.SCANNED", 10)
    monkeypatch.setattr(shards, "open_files", lambda: 20)
    source: Any = opened(Tokens(path=str(tmp_path), dtype="uint16"))
    assert source.tokens == 8_000_000 and source.max_id is None and source.seen_id == 799
    assert len(mapped) <= 64 * 7  # a block of 4,096 tokens lies in 6 or 7 files here
    assert len(source.shards._data._things) == 20
    mapped.clear()
    assert source.read(4_000_000, 4_000_800).tolist() == list(range(800)) and len(mapped) == 1


def test_shards_too_large_to_scan_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_data.sources.token_files.SCANNED", 10)
    ids = np.ones(1_000_000, dtype="<u2")
    ids[-1] = 900
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin at byte 1999998 \(token 999999\): id 900 is not in a vocabulary of 900"):
        opened(Tokens(path=str(tmp_path / "a.bin"), dtype="uint16", vocab_size=900))


@pytest.mark.parametrize("write", [as_megatron, as_datatrove, as_raw])
def test_many_files_are_found_by_listing_and_still_checked(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [[[number + 1, EOS]] for number in range(40)]
    component = write(tmp_path, files)
    monkeypatch.setattr(
        "forge_data.storage.files.find_one", lambda path: None if path.endswith("m.idx") else pytest.fail(f"asked for {path}")
    )
    monkeypatch.setattr("forge_data.sources.megatron.find_one", lambda _: None)
    assert opened(component).ends().tolist() == list(range(2, 82, 2))
    (tmp_path / "020.idx").write_bytes(b"an index")
    (tmp_path / "020_shuffled.ds.index").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"020\.idx is not a Megatron|020\.bin has a Megatron index|no .*020_shuffled\.ds\.index"):
        opened(component)


def test_zero_length_documents_make_no_border(tmp_path: Path) -> None:
    documents = [[[]], [[1, 2]], [[]], [[], [3]], [], [[4, 5]], [[]], []]
    source: Any = opened(Megatron(path=str(foreign.megatron(tmp_path / "holes", documents))))
    assert source.ends().tolist() == [2, 3, 5] and source.described.documents == 8
    rows, columns = source.borders(np.array([0, 2], dtype=np.uint64), 3)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 1), (1, 3)]


@given(array=st.lists(st.integers(0, 30), max_size=40).map(sorted), keys=st.lists(st.integers(-1, 31), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_search_is_numpys_search(array: list[int], keys: list[int]) -> None:
    unaligned = np.frombuffer(b"x" + np.array(array, dtype="<i8").tobytes(), dtype="<i8", offset=1)
    assert search(unaligned, np.array(keys)).tolist() == np.searchsorted(array, keys, side="right").tolist()


def test_a_large_megatron_index_is_never_copied(tmp_path: Path) -> None:
    """numpy copies an unaligned array to search it: 400 kB at every step here."""
    foreign.megatron(tmp_path / "large", [[[number % 7, 0]] for number in range(50_000)])
    index = Index(pairs(str(tmp_path / "large"))[0])
    tracemalloc.start()
    rows, columns = index.borders(np.array([3, 99_990]), 6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert columns.tolist() == [1, 3, 5, 2, 4, 6] and rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert peak < 50_000


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
        ("m.idx", put(17, b"\7"), "token ids must be integers, found float32"),
        ("m.idx", put(17, b"\4"), r"m\.bin is truncated: it ends at byte 18, its index says 24 \(int32\)"),
        ("m.idx", put(46, struct.pack("<q", 2)), "at byte 46: the first sequence begins at byte 2"),
        ("m.idx", put(54, struct.pack("<q", 6)), "at byte 54: sequence 1 does not begin where sequence 0 ends"),
        ("m.idx", put(34, struct.pack("<i", -4)), "at byte 34: sequence 0 has a negative length"),
        ("m.idx", put(70, struct.pack("<q", 1)), "at byte 70: documents begin at sequence 1 and end at 3"),
        ("m.idx", put(78, struct.pack("<q", 3)), "at byte 86: document 2 begins before the previous document"),
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
    with pytest.raises(DataError, match=r"holds (uint16|int32), but .* holds (uint16|int32)"):
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
    with pytest.raises(DataError, match=r"b\.npy holds uint16, but .*c\.npy holds uint32"):
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
    with pytest.raises(DataError, match="3 bytes, not a positive multiple of 8"):
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
