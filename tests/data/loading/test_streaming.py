"""Streams: every document once an epoch, buffers that are read again from a position, the same rows in every world."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.steps import Drip, DripSource, opened, steps_of
from forge_core.batch import IGNORE
from forge_core.errors import DataError
from forge_data.components import RandomTokens
from forge_data.loading.evaluation import evaluation
from forge_data.packing.readers import StreamPacking
from forge_data.section import Data

LENGTH, G = 8, 8


def rows(source: Any, buffer: int = 4, shuffle: bool = True, readers: int | None = None, unit: int = LENGTH) -> StreamPacking:
    return StreamPacking(source, readers, unit, "seed", buffer, shuffle)


def cut(stream: StreamPacking, sample: int) -> tuple[list[int], list[int]]:
    """Ids and document ends of a sample as one row."""
    found = stream.cut(np.array([sample]), stream.unit)
    return found.windows[0].tolist(), found.columns.tolist()


def documents_of(stream: StreamPacking, tokens: int) -> list[tuple[int, ...]]:
    """The first documents of a stream, at least so many tokens, put together from its rows."""
    ids: list[int] = []
    ends: list[int] = []
    following = None
    for sample in range(-(-tokens // stream.unit)):
        window, columns = cut(stream, sample)
        assert len(window) == stream.unit + 1 and all(1 <= column <= stream.unit for column in columns)
        assert following in (None, window[0])  # the last label of a row is the first token of the next
        following = window[-1]
        ends += [len(ids) + column for column in columns]
        ids += window[:-1]
    return [tuple(ids[first:after]) for first, after in zip([0, *ends], ends, strict=False)]


@given(
    shards=st.integers(1, 7),
    documents=st.integers(6, 12),
    readers=st.sampled_from([None, 1, 2, 4]),
    buffer=st.integers(1, 12),
    shuffle=st.booleans(),
    length=st.integers(1, 20),
)
@settings(max_examples=30, deadline=None)
def test_each_epoch_has_every_document_once(
    shards: int, documents: int, readers: int | None, buffer: int, shuffle: bool, length: int
) -> None:
    source = DripSource(Drip(shards=shards, documents=documents, longest=60))
    numbers = [(shard, number) for shard in range(shards) for number in range(documents + shard % 3)]
    held = sorted(tuple(ids) for shard, number in numbers if (ids := source.document(shard, number).tolist()))
    found = documents_of(rows(source, buffer, shuffle, readers, length), 3 * sum(map(len, held)))
    for epoch in range(2):
        assert sorted(found[epoch * len(held) : (epoch + 1) * len(held)]) == held


@given(
    samples=st.integers(0, 60),
    length=st.integers(1, 15),
    buffer=st.integers(1, 9),
    readers=st.sampled_from([None, 1, 3, 8]),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_position_brings_back_the_same_rows_and_reads_no_more_than_the_buffer(
    samples: int, length: int, buffer: int, readers: int | None, shuffle: bool
) -> None:
    source = Counting(DripSource(Drip(shards=3, longest=7)))
    stream = rows(source, buffer, shuffle, readers, length)
    for sample in range(samples):
        cut(stream, sample)
    position = json.loads(json.dumps(stream.position()))
    again = rows(source, buffer, shuffle, readers, length)
    source.given = 0
    again.seek(samples, position)
    assert again.position() == position and source.given == 0
    for sample in range(samples, samples + 12):
        assert cut(again, sample) == cut(stream, sample)
    assert again.position() == stream.position()


@given(taken=st.lists(st.integers(1, 5), max_size=12), pieces=st.sampled_from([1, 2, 4]), buffer=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_rows_that_are_skipped_change_no_other(taken: list[int], pieces: int, buffer: int) -> None:
    """As where other ranks read them, also in the middle of a sample that is cut into several rows."""
    source = DripSource(Drip(shards=3, longest=7))
    whole, some = rows(source, buffer, unit=8), rows(source, buffer, unit=8)
    row, length = 0, 8 // pieces
    for step in taken:
        row += step
        alone = some.cut(np.array([row]), length)
        expected = whole.cut(np.arange(row + 1 - step, row + 1), length)
        assert alone.windows[0].tolist() == expected.windows[-1].tolist()
        assert alone.columns.tolist() == expected.columns[expected.rows == step - 1].tolist()
    some.skip_to(row // pieces + 3)
    whole.skip_to(row // pieces + 3)
    assert some.position() == whole.position()


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
    source = Counting(DripSource(Drip(shards=2, documents=2000, longest=6)))
    stream = rows(source, buffer=50)
    stream.skip_to(900)
    position = stream.position()
    expected = cut(stream, 900)
    source.given = 0
    again = rows(source, buffer=50)
    again.seek(900, position)
    assert cut(again, 900) == expected
    assert source.given <= 100  # the window, and the next where the row reaches into it; those before are skipped


def test_a_stream_holds_one_buffer_of_documents_at_a_time() -> None:
    stream = rows(DripSource(Drip(shards=5, documents=3000, longest=6)), buffer=50)
    most = 0
    for sample in range(0, 4000, 7):
        stream.skip_to(sample)
        most = max(most, len(stream._ahead))
    assert 40 < most <= 50 + LENGTH


def test_shuffling_mixes_within_the_buffer_and_shards_between_epochs() -> None:
    source = DripSource(Drip(shards=3, documents=40, longest=6))
    plain = documents_of(rows(source, shuffle=False), 400)
    stored = [tuple(ids) for number in range(40) if len(ids := source.document(0, number).tolist())]
    assert plain[:20] == stored[:20]
    mixed = documents_of(rows(source, buffer=20, readers=1), 4000)
    shards = [document[0] // 1000 for document in mixed if document[0]]
    assert len(set(shards[:15])) == 1 and sorted(mixed[:15]) != mixed[:15]
    order = [shard for shard, before in zip(shards, [0, *shards], strict=False) if shard != before]
    assert len({tuple(order[start : start + 3]) for start in range(0, len(order) - 3, 3)}) > 1  # another order in other epochs


def test_a_position_beyond_the_shards_that_are_left_is_refused() -> None:
    stream = rows(DripSource(Drip(shards=5)), readers=4)
    stream.skip_to(30)
    with pytest.raises(DataError, match=r"stream of at least [45] shards, but drip now has 2"):
        rows(DripSource(Drip(shards=2))).seek(30, stream.position())


def data(**more: Any) -> Data:
    sources = [Drip(label="drip", weight=0.6), RandomTokens(vocab_size=50, tokens=900, label="random", weight=0.4)]
    return Data(sequence_length=LENGTH, sources=more.pop("sources", sources), shuffle_buffer=3, **more)


def test_labels_of_a_stream_cross_no_document() -> None:
    steps, _ = steps_of(data(sources=[Drip()]), 20, batch=G)
    labels = [(token, label) for step in steps for row in step for token, label in zip(row[1], row[2], strict=True)]
    assert all((label == IGNORE) == (token == 0) for token, label in labels)
    assert sum(label == 0 for _, label in labels) > 50  # the end of a document is the label of the token before it


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 12])
def test_any_number_of_ranks_shares_a_stream_and_every_cursor_is_whole(ranks: int) -> None:
    expected, cursor = steps_of(data(), 5, batch=12)
    assert steps_of(data(), 5, batch=12, ranks=ranks)[0] == expected
    stream = opened(data(), batch=12, ranks=ranks, rank=ranks - 1)
    reading = stream.from_cursor(stream.start())
    own = [after for _, (_, after) in zip(range(5), reading, strict=False)][-1]
    assert own == cursor and len(json.dumps(own)) < 1500


def test_a_cursor_without_the_position_of_a_stream_is_refused() -> None:
    cursor = steps_of(data(), 2, batch=G)[1]
    with pytest.raises(DataError, match="no position of the stream 'drip'"):
        opened(data(), batch=G).from_cursor({key: value for key, value in cursor.items() if key != "streams"})


def test_a_checkpoint_of_version_1_is_refused_or_begins_its_streams_again(caplog: pytest.LogCaptureFixture) -> None:
    recipe = data(sources=[Drip(label="drip")])
    steps, cursor = steps_of(recipe, 2, batch=G)
    identity = {key: value for key, value in cursor["identity"].items() if key != "streams"} | {"readers": 8}
    old = {key: value for key, value in cursor.items() if key != "streams"} | {"identity": identity, "fingerprint": "0" * 32}
    old["readers"] = {"drip": {str(number): [0, 0, 0, 3, 1] for number in range(8)}}
    with pytest.raises(DataError, match=r"streams was version 1, .* is version 2.*; continue a run of an older Forge") as refused:
        opened(recipe, batch=G).from_cursor(old)
    assert "readers was" not in str(refused.value)
    allowed, _ = steps_of(dataclasses.replace(recipe, changed=("streams",)), 1, batch=G, cursor=old)
    assert [row[1:] for row in allowed[0]] == [row[1:] for row in steps[0]] and allowed[0][0][0] == 2 * G
    assert "'drip'; it starts at its first document" in caplog.text


def test_a_second_iterator_takes_over_and_the_first_says_so() -> None:
    stream = opened(data(), batch=G)
    first = stream.from_cursor(stream.start())
    next(first)
    second = stream.from_cursor(stream.start())
    next(second)
    with pytest.raises(DataError, match="a newer iterator reads the streamed sources"):
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
        with pytest.raises(DataError, match="has no tokens"):
            steps_of(data(sources=[empty]), 1, batch=G)
    with pytest.raises(DataError, match="has no shard"):
        steps_of(data(sources=[Drip(shards=0)]), 1, batch=G)


def test_a_document_that_is_no_list_of_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DripSource, "stream", lambda *_: iter([np.array([0.5])]))
    with pytest.raises(DataError, match="1-D array of integer ids, found float64"):
        steps_of(data(), 1, batch=G)


def test_ids_of_a_stream_are_checked_against_the_vocabulary() -> None:
    from forge_data.loading.stream import open_stream

    stream = open_stream(data(sources=[Drip()]), workspace=Path("unused"), seed=1, global_batch=G, micro_batch=1, vocab_size=1500)
    with pytest.raises(DataError, match=r"drip: id \d+, but the model's vocab_size is 1500"):
        next(stream.from_cursor(stream.start()))


def test_other_readers_or_another_buffer_are_other_data() -> None:
    cursor = steps_of(data(), 2, batch=G)[1]
    for change in ({"readers": 2}, {"shuffle_buffer": 9}):
        with pytest.raises(DataError, match=f"{next(iter(change))} was"):
            steps_of(dataclasses.replace(data(), **change), 1, batch=G, cursor=cursor)
