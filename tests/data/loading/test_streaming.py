"""Streams: every document once an epoch, buffers rebuilt from five integers, worlds that share the readers or are refused."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.steps import Drip, DripSource, opened, steps_of
from forge_core.batch import IGNORE
from forge_core.errors import DataError
from forge_data.components.sources import Random
from forge_data.loading.loader import evaluation
from forge_data.order.cursor import merged
from forge_data.packing.streamed import Reader, readers_for
from forge_data.section import Data, Phase

LENGTH, G = 8, 8


def reader(source: Any, number: int = 0, readers: int = 1, buffer: int = 4, shuffle: bool = True) -> Reader:
    return Reader(source, number, readers, "seed", buffer, shuffle)


def documents_of(made: Reader, length: int, tokens: int) -> list[tuple[int, ...]]:
    """The first documents that a reader gives, at least so many tokens, put together from its rows."""
    stream: list[int] = []
    ends: list[int] = []
    following = None
    while len(stream) < tokens:
        window, columns = made.next(length)
        assert len(window) == length + 1 and all(1 <= column <= length for column in columns.tolist())
        assert following in (None, window[0])  # the last label of a row is the first token of the next
        following = window[-1]
        ends += [len(stream) + column for column in columns.tolist()]
        stream += window[:-1].tolist()
    return [tuple(stream[first:after]) for first, after in zip([0, *ends], ends, strict=False)]


@given(
    shards=st.integers(1, 7),
    documents=st.integers(6, 12),
    readers=st.sampled_from([1, 2, 4]),
    buffer=st.integers(1, 12),
    shuffle=st.booleans(),
    length=st.integers(1, 20),
)
@settings(max_examples=30, deadline=None)
def test_each_epoch_of_the_readers_has_every_document_once(
    shards: int, documents: int, readers: int, buffer: int, shuffle: bool, length: int
) -> None:
    source = DripSource(Drip(shards=shards, documents=documents, longest=60))
    held = Counter(
        tuple(source.document(shard, number).tolist()) for shard in range(shards) for number in range(documents + shard % 3)
    )
    total = sum(len(document) * count for document, count in held.items())
    alone = {document for document, count in held.items() if count == 1}  # the others cannot be told apart
    read: list[tuple[int, ...]] = []
    for number in range(readers):
        made = documents_of(reader(source, number, readers, buffer, shuffle), length, 3 * total)
        found = [document for document in made if document in alone]
        own = set(found)
        assert len(found) > len(own)
        for start in range(0, len(found) - len(own) + 1, max(1, len(own))):
            assert set(found[start : start + len(own)]) == own  # no document a second time before all came once
        read += own
    assert sorted(read) == sorted(alone - {()})


@given(
    rows=st.integers(0, 60),
    length=st.integers(1, 15),
    buffer=st.integers(1, 9),
    readers=st.sampled_from([1, 3, 8]),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_position_brings_back_the_same_rows_and_reads_no_more_than_the_buffer(
    rows: int, length: int, buffer: int, readers: int, shuffle: bool
) -> None:
    source = Counting(DripSource(Drip(shards=3, longest=7)))
    made = reader(source, 1 % readers, readers, buffer, shuffle)
    for _ in range(rows):
        made.next(length)
    position = json.loads(json.dumps(made.position()))
    assert len(position) == 5
    again = reader(source, 1 % readers, readers, buffer, shuffle)
    source.given = 0
    again.seek(position)
    assert again.position() == position and source.given == 0
    expected = [made.next(length) for _ in range(12)]
    source.given = 0
    for window, columns in expected:
        found, ends = again.next(length)
        assert found.tolist() == window.tolist() and ends.tolist() == columns.tolist()
    assert again.position() == made.position()


class Counting:
    """Counts the documents that a source gives out."""

    def __init__(self, source: DripSource) -> None:
        self.source = source
        self.given = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def stream(self, shard: int, start: int = 0) -> Any:
        for document in self.source.stream(shard, start):
            self.given += 1
            yield document


def test_a_seek_reads_one_window_again_however_far_it_goes() -> None:
    source = Counting(DripSource(Drip(shards=1, documents=4000, longest=6)))
    made = reader(source, buffer=50)
    for _ in range(900):
        made.next(8)
    position = made.position()
    expected = made.next(8)[0].tolist()
    source.given = 0
    again = reader(source, buffer=50)
    again.seek(position)
    assert again.next(8)[0].tolist() == expected
    assert source.given <= 100  # the window, and the next where the row reaches into it; those before are skipped


def test_shuffling_mixes_within_the_buffer_and_shards_between_epochs() -> None:
    source = DripSource(Drip(shards=3, documents=40, longest=6))
    plain = documents_of(reader(source, shuffle=False), 16, 400)
    mixed = documents_of(reader(source, buffer=200), 16, 400)
    assert plain[:20] == [tuple(document) for n in range(25) if len(document := source.document(0, n).tolist())][:20]
    shard = mixed[0][0] // 1000
    assert mixed[:20] != plain[:20] and all(document[0] // 1000 in (shard, 0) for document in mixed[:20])
    later = [document[0] // 1000 for document in documents_of(reader(source, buffer=5), 16, 6000) if document[0]]
    order = [shard for shard, before in zip(later, [0, *later], strict=False) if shard != before]
    assert len({tuple(order[start : start + 3]) for start in range(0, len(order) - 3, 3)}) > 1  # another order in other epochs


def data(**more: Any) -> Data:
    sources = [Drip(label="drip", weight=0.6), Random(vocab_size=50, tokens=900, label="random", weight=0.4)]
    return Data(sequence_length=LENGTH, sources=more.pop("sources", sources), shuffle_buffer=3, **more)


def test_labels_of_a_stream_cross_no_document() -> None:
    steps, _ = steps_of(data(sources=[Drip()]), 20, batch=G)
    labels = [(token, label) for step in steps for row in step for token, label in zip(row[1], row[2], strict=True)]
    assert all((label == IGNORE) == (token == 0) for token, label in labels)
    assert sum(label == 0 for _, label in labels) > 50  # the end of a document is the label of the token before it


@pytest.mark.parametrize(("ranks", "legal"), [(8, "1, 2, 4"), (3, "1, 2, 4")])
def test_a_world_that_cannot_share_the_readers_is_refused_with_the_legal_ones(ranks: int, legal: str) -> None:
    with pytest.raises(DataError, match=f"4 virtual readers, which cannot be divided among {ranks} data ranks; .* are {legal}$"):
        opened(data(readers=4), batch=24, ranks=ranks)
    for fits in (1, 2, 4):
        opened(data(readers=4), batch=24, ranks=fits)


def test_readers_divide_the_samples_of_every_step() -> None:
    assert readers_for(None, [256]) == 64 and readers_for(None, [24, 16]) == 8 and readers_for(6, [24]) == 6
    with pytest.raises(DataError, match=r"data\.readers = 5 does not divide the 24 samples"):
        opened(data(readers=5), batch=24)
    with pytest.raises(DataError, match="does not divide the 2 samples"):
        opened(data(readers=4, phases=[Phase(start=4, global_batch=2)]), batch=8)


def test_each_rank_reads_only_the_shards_of_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    real = DripSource.stream

    def noted(self: DripSource, shard: int, start: int = 0) -> Any:
        asked.add(shard)
        return real(self, shard, start)

    monkeypatch.setattr(DripSource, "stream", noted)
    stream = opened(data(sources=[Drip(shards=8, documents=50)], readers=4), batch=8, ranks=2, rank=1)
    for _ in zip(range(30), stream.from_cursor(stream.start()), strict=False):
        pass
    assert asked == {2, 3, 6, 7}


def test_a_cursor_of_one_rank_of_several_is_refused_and_of_all_is_taken() -> None:
    recipe = data(readers=4)
    cursors = []
    for rank in range(2):
        stream = opened(recipe, batch=G, ranks=2, rank=rank)
        reading = stream.from_cursor(stream.start())
        cursors.append([after for _, (_, after) in zip(range(5), reading, strict=False)])
    lone = opened(recipe, batch=G)
    with pytest.raises(DataError, match=r"no position for readers 2, 3 of the stream 'drip'.*merged"):
        lone.from_cursor(cursors[0][-1])
    lone.from_cursor(merged([cursors[0][-1], cursors[1][-1]]))
    with pytest.raises(DataError, match="different steps"):
        merged([cursors[0][-1], cursors[1][-2]])
    assert len(json.dumps(merged([cursors[0][-1], cursors[1][-1]]))) < 1500


def test_a_second_iterator_takes_over_and_the_first_says_so() -> None:
    stream = opened(data(), batch=G)
    first = stream.from_cursor(stream.start())
    next(first)
    second = stream.from_cursor(stream.start())
    next(second)
    with pytest.raises(DataError, match="a newer one took over"):
        next(first)
    next(second)


def test_what_needs_the_length_of_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.packing = 'best_fit' needs the lengths of all documents"):
        opened(data(packing="best_fit"), batch=G)
    with pytest.raises(DataError, match=r"unknown length.*remove data\.epochs and max_epochs"):
        opened(data(epochs=1), batch=G)
    with pytest.raises(DataError, match="epochs cannot be counted"):
        opened(data(sources=[Drip(max_epochs=2.0)]), batch=G)
    with pytest.raises(DataError, match="evaluation set 'held' is a stream"):
        evaluation(Data(evaluation={"held": Drip()}), workspace=Path("unused"))
    described = opened(data(), batch=G).describe(10)["sources"]
    assert [entry["rows"] for entry in described] == [None, 899 // LENGTH] and described[0]["epochs"] is None
    assert opened(data(), batch=G).entropy() is None


def test_streams_without_a_token_are_refused() -> None:
    for empty in (Drip(longest=0), Drip(shards=1, documents=0)):
        with pytest.raises(DataError, match="have no tokens"):
            steps_of(data(sources=[empty]), 1, batch=G)
    with pytest.raises(DataError, match="has no shard"):
        steps_of(data(sources=[Drip(shards=0)]), 1, batch=G)


def test_a_document_that_is_no_list_of_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DripSource, "stream", lambda *_: iter([np.array([0.5])]))
    with pytest.raises(DataError, match="1-D array of integer ids, found float64"):
        steps_of(data(), 1, batch=G)


def test_ids_of_a_stream_are_checked_against_the_vocabulary() -> None:
    from forge_data.loading.loader import open_stream

    stream = open_stream(data(sources=[Drip()]), workspace=Path("unused"), seed=1, global_batch=G, micro_batch=1, vocab_size=1500)
    with pytest.raises(DataError, match=r"drip: id \d+, but the model's vocab_size is 1500"):
        next(stream.from_cursor(stream.start()))


def test_other_readers_or_another_buffer_are_other_data() -> None:
    cursor = steps_of(data(), 2, batch=G)[1]
    for change in ({"readers": 2}, {"shuffle_buffer": 9}):
        with pytest.raises(DataError, match=f"{next(iter(change))} was"):
            steps_of(dataclasses.replace(data(), **change), 1, batch=G, cursor=cursor)
