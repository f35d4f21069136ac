"""The permutation is a bijection, different in every epoch, and needs no memory of the corpus' size."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_data.order.permutation import permute, permute_blocks

KEYS = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 3000), key=KEYS, epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_row_is_hit_exactly_once(size: int, key: int, epoch: int) -> None:
    rows = permute(np.arange(size), size, key, np.full(size, epoch))
    assert np.array_equal(np.sort(rows), np.arange(size))


def test_a_million_and_three() -> None:
    rows = permute(np.arange(1_000_003), 1_000_003, 7, np.zeros(1_000_003, np.int64))
    assert np.array_equal(np.sort(rows), np.arange(1_000_003))
    # A random order has correlation 0 +- 1e-3 with the index, and steps of a third of the size on average.
    assert abs(np.corrcoef(rows, np.arange(len(rows)))[0, 1]) < 5e-3
    assert abs(np.abs(np.diff(rows)).mean() / len(rows) - 1 / 3) < 2e-3


@given(
    size=st.integers(2, 500),
    key=KEYS,
    indices=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_an_index_alone_gives_what_it_gives_among_others(size: int, key: int, indices: list[tuple[int, int]]) -> None:
    places = np.array([index % size for index, _ in indices])
    epochs = np.array([epoch for _, epoch in indices])
    together = permute(places, size, key, epochs)
    alone = [int(permute(places[i : i + 1], size, key, epochs[i : i + 1])[0]) for i in range(len(places))]
    assert together.tolist() == alone


def test_epochs_and_keys_have_orders_of_their_own() -> None:
    orders = [permute(np.arange(1000), 1000, key, np.full(1000, epoch)) for key in (1, 2) for epoch in (0, 1)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert (first == second).mean() < 0.02


@pytest.mark.parametrize("size", [3, 5, 17])
def test_small_sizes_reach_every_place(size: int) -> None:
    epochs = np.arange(4000)
    first = permute(np.zeros(4000, np.int64), size, 3, epochs)
    counts = np.bincount(first, minlength=size)
    assert counts.min() > 0.7 * 4000 / size


def test_memory_is_that_of_the_indices() -> None:
    tracemalloc.start()
    rows = permute(np.arange(10**12, 10**12 + 256), 10**15, 1, np.zeros(256, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(rows)) == 256 and rows.min() >= 0 and rows.max() < 10**15
    assert peak < 200_000


@given(size=st.integers(1, 3000), key=KEYS, epoch=st.integers(0, 10**6), block=st.integers(1, 400), window=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_blocks_hit_every_row_exactly_once(size: int, key: int, epoch: int, block: int, window: int) -> None:
    epochs = np.full(size, epoch)
    rows = permute_blocks(np.arange(size), size, key, epochs, block, window)
    assert np.array_equal(np.sort(rows), np.arange(size))
    some = np.random.default_rng(0).integers(0, size, 20)
    assert permute_blocks(some, size, key, np.full(20, epoch), block, window).tolist() == rows[some].tolist()


def test_blocks_touch_few_places_at_a_time_and_differ_between_epochs() -> None:
    size, block, window = 100_003, 64, 8
    orders = [permute_blocks(np.arange(size), size, 3, np.full(size, epoch), block, window) for epoch in (0, 1)]
    for order in orders:
        for start in range(0, size - block * window * 2, block * window):
            assert len(np.unique(order[start : start + block * window] // block)) == window
        # Inside a window rows come in random order: neighbors in time are rarely neighbors in storage.
        assert (np.abs(np.diff(order)) == 1).mean() < 0.02
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.1
    assert (orders[0] == orders[1]).mean() < 0.01
    # Every window of every epoch is mixed in an order of its own, not only its blocks.
    inside = [order[start : start + block * window] % block for order in orders for start in (0, block * window)]
    assert len({tuple(part.tolist()) for part in inside}) == 4


def test_a_seek_in_blocks_needs_no_memory() -> None:
    tracemalloc.start()
    rows = permute_blocks(np.arange(10**12, 10**12 + 256), 10**15, 1, np.zeros(256, np.int64), 256, 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(rows)) == 256 and rows.max() < 10**15 and peak < 200_000
