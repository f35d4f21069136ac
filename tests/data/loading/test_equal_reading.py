"""Every document of a stream is read equally often, whatever its shards, the ranks, readers and workers."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.steps import steps_of
from forge_core.protocols.data import SourceComponent, SourceContext
from forge_data.packing.readers import ShuffledDocuments, StreamPacking
from forge_data.section import Data


@dataclass(frozen=True, kw_only=True)
class Uneven(SourceComponent):
    """Shards of any number of documents of any lengths; each document consists of its own number, and ends with 0."""

    documents: tuple[int, ...]
    lengths: tuple[int, ...] = (3,)

    def build(self, context: SourceContext) -> "UnevenSource":
        return UnevenSource(self)

    @property
    def numbers(self) -> range:
        return range(1, sum(self.documents) + 1)

    def document(self, number: int) -> np.ndarray:
        return np.array([number] * self.lengths[number % len(self.lengths)] + [0])


class UnevenSource:
    vocab_size, max_id, tokenizer = None, None, None
    name = "uneven"

    def __init__(self, component: Uneven) -> None:
        self.component = component
        self.shards = len(component.documents)
        self.fingerprint = repr(component)

    def stream(self, shard: int, start: int = 0) -> Iterator[np.ndarray]:
        first = 1 + sum(self.component.documents[:shard])
        for number in range(first + start, first + self.component.documents[shard]):
            yield self.component.document(number)


def tokens_of(data: Data, steps: int, batch: int, **shape: Any) -> list[int]:
    """The stream of tokens, put together from the rows of all ranks in the order of the global batch."""
    found, _ = steps_of(data, steps, batch=batch, **shape)
    return [token for step in found for row in step for token in row[1]]


def most_uneven(source: Uneven, tokens: list[int]) -> int:
    """The largest difference, at any time, between how often two documents were read to their end."""
    read, most = Counter(dict.fromkeys(source.numbers, 0)), 0
    for token, following in pairwise(tokens):
        if following == 0 and token:
            read[token] += 1
            most = max(most, max(read.values()) - min(read.values()))
    return most


CASES = {
    "7 of 100 and one of 5": Uneven(documents=(100,) * 7 + (5,)),
    "1,000 and 25": Uneven(documents=(1000, 25)),
    "100 equal ones": Uneven(documents=(10,) * 100),
    "one": Uneven(documents=(400,)),
    "long and short documents": Uneven(documents=(300, 5, 0, 700), lengths=(1, 1, 1, 40)),
}


@pytest.mark.parametrize("name", CASES)
def test_trials_b1_documents_of_uneven_shards_are_read_equally_often(name: str) -> None:
    source = CASES[name]
    tokens = sum(len(source.document(number)) for number in source.numbers)
    data = Data(sequence_length=16, sources=[source], shuffle_buffer=50)
    steps = 3 * tokens // (64 * 16)  # three epochs
    read = Counter(token for token in tokens_of(data, steps, 64, micro=64) if token)
    per_document = [read[number] / (len(source.document(number)) - 1) for number in source.numbers]
    assert min(per_document) > 1.9 and max(per_document) <= 3.0


@given(
    documents=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 0),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    readers=st.sampled_from([None, 1, 2, 5]),
    buffer=st.integers(1, 12),
    shuffle=st.sampled_from(["permute", "none"]),
    shape=st.sampled_from([{}, {"ranks": 2}, {"ranks": 4, "micro": 1}, {"ranks": 3, "micro": 2}]),
)
@settings(max_examples=40, deadline=None)
def test_trials_b1_no_document_is_ever_read_twice_more_often(
    documents: list[int], lengths: list[int], readers: int | None, buffer: int, shuffle: Any, shape: dict[str, int]
) -> None:
    source = Uneven(documents=tuple(documents), lengths=tuple(lengths))
    data = Data(sequence_length=8, sources=[source], readers=readers, shuffle_buffer=buffer, shuffle=shuffle)
    tokens = tokens_of(data, 12, 12, **shape)
    assert most_uneven(source, tokens) <= 1
    assert tokens == tokens_of(data, 12, 12), "other ranks read other tokens"


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_trials_b1_a_resume_on_other_ranks_and_workers_reads_on(workers: int) -> None:
    source = Uneven(documents=(30, 2, 11, 0, 1), lengths=(1, 9, 30))
    data = Data(sequence_length=8, sources=[source], shuffle_buffer=7)
    whole, end = steps_of(data, 9, batch=12)
    cursor = None
    found = []
    for steps, shape in (
        (2, {"ranks": 3, "micro": 2}),
        (3, {"ranks": 2, "workers": workers}),
        (4, {"micro": 12, "workers": workers}),
    ):
        part, cursor = steps_of(data, steps, batch=12, cursor=cursor, **shape)
        found += part
    assert found == whole and cursor == end


def test_trials_b1_without_shuffling_a_stream_is_its_documents_in_order() -> None:
    source = Uneven(documents=(3, 0, 5, 1), lengths=(4, 1, 17))
    data = Data(sequence_length=8, sources=[source], shuffle="none", shuffle_buffer=2)
    stored = np.concatenate([source.document(number) for number in source.numbers])
    tokens = tokens_of(data, 6, 4)
    assert tokens == np.tile(stored, 9)[: len(tokens)].tolist()


def test_trials_b1_neighboring_documents_come_from_several_shards() -> None:
    source = Uneven(documents=(100,) * 4)
    data = Data(sequence_length=8, sources=[source], shuffle_buffer=40)
    one = [token for token in tokens_of(data, 4, 4) if token]
    assert {(token - 1) // 100 for token in one} == {0, 1, 2, 3}
    alone = [token for token in tokens_of(dataclasses.replace(data, readers=1), 4, 4) if token]
    assert len({(token - 1) // 100 for token in alone}) == 1


def test_trials_b1_every_window_has_an_order_of_its_own() -> None:
    source = Uneven(documents=(60,), lengths=(1,))
    data = Data(sequence_length=20, sources=[source], shuffle_buffer=10, readers=1)
    read = [token - 1 for token in tokens_of(data, 3, 2) if token]
    orders = {tuple(number % 10 for number in read[first : first + 10]) for first in range(0, 60, 10)}
    assert [number // 10 for number in read] == [window for window in range(6) for _ in range(10)] and len(orders) > 4


def test_trials_b1_empty_documents_at_the_end_of_an_epoch_are_no_empty_stream() -> None:
    class Rest(UnevenSource):
        def stream(self, shard: int, start: int = 0) -> Iterator[np.ndarray]:
            every = [*super().stream(shard), *[np.empty(0, np.int64)] * 8]
            return iter(every[start:])

    stream = StreamPacking(Rest(Uneven(documents=(3,))), 1, 4, "seed", 2, shuffle=False)
    found = stream.cut(np.arange(9), 4).windows[:, :4].flatten().tolist()
    assert found == [1, 1, 1, 0, 2, 2, 2, 0, 3, 3, 3, 0] * 3


def test_trials_b1_samples_that_were_passed_are_not_cut() -> None:
    stream = StreamPacking(UnevenSource(Uneven(documents=(30,))), None, 4, "seed", 2, shuffle=True)
    stream.cut(np.arange(2), 4)
    stream.skip_to(5)
    with pytest.raises(AssertionError, match="sample 4 of uneven was cut before"):
        stream.cut(np.array([4]), 4)


def test_every_epoch_has_an_order_of_its_own() -> None:
    """One window holds an epoch here, so only the number of the epoch can tell the orders apart."""
    documents = ShuffledDocuments(Uneven(documents=(5, 7, 4)).build(None), None, 1, 100, True)  # type: ignore[arg-type]
    states, orders = [], []
    for _ in range(4):
        state, window = documents.next()
        states.append(state["epoch"])
        orders.append([int(ids[0]) for _, ids in window])
    assert states == [0, 1, 2, 3]
    assert all(sorted(order) == list(range(1, 17)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(("readers", "buffer", "most"), [(None, 3, 3), (6, 3, 3), (2, 5, 2), (None, 100, 8)])
def test_no_more_shards_are_open_than_documents_lie_in_a_window(readers: int | None, buffer: int, most: int) -> None:
    """Others would stay open and not be read from until those before them have ended."""
    documents = ShuffledDocuments(Uneven(documents=(9,) * 8).build(None), readers, 1, buffer, True)  # type: ignore[arg-type]
    for _ in range(4):
        assert len(documents.state()["readers"]) == documents.state()["opened"] == most
        documents.next()
        if buffer > 9 * 8:
            break
