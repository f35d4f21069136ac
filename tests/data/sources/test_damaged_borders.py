"""Document borders that do not ascend or lie outside the tokens: refused by name when a corpus is opened, or as they are read."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import foreign
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import Datatrove, Megatron, TokenStore
from forge_data.loading.stream import open_stream
from forge_data.packing.plan import pieces_of
from forge_data.section import Data
from forge_data.sources.scan import portions
from forge_data.storage import shards

DOCUMENTS = [[5] * 99 + [0], [6] * 399 + [0], [7] * 499 + [0]]


def opened(component: Any) -> Any:
    return component.build(SourceContext(Path("unused"), None, 16, lambda _: None))


def with_ends(path: Path, at: int, ends: list[int]) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + 8 * len(ends)] = struct.pack(f"<{len(ends)}Q", *ends)
    path.write_bytes(content)


BROKEN = [
    ([100, 5000, 1000], "document 1 ends at token 5000 of 1000"),
    ([100, 50, 1000], "document 1 ends before it begins"),
    ([100, 2**63 + 500, 1000], "document 1 ends at token 9223372036854776308 of 1000"),
    ([2**64 - 1, 500, 1000], "document 0 ends at token 18446744073709551615 of 1000"),
]
OF_A_STORE = [*BROKEN, ([100, 100, 1000], "document 1 has no token"), ([0, 500, 1000], "document 0 has no token")]


@pytest.mark.parametrize(("ends", "message"), BROKEN)
def test_w9_borders_of_datatrove_are_checked_when_they_are_opened(tmp_path: Path, ends: list[int], message: str) -> None:
    path = foreign.datatrove(tmp_path / "a.ds", DOCUMENTS)
    assert opened(Datatrove(path=str(path))).ends().tolist() == [100, 500, 1000]
    with_ends(tmp_path / "a.ds.index", 0, ends)
    number = int(message.split()[1])
    with pytest.raises(DataError, match=rf"a\.ds\.index at byte {8 * number}: {message}; restore the file"):
        opened(Datatrove(path=str(path)))


@pytest.mark.parametrize(("ends", "message"), [*OF_A_STORE, ([100, 500, 999], "documents end at token 999 of 1000")])
def test_w9_borders_of_a_store_are_checked_when_it_is_opened(make_store: Any, ends: list[int], message: str) -> None:
    path = make_store("store", [document[:-1] for document in DOCUMENTS])
    assert opened(TokenStore(path=str(path))).ends().tolist() == [100, 500, 1000]
    with_ends(path / "shard-00000.doc.npy", 128, ends)
    with pytest.raises(DataError, match=rf"shard-00000\.doc\.npy.*: {message}; write the store again"):
        opened(TokenStore(path=str(path)))


def test_w9_a_list_of_another_length_is_refused(make_store: Any) -> None:
    path = make_store("store", [document[:-1] for document in DOCUMENTS])
    size = (path / "shard-00000.doc.npy").stat().st_size
    np.save(path / "shard-00000.doc.npy", np.array([500, 1000], dtype="<u8"))
    with (path / "shard-00000.doc.npy").open("ab") as file:
        file.write(bytes(size - file.tell()))
    with pytest.raises(DataError, match=r"shard-00000\.doc\.npy"):
        opened(TokenStore(path=str(path)))


@pytest.mark.parametrize("wrong", [1, -1, 2**40, 3])
def test_w9_borders_of_megatron_are_checked_when_they_are_opened(tmp_path: Path, wrong: int) -> None:
    foreign.megatron(tmp_path / "m", [[document] for document in DOCUMENTS])
    with_ends(tmp_path / "m.idx", 34 + 3 * 12 + 8, [wrong % 2**64])
    if wrong == 1:
        assert opened(Megatron(path=str(tmp_path / "m"))).ends()[-1] == 1000
        return
    with pytest.raises(DataError, match=r"m\.idx at byte \d+: document \d begins (before|after)"):
        opened(Megatron(path=str(tmp_path / "m")))


@pytest.mark.parametrize("write", ["store", "datatrove", "megatron"])
def test_w9_of_many_shards_those_between_are_checked_when_they_are_touched(
    tmp_path: Path, make_store: Any, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHECKED", 2)
    if write == "store":
        path = make_store("store", [document[:-1] for document in DOCUMENTS] * 5, shard_tokens=1000)
        with_ends(path / "shard-00003.doc.npy", 128, [100, 50, 1000])
    else:
        path = tmp_path
        for number in range(5):
            if write == "datatrove":
                foreign.datatrove(tmp_path / f"{number}.ds", DOCUMENTS)
            else:
                foreign.megatron(tmp_path / f"{number}", [[document] for document in DOCUMENTS])
        at, name = (8, "3.ds.index") if write == "datatrove" else (34 + 3 * 12 + 8, "3.idx")
        with_ends(tmp_path / name, at, [50 if write == "datatrove" else 2**40])
    source = opened({"store": TokenStore, "datatrove": Datatrove, "megatron": Megatron}[write](path=str(path)))
    assert source.ends(0, 2999).tolist()[:3] == [100, 500, 1000]
    for touch in (lambda: source.ends(3100, 3200), lambda: source.borders(np.array([3100], dtype=np.uint64), 16)):
        with pytest.raises(DataError, match=r"0*3\.(doc\.npy|ds\.index|idx)"):
            touch()


class Careless:
    """A source whose ends are wrong, as an index too large to be read at once may have them."""

    name, fingerprint, tokens = "careless", "careless", 1000
    vocab_size, max_id, tokenizer = 10, 9, None

    def __init__(self, ends: list[int]) -> None:
        self._ends = np.array(ends, dtype=np.uint64)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._ends

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.repeat(np.arange(len(starts)), 2)
        return rows, np.tile(self._ends[:2].astype(np.int64), len(starts))

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, dtype=np.uint16)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return np.ones((len(starts), length), dtype=np.uint16)


@pytest.mark.parametrize("ends", [[5, 3], [0, 5], [5, 17], [5, 5], [2**64 - 3, 4]])
def test_w9_borders_outside_a_row_are_refused_as_they_are_read(tmp_path: Path, ends: list[int]) -> None:
    source = Careless(ends)
    component = type("Own", (TokenStore,), {"build": lambda self, context: source})(path="x", label="own")
    stream = open_stream(Data(sequence_length=16, sources=[component]), workspace=tmp_path, seed=1, global_batch=4, micro_batch=4)
    with pytest.raises(DataError, match=r"careless at token .*: document ends do not ascend; run `data verify`"):
        next(iter(stream.from_cursor(stream.start())))


@pytest.mark.parametrize("ends", [[5, 3, 1000], [5, 1001], [5, 5, 1000], [0, 1000]])
def test_w9_borders_that_do_not_ascend_are_neither_packed_nor_copied(ends: list[int]) -> None:
    with pytest.raises(DataError, match="careless: document ends do not ascend"):
        list(pieces_of(Careless(ends), 16))
    with pytest.raises(DataError, match="careless: document ends do not ascend"):
        list(portions(Careless(ends)))


def test_w9_a_damaged_plan_is_refused(tmp_path: Path, make_store: Any) -> None:
    path = make_store("store", [[1] * 20, [2] * 7, [3] * 9])
    data = Data(sequence_length=16, sources=[TokenStore(path=str(path))], packing="best_fit")

    def stream() -> Any:
        return open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1)

    stream()
    (plan,) = (tmp_path / "w").glob("packed-*")
    for name in ("firsts", "starts", "lengths"):
        content = (plan / name).read_bytes()
        for damaged in (content[:-8], content + bytes(8), content[:-8] + b"\xff" * 8):
            (plan / name).write_bytes(damaged)
            with pytest.raises(DataError, match=r"pack plan .* is damaged"):
                stream()
        (plan / name).write_bytes(content)
    stream()


def test_w9_rows_of_an_index_that_was_only_sampled_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_WHOLE", 1)
    monkeypatch.setattr(shards, "_BLOCK", 2)
    monkeypatch.setattr(shards, "CHECKED", 2)  # the first two documents and the last two
    path = foreign.datatrove(tmp_path / "a.ds", [[1] * 99 + [0] for _ in range(10)])
    with_ends(tmp_path / "a.ds.index", 40, [450])  # in the middle, before the end of the one before it
    source = opened(Datatrove(path=str(path)))
    assert not source.borders_checked
    data = Data(sequence_length=499, sources=[Datatrove(path=str(path))], shuffle="none")
    stream = open_stream(data, workspace=tmp_path, seed=1, global_batch=1, micro_batch=1)
    reading = stream.from_cursor(stream.start())
    with pytest.raises(DataError, match=r"a\.ds at token \d+: document ends do not ascend"):
        for _ in range(2):
            next(reading)
    monkeypatch.setattr(shards, "_WHOLE", 100)
    with pytest.raises(DataError, match="document 5 ends before it begins"):
        opened(Datatrove(path=str(path)))
