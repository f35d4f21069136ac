"""Labels, positions and documents against a plain loop over tokens."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.batch import IGNORE
from forge_core.errors import DataError
from forge_data.loading.rows import shift
from forge_data.packing.concatenation import ConcatenatedPacking, places
from forge_data.sources.store import StoreSource
from forge_data.storage.shards import borders_in


def expected(stream: list[int], ends: set[int], start: int, length: int) -> tuple[list[int], ...]:
    """Tokens, labels, positions and documents of one row, one token at a time."""
    tokens, labels, positions, documents = [], [], [], []
    position = document = 0
    for place in range(start, start + length):
        if place > start and place in ends:
            position, document = 0, document + 1
        tokens.append(stream[place])
        labels.append(IGNORE if place + 1 in ends else stream[place + 1])
        positions.append(position)
        documents.append(document)
        position += 1
    return tokens, labels, positions, documents


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=30), length=st.integers(1, 9), shard=st.sampled_from([7, 20, 1000])
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_what_a_loop_over_tokens_gives(
    tmp_path_factory: pytest.TempPathFactory, make_store: Any, lengths: list[int], length: int, shard: int
) -> None:
    stream: list[int] = []
    ends: set[int] = set()
    documents = []
    for number, size in enumerate(lengths):
        documents.append([number * 20 + offset + 1 for offset in range(size - 1)])
        stream += [*documents[-1], 0]
        ends.add(len(stream))
    store = StoreSource(make_store(tmp_path_factory.mktemp("rows").name, documents, shard_tokens=shard))
    assert store.ends().tolist() == sorted(ends)
    packing = ConcatenatedPacking(store, length)
    assert packing.rows == max(0, (len(stream) - 1) // length)
    if not packing.rows:
        return
    numbers = np.random.default_rng(0).permutation(packing.rows)
    cut = packing.cut(numbers)
    shape = (packing.rows, length)
    tokens, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
    at = np.random.default_rng(1).permutation(packing.rows)
    shift(cut.windows, cut.rows, cut.columns, tokens, labels, at)
    positions, documents_of = places(cut)
    assert positions.dtype == documents_of.dtype == np.int32
    for window, (row, number) in enumerate(zip(at.tolist(), numbers.tolist(), strict=True)):
        found = (tokens[row].tolist(), labels[row].tolist(), positions[window].tolist(), documents_of[window].tolist())
        assert found == expected(stream, ends, number * length, length)


def test_no_label_crosses_a_document_and_every_end_is_predicted(numbered: Any) -> None:
    store = StoreSource(numbered("corpus", 5000))
    packing = ConcatenatedPacking(store, 64)
    cut = packing.cut(np.arange(packing.rows))
    tokens, labels = np.empty((packing.rows, 64), np.int64), np.empty((packing.rows, 64), np.int64)
    shift(cut.windows, cut.rows, cut.columns, tokens, labels, np.arange(packing.rows))
    assert (labels[tokens == 0] == IGNORE).all()  # the end of a document predicts nothing
    assert (labels[tokens != 0] != IGNORE).all()  # every other token has a label
    used = store.read(1, packing.rows * 64 + 1)
    assert (labels == 0).sum() == (used == 0).sum()  # every end of a document is somebody's label


def test_borders_touch_few_of_the_ends() -> None:
    """numpy converts a whole array when the types of a search differ; that would read all ends at every step."""
    ends = np.arange(1, 1_000_000, dtype=np.uint64) * np.uint64(10)
    tracemalloc.start()
    rows, columns = borders_in(ends, np.array([5, 9_999_001]), 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.tolist() == [0, 0, 1, 1] and columns.tolist() == [5, 15, 9, 19]
    assert peak < 100_000


def test_ids_that_are_no_integers_are_refused_and_not_rounded() -> None:
    tokens, labels, none = np.zeros((1, 3), np.int64), np.zeros((1, 3), np.int64), np.empty(0, np.int64)
    with pytest.raises(DataError, match="token ids must be integers, got float64"):
        shift(np.array([[1.0, 2.5, 3.0, 4.0]]), none, none, tokens, labels, np.array([0]))
    shift(np.array([[1, 2, 3, 2**40]], np.uint64), none, none, tokens, labels, np.array([0]))
    assert tokens.tolist() == [[1, 2, 3]] and labels.tolist() == [[2, 3, 2**40]]
