"""Whole documents in rows: nothing lost, nothing cut without need, no label across a border."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.steps import opened, rows_of
from forge_core.batch import IGNORE, PADDING
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.checks import packing_keeps_documents
from forge_data.components import Bytes, JsonLines, Tokens, TokenStore
from forge_data.loading.evaluation import evaluation
from forge_data.loading.stream import open_stream
from forge_data.packing import plan
from forge_data.packing.plan import PlannedPacking, best_fit, pieces_of, planned
from forge_data.section import Data
from forge_data.sources.store import StoreSource
from forge_data.sources.store_writer import StoreWriter


def one_by_one(lengths: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Best-fit-decreasing as the textbook has it: (room of each row, row of each piece)."""
    room: list[int] = []
    rows = [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        fitting = [(left, row) for row, left in enumerate(room) if left >= lengths[piece]]
        if not fitting:
            room.append(capacity)
        rows[piece] = min(fitting)[1] if fitting else len(room) - 1
        room[rows[piece]] -= lengths[piece]
    return room, rows


@given(data=st.data(), capacity=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_rows_are_as_full_as_the_textbook_makes_them(data: Any, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    rows, used = best_fit(np.array(lengths), capacity)
    room, _ = one_by_one(lengths, capacity)
    filled = np.bincount(rows, weights=lengths, minlength=used)
    assert used == len(room) and filled.max() <= capacity and filled.min() > 0
    assert sorted((capacity - filled).tolist()) == sorted(room)


def test_rows_beyond_sixteen_bits_and_many_pieces() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 9000, 30_000), 70_000)
    rows, used = best_fit(lengths, 70_000)
    filled = np.bincount(rows, weights=lengths, minlength=used)
    assert filled.max() <= 70_000 and used <= -(-int(lengths.sum()) // 70_000) * 1.01


DOCUMENTS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(sizes=DOCUMENTS, length=st.integers(1, 12), mode=st.sampled_from(["best_fit", "pad"]), portion=st.integers(1, 50))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_rows_reconstruct_the_corpus_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, make_store: Any, sizes: list[int], length: int, mode: str, portion: int
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    documents = [[100 * number + place + 1 for place in range(size - 1)] for number, size in enumerate(sizes)]
    store = StoreSource(make_store(folder.name, documents, shard_tokens=50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PORTION", portion)
        patch.setattr(plan.pieces_of, "__defaults__", (portion, None))
        patch.setattr(plan, "_WINDOW", 7)
        packing = planned(store, length, mode, folder / "work", "corpus")
    stream = store.read(0, store.tokens)
    ends = set(store.ends().tolist())
    cut = packing.cut(np.arange(packing.rows))
    assert cut.filled is not None
    columns = [[int(c) for r, c in zip(cut.rows, cut.columns, strict=True) if r == row] for row in range(packing.rows)]
    pieces: dict[int, list[int]] = {}
    truncated = 0
    for row in range(packing.rows):
        filled = int(cut.filled[row])
        assert (cut.windows[row, filled:length] == 0).all()
        borders = [0, *columns[row]] if columns[row] and columns[row][-1] == filled else [0, *columns[row], filled]
        for first, after in itertools.pairwise(borders):
            where = packing.token_at(row, first)
            pieces[where] = cut.windows[row, first:after].tolist()
            whole = where + after - first in ends
            assert whole == (after in columns[row])
            if not whole:  # only a document longer than a row goes on, in a row that it fills, with its next token as label
                assert after - first == length == filled and cut.windows[row, length] == stream[where + length]
                truncated += where == 0 or where in ends
    joined = [token for where in sorted(pieces) for token in pieces[where]]
    assert np.array(joined, dtype=stream.dtype).tobytes() == stream.tobytes()
    assert truncated == packing.summary["truncated_documents"] == sum(size > length for size in sizes)
    assert packing.summary["tokens"] == store.tokens and packing.summary["documents"] == len(sizes)
    assert packing.summary["padding"] == pytest.approx(1 - store.tokens / (packing.rows * length))
    if mode == "pad":
        assert packing.rows == sum(-(-size // length) for size in sizes)
    elif portion >= len(sizes):
        lengths = [min(length, size - start) for size in sizes for start in range(0, size, length)]
        assert packing.rows == len(one_by_one(lengths, length)[0])


def stored(make_store: Any, sizes: list[int]) -> Path:
    return make_store("corpus", [[10 * number + place + 1 for place in range(size - 1)] for number, size in enumerate(sizes)])


@pytest.mark.parametrize("mode", ["best_fit", "pad"])
def test_what_a_model_sees_of_packed_rows(make_store: Any, tmp_path: Path, mode: str) -> None:
    data = Data(
        sequence_length=8, sources=[TokenStore(path=str(stored(make_store, [5, 3, 20, 1, 2, 7])))], packing=mode, epochs=1
    )  # type: ignore[arg-type]
    stream = opened(data, batch=1, workspace=tmp_path / "work")
    seen = []
    for (batch,), _ in stream.from_cursor(stream.start()):
        tokens, labels = batch.tokens[0].tolist(), batch.labels[0].tolist()
        positions, documents = batch.positions[0].tolist(), batch.documents[0].tolist()
        for place in range(8):
            if labels[place] != IGNORE:
                following = tokens[place + 1] if place < 7 else None
                assert following in (labels[place], None)  # scored against the next token
                assert place == 7 or documents[place + 1] == documents[place]  # of the same document
            if place:
                begins = documents[place] != documents[place - 1]
                assert positions[place] == (0 if begins else positions[place - 1] + 1)
        seen += [label for label in labels if label != IGNORE]
    # Every token but the first of each document is somebody's label once, wherever documents were cut, except the
    # first of what is left of an over-long one: its predecessor has it as label too, so that is all of them.
    corpus = [[10 * number + place + 1 for place in range(size - 1)] + [0] for number, size in enumerate([5, 3, 20, 1, 2, 7])]
    assert sorted(seen) == sorted(token for document in corpus for token in document[1:])


def test_a_plan_is_made_once_and_mapped(make_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(make_store, [5, 3, 20, 1, 2, 7] * 20)
    data = Data(sequence_length=8, sources=[TokenStore(path=str(path), label="a/b")], packing="best_fit")
    said: list[str] = []
    from forge_data.loading.stream import open_stream

    first = open_stream(data, workspace=tmp_path, seed=1, global_batch=2, micro_batch=1, report=said.append)
    monkeypatch.setattr(plan, "_write", lambda *_: pytest.fail("the plan was made again"))
    again = open_stream(data, workspace=tmp_path, seed=1, global_batch=2, micro_batch=1)
    assert again.describe()["sources"][0]["packing"] == first.describe()["sources"][0]["packing"]
    assert "120 documents in" in said[0] and "% full, 20 documents longer than a row were cut" in said[0]
    kept = next(tmp_path.glob("packed-a-b-*"))
    assert isinstance(PlannedPacking(StoreSource(path), 8, kept)._starts.base, np.memmap)
    (kept / "starts").unlink()
    with pytest.raises(DataError, match=r"is damaged .* remove it"):
        opened(data, batch=2, workspace=tmp_path)


def test_portions_join_documents_across_windows(make_store: Any) -> None:
    store = StoreSource(stored(make_store, [5, 3, 20, 1, 2, 7]))
    found = list(pieces_of(store, 8, portion=2))
    starts = np.concatenate([starts for starts, *_ in found]).tolist()
    lengths = np.concatenate([lengths for _, lengths, *_ in found]).tolist()
    assert starts == [0, 5, 8, 16, 24, 28, 29, 31] and lengths == [5, 3, 8, 8, 4, 1, 2, 7]


def test_an_id_beyond_the_vocabulary_is_found_where_it_lies(make_store: Any, tmp_path: Path) -> None:
    store = StoreSource(stored(make_store, [5, 3, 20, 1, 2, 7]))
    packing = planned(store, 8, "best_fit", tmp_path, "corpus")
    for row in range(packing.rows):
        cut = packing.cut(np.array([row]))
        assert cut.filled is not None
        for column in range(int(cut.filled[0])):
            assert store.read(packing.token_at(row, column), packing.token_at(row, column) + 1)[0] == cut.windows[0, column]


@pytest.mark.parametrize("mode", ["concatenate", "best_fit", "pad"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 3)])
def test_evaluation_goes_through_the_same_packing(make_store: Any, tmp_path: Path, mode: str, ranks: int, micro: int) -> None:
    sizes = [5, 3, 20, 1, 2, 7]
    source = TokenStore(path=str(stored(make_store, sizes)))
    data = Data(sequence_length=8, packing=mode, evaluation={"one": source, "two": source})  # type: ignore[arg-type]
    sets = evaluation(data, workspace=tmp_path / "work")
    assert list(sets) == ["one", "two"]
    seen: list[int] = []
    for rank in range(ranks):
        for batch in sets["one"].batches(rank, ranks, micro):
            seen += batch.labels[batch.labels != IGNORE].tolist()
    corpus = [[10 * number + place + 1 for place in range(size - 1)] + [0] for number, size in enumerate(sizes)]
    assert sorted(seen) == sorted(token for document in corpus for token in document[1:])


def test_evaluation_sets_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    made = Bytes().build(SourceContext(tmp_path, None, 8, print))
    with StoreWriter(tmp_path / "store", dtype="uint16", tokenizer=made) as writer:
        writer.add(np.arange(1, 40), np.array([39]))
        writer.commit()
    data = Data(sequence_length=8, evaluation={"held": TokenStore(path=str(tmp_path / "store"))})
    assert evaluation(data, workspace=tmp_path, tokenizer=made)["held"].tokens == 39
    other = SimpleNamespace(fingerprint="ab" * 32)
    with pytest.raises(DataError, match=r"different tokenizers \(held: \w{12}; the run's is abababababab"):
        evaluation(data, workspace=tmp_path, tokenizer=other)  # type: ignore[arg-type]


def test_padding_is_marked_and_trains_nothing(numbered: Callable[[str, int], Path], tmp_path: Path) -> None:
    data = Data(sequence_length=64, sources=[TokenStore(path=str(numbered("a", 370)))], packing="pad", shuffle="none")
    stream = opened(data, batch=2, micro=2, workspace=tmp_path)
    (batch,), _ = next(stream.from_cursor(stream.start()))
    assert batch.documents[1].tolist() == [0] * 37 + [PADDING] * 27
    assert batch.positions[1].tolist() == [*range(37), *range(27)]
    assert batch.labels[1, 36:].tolist() == [IGNORE] * 28 and batch.labels[1, 35] == 0  # the end of the document
    assert not batch.tokens[:, 37:].any()
    json.dumps(stream.describe())


def test_filler_of_an_evaluation_is_marked(numbered: Callable[[str, int], Path]) -> None:
    data = Data(sequence_length=16, evaluation={"held": TokenStore(path=str(numbered("held", 40, 23)))})
    batches = list(evaluation(data, workspace=Path("unused"))["held"].batches(0, 1, 4))
    assert batches[0].documents is not None and batches[0].samples == (0, 1, 2, -1)
    assert batches[0].documents[2].tolist() == [0] * 9 + [PADDING] * 7 and batches[0].documents[3].tolist() == [PADDING] * 16
    assert batches[0].labels[2, 8:].tolist() == [IGNORE] * 8 and batches[0].labels[2, 7] == 0


LENGTH, EOS = 8, 99
LENGTHS = [5, 8, 20, 1, 9, 7]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    ids = np.arange(1, sum(LENGTHS) + 1, dtype=np.uint16)
    ids[np.cumsum(LENGTHS) - 1] = EOS
    np.save(tmp_path / "corpus.npy", ids)
    return tmp_path / "corpus.npy"


def documents() -> Iterator[list[int]]:
    first = 1
    for length in LENGTHS:
        yield [*range(first, first + length - 1), EOS]
        first += length


def recipe(corpus: Path, packing: Any = "pad", **more: Any) -> Data:
    source = Tokens(path=str(corpus), eos=EOS, label="mine", **more)
    return Data(sequence_length=LENGTH, sources=[source], packing=packing, shuffle="none")


def open_recipe(data: Data, tmp_path: Path, **more: Any) -> Any:
    return open_stream(data, workspace=tmp_path / "work", seed=1, global_batch=2, micro_batch=2, **more)


def padded_rows(data: Data, tmp_path: Path, rows: int, **more: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the first rows, without padding."""
    stream = open_recipe(data, tmp_path, **more)
    found = []
    for batches, _ in stream.from_cursor(stream.start()):
        for row in rows_of(batches):
            real = sum(number >= 0 for number in row[4])
            found.append((list(row[1][:real]), list(row[2][:real])))
        if len(found) >= rows:
            return found[:rows]
    raise AssertionError


def test_trials_b8_by_default_text_goes_on_in_further_rows_as_before(corpus: Path, tmp_path: Path) -> None:
    expected = [part for ids in documents() for part in (ids[start : start + LENGTH] for start in range(0, len(ids), LENGTH))]
    assert [tokens for tokens, _ in padded_rows(recipe(corpus), tmp_path, len(expected))] == expected
    assert "too_long" not in open_recipe(recipe(corpus), tmp_path).start()["identity"]["sources"]["mine"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "kept"), [("skip", lambda ids: ids if len(ids) <= LENGTH else None), ("truncate", lambda ids: ids[:LENGTH])]
)
def test_trials_b8_long_documents_are_left_out_or_cut(corpus: Path, tmp_path: Path, how: str, kept: Any, workers: int) -> None:
    data = recipe(corpus, too_long=how)
    expected = [ids for document in documents() if (ids := kept(document)) is not None]
    found = padded_rows(dataclasses.replace(data, loader_workers=workers), tmp_path, 2 * len(expected))
    assert [tokens for tokens, _ in found] == 2 * expected
    assert [labels for _, labels in found] == 2 * [[*ids[1:], IGNORE] for ids in expected]
    stream = open_recipe(data, tmp_path)
    (described,) = stream.describe()["sources"]
    assert described["rows"] == len(expected) and described["packing"]["documents"] == len(LENGTHS)
    summary = described["packing"]
    assert (summary["left_out"], summary["truncated_documents"]) == ((2, 0) if how == "skip" else (0, 2))
    assert summary["tokens"] == sum(map(len, expected))
    with pytest.raises(DataError, match=rf"sources\.mine\.too_long was nothing, is {how}"):
        stream.from_cursor(open_recipe(recipe(corpus), tmp_path).start())


def test_trials_b8_best_fit_leaves_out_and_cuts_alike(corpus: Path, tmp_path: Path) -> None:
    for how, rows in (("skip", [8, 8, 5]), ("truncate", [8, 8, 8, 8, 5])):
        found = padded_rows(recipe(corpus, "best_fit", too_long=how), tmp_path, len(rows))
        assert sorted((len(tokens) for tokens, _ in found), reverse=True) == rows


def test_trials_b8_an_error_names_source_document_place_and_lengths(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"source 'mine': document 3 \(.*corpus\.npy.*\) has 20 tokens, but a row has 8; .*too_long"
    ):
        open_recipe(recipe(corpus, too_long="error"), tmp_path)
    texts = ["ab", "", "cdefg", "a text that is longer than a row", "hi"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = JsonLines(path=str(tmp_path / "d.jsonl"), too_long="error")
    data = Data(sequence_length=LENGTH, sources=[source], packing="pad", tokenizer=Bytes())
    fourth = sum(len(json.dumps({"text": text})) + 1 for text in texts[:3])
    with pytest.raises(DataError, match=rf"source 'jsonl': document 3 \(d\.jsonl:{fourth}\) has 33 tokens, but a row has 8"):
        open_recipe(data, tmp_path)


def test_trials_b8_documents_that_fit_are_no_error_and_none_that_fits_is_one(corpus: Path, tmp_path: Path) -> None:
    fits = Data(sequence_length=20, sources=[Tokens(path=str(corpus), eos=EOS, too_long="error")], packing="pad")
    assert open_recipe(fits, tmp_path).describe()["sources"][0]["rows"] == len(LENGTHS)
    np.save(tmp_path / "long.npy", np.arange(1, 30, dtype=np.uint16))
    with pytest.raises(DataError, match="all of its 1 documents are longer than a row of 8 tokens"):
        open_recipe(recipe(tmp_path / "long.npy", too_long="skip"), tmp_path)


def test_trials_b8_evaluation_sets_do_so_too(corpus: Path, tmp_path: Path) -> None:
    held = {"held": Tokens(path=str(corpus), eos=EOS, too_long="skip")}
    data = Data(sequence_length=LENGTH, evaluation=held, packing="pad")  # type: ignore[arg-type]
    assert evaluation(data, workspace=tmp_path / "work")["held"].rows == 4


def test_trials_b8_long_documents_are_counted_over_portions(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_data.packing import plan

    monkeypatch.setattr(plan.pieces_of, "__defaults__", (1, None))
    monkeypatch.setattr(plan, "_WINDOW", 5)
    with pytest.raises(DataError, match=r"document 3 .* has 20 tokens"):
        open_recipe(recipe(corpus, too_long="error"), tmp_path)
    (described,) = open_recipe(recipe(corpus, too_long="skip"), tmp_path).describe()["sources"]
    assert described["packing"]["left_out"] == 2 and described["rows"] == 4


@pytest.mark.parametrize("how", ["error", "skip", "truncate"])
def test_too_long_is_refused_where_every_document_may_be_cut(corpus: Path, tmp_path: Path, how: str) -> None:
    """Rows of `concatenate` have no document that is too long for them, so none would be left out, cut or refused."""
    said = (
        rf"'mine': too_long = '{how}' has no effect with packing = 'concatenate'.*; remove it, or set data.packing = 'best_fit'"
    )
    with pytest.raises(DataError, match=said):
        open_recipe(recipe(corpus, "concatenate", too_long=how), tmp_path)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    stream = JsonLines(path=str(tmp_path / "d.jsonl"), too_long=how, stream=True, label="mine")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=said):
        open_recipe(Data(sequence_length=LENGTH, sources=[stream], tokenizer=Bytes()), tmp_path)
    held: Any = {"mine": Tokens(path=str(corpus), eos=EOS, too_long=how)}  # type: ignore[arg-type]
    with pytest.raises(DataError, match=said):
        evaluation(Data(sequence_length=LENGTH, evaluation=held), workspace=tmp_path / "work")
    assert open_recipe(recipe(corpus, "concatenate"), tmp_path).describe()["sources"][0]["rows"] == (sum(LENGTHS) - 1) // LENGTH


@pytest.mark.parametrize("how", ["error", "skip", "truncate"])
@pytest.mark.parametrize("key", ["sources.0", "evaluation.held"])
def test_check_refuses_too_long_where_it_has_no_effect(how: Any, key: str) -> None:
    other, own = Tokens(path="x"), Tokens(path="x", too_long=how)
    first, held = (own, other) if key == "sources.0" else (other, own)
    data = Data(sequence_length=LENGTH, sources=[first], evaluation={"held": held})
    (fault,) = packing_keeps_documents(SimpleNamespace(data=data), None)  # type: ignore[arg-type]
    assert fault.key == f"data.{key}.too_long" and "has no effect with data.packing = 'concatenate'" in str(fault)
    for packing in ("pad", "best_fit"):
        job: Any = SimpleNamespace(data=dataclasses.replace(data, packing=packing))
        assert not list(packing_keeps_documents(job, None))  # type: ignore[arg-type]
