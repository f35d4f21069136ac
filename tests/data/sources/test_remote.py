"""Files behind URLs: listed and opened without being fetched, fetched once, and never taken for an older version."""

import builtins
import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from data import foreign
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Datatrove, JsonLines, Llmc, Megatron, TextFiles, Tokens
from forge_data.storage import files
from forge_data.storage.files import find, local_path
from forge_data.tokenizers.bytes import ByteTokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket() -> Any:
    """A file system in memory."""
    system = fsspec.filesystem("memory")
    system.makedirs("/bucket", exist_ok=True)
    return system


def upload(system: Any, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"/bucket/{path.relative_to(folder).as_posix()}", path.read_bytes())


def opened(component: Any, workspace: Path = Path("unused")) -> Any:
    return component.build(SourceContext(workspace, ByteTokenizer(), 16, lambda _: None))


def fetched(cache: Path) -> list[str]:
    """Names of the whole files in the cache."""
    return sorted(path.name.partition("-")[2] for path in cache.rglob("*") if path.is_file())


def test_shards_behind_urls_are_read_like_files(tmp_path: Path, bucket: Any, cache: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for number in range(3):
        np.save(local / f"{number}.npy", np.arange(number * 5000, number * 5000 + 5000, dtype=np.uint16))
    upload(bucket, local)
    source, here = opened(Tokens(path="memory://bucket")), opened(Tokens(path=str(local)))
    assert fetched(cache) == []  # opening reads headers and samples, nothing as a whole
    assert source.fingerprint == here.fingerprint and source.tokens == 15_000
    assert source.max_id is None and source.seen_id == 14_999
    assert source.read(4990, 5010).tolist() == list(range(4990, 5010))
    assert fetched(cache) == ["0.npy", "1.npy"]  # what was touched, and no more
    assert source.read(0, 15_000).tolist() == here.read(0, 15_000).tolist()


@pytest.mark.parametrize(
    "path", ["memory://bucket/a/*.npy", "memory://bucket/a", "memory://bucket/a/1.npy", "memory://bucket/**/1.npy"]
)
def test_urls_of_files_directories_and_patterns(tmp_path: Path, bucket: Any, path: str) -> None:
    (tmp_path / "up" / "a").mkdir(parents=True)
    np.save(tmp_path / "up" / "a" / "1.npy", np.arange(9))
    (tmp_path / "up" / "a" / "notes.md").write_text("not tokens")
    upload(bucket, tmp_path / "up")
    assert opened(Tokens(path=path)).read(0, 9).tolist() == list(range(9))
    assert [file.name for file in find(path, (".npy",), "token")] == ["1.npy"] if "**" not in path else ["a/1.npy"]


def test_formats_of_several_files_behind_urls(tmp_path: Path, bucket: Any, cache: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    documents = [[5, 6, 0], [7, 0]]
    foreign.megatron(local / "m", [[document] for document in documents])
    foreign.datatrove(local / "a.ds", documents)
    foreign.llmc(local / "b.bin", [50256, 5, 6, 50256, 7])
    upload(bucket, local)
    for component, path in ((Megatron, "m"), (Datatrove, "a.ds"), (Llmc, "b.bin")):
        source, here = opened(component(path=f"memory://bucket/{path}")), opened(component(path=str(local / path)))
        assert source.fingerprint == here.fingerprint
        assert source.ends().tolist() == here.ends().tolist() == [3, 5]
        assert source.read(0, 5).tolist() == here.read(0, 5).tolist()
    with pytest.raises(DataError, match="is truncated: it ends at byte 9"):
        bucket.pipe_file("/bucket/m.bin", (local / "m.bin").read_bytes()[:9])
        opened(Megatron(path="memory://bucket/m"))


def test_text_behind_urls_is_prepared_like_files(tmp_path: Path, bucket: Any, cache: Path) -> None:
    for number, text in enumerate(["first", "second"]):
        bucket.pipe_file(f"/bucket/text/{number}.txt", text.encode())
        bucket.pipe_file(f"/bucket/lines/{number}.jsonl.gz", gzip.compress(json.dumps({"text": text}).encode()))
    for component in (TextFiles(path="memory://bucket/text"), JsonLines(path="memory://bucket/lines/*.gz")):
        store = opened(component, tmp_path / "w")
        assert (store.read(0, store.tokens) % 256).astype(np.uint8).tobytes() == b"first\0second\0"
    assert fetched(cache) == ["0.jsonl.gz", "1.jsonl.gz"]


def test_a_file_that_changed_is_fetched_again(bucket: Any, cache: Path) -> None:
    bucket.pipe_file("/bucket/a.bin", np.arange(4, dtype="<u2").tobytes())
    (file,) = find("memory://bucket/a.bin", (".bin",), "token")
    assert local_path(file) == local_path(file) and fetched(cache) == ["a.bin"]
    before = opened(Tokens(path="memory://bucket/a.bin", dtype="uint16"))
    assert before.read(0, 4).tolist() == [0, 1, 2, 3]
    bucket.pipe_file("/bucket/a.bin", np.arange(10, 14, dtype="<u2").tobytes())
    after = opened(Tokens(path="memory://bucket/a.bin", dtype="uint16"))
    assert after.read(0, 4).tolist() == [10, 11, 12, 13] and after.fingerprint != before.fingerprint
    (stale,) = find("memory://bucket/a.bin", (".bin",), "token")
    bucket.pipe_file("/bucket/a.bin", b"12")
    for path in cache.rglob("*a.bin"):
        path.unlink()
    with pytest.raises(DataError, match="had 8 bytes and now has 2: it changed while it was read"):
        local_path(stale)
    assert fetched(cache) == []


def test_a_file_url_and_a_path_are_the_same_corpus(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    assert opened(Tokens(path=f"file://{tmp_path}/a.npy")).fingerprint == opened(Tokens(path=str(tmp_path / "a.npy"))).fingerprint


def test_urls_that_name_nothing_are_refused(bucket: Any) -> None:
    for path in ("memory://bucket/none.npy", "memory://bucket/none*.npy", "memory://bucket/"):
        with pytest.raises(DataError, match="matches no token file"):
            opened(Tokens(path=path))
    with pytest.raises(DataError, match="nothing://x cannot be read: Protocol not known"):
        opened(Tokens(path="nothing://x"))
    with pytest.raises(
        DataError, match=r"gs://x/a.npy needs fsspec and its package for this kind of URL \(.*gcsfs.*forge-data\[remote\]"
    ):
        opened(Tokens(path="gs://x/a.npy"))


def test_a_cache_that_cannot_be_written_is_a_message(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.pipe_file("/bucket/a.bin", b"1234")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be written: Not a directory; set FORGE_CACHE"):
        opened(Tokens(path="memory://bucket/a.bin", dtype="uint16")).read(0, 2)


def test_the_cache_is_below_the_home_directory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_CACHE")
    assert files.cache_directory() == Path.home() / ".cache" / "forge"


ABSENT = [
    ("fsspec", lambda: Tokens(path="memory://bucket/a.npy"), "forge-data[remote]"),
    (
        "pyarrow",
        lambda: __import__("forge_data.components", fromlist=["Parquet"]).Parquet(path="a.parquet"),
        "forge-data[arrow]",
    ),
    (
        "datasets",
        lambda: __import__("forge_data.components", fromlist=["HuggingFace"]).HuggingFace(path="a"),
        "forge-data[huggingface]",
    ),
    ("zstandard", lambda: JsonLines(path="a.jsonl.zst"), "forge-data[zstd]"),
    (
        "tiktoken",
        lambda: __import__("forge_data.components", fromlist=["Tiktoken"]).Tiktoken(),
        "forge-data[tiktoken]",
    ),
    (
        "sentencepiece",
        lambda: __import__("forge_data.components", fromlist=["S"]).SentencePiece(path="a.model"),
        "forge-data[sentencepiece]",
    ),
]


@pytest.mark.parametrize(("library", "component", "extra"), ABSENT, ids=[case[0] for case in ABSENT])
def test_an_absent_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, component: Any, extra: str
) -> None:
    for name in ("a.parquet", "a.jsonl.zst", "a.model"):
        (tmp_path / name).write_bytes(b"content")
    monkeypatch.chdir(tmp_path)
    real = builtins.__import__

    def without(name: str, *more: Any, **rest: Any) -> Any:
        if name.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)
        return real(name, *more, **rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError) as caught:
        opened(component(), tmp_path / "w")
    assert f"pip install '{extra}'" in str(caught.value)
