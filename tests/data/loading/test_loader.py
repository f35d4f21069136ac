"""The sequence of samples: the same for every number of ranks, micro-batch and interruption."""

import dataclasses
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ConfigError, DataError
from forge_core.protocols.data import SourceContext
from forge_data.components import RandomTokens, Tokens, TokenStore
from forge_data.loading.evaluation import evaluation
from forge_data.loading.stream import TrainingStream, open_stream
from forge_data.section import Data
from forge_data.sources.store import StoreSource

LENGTH = 16
G = 16


@pytest.fixture
def recipe(numbered: Callable[..., Path]) -> Data:
    """Three sources of different sizes, one of them never drawn."""
    return Data(
        sequence_length=LENGTH,
        sources=[
            TokenStore(path=str(numbered("a", 3000)), weight=0.7, label="a"),
            TokenStore(path=str(numbered("b", 800, 11)), weight=0.3, label="b"),
            TokenStore(path="does not exist", weight=0.0, label="never"),
        ],
    )


def stream(data: Data, *, ranks: int = 1, rank: int = 0, micro: int = 1, batch: int = G, **more: Any) -> TrainingStream:
    shape = {"global_batch": batch, "micro_batch": micro, "rank": rank, "ranks": ranks}
    found = open_stream(data, workspace=Path("unused"), seed=5, **shape, **more)
    assert isinstance(found, TrainingStream)
    return found


def take(data: Data, steps: int, cursor: Any = None, **shape: Any) -> tuple[list[list[Batch]], list[Any]]:
    """Micro-batches and cursors of some steps, kept: no batch may change after it was handed out."""
    opened = stream(data, **shape)
    batches, cursors = [], []
    for step, (found, after) in enumerate(opened.from_cursor(cursor or opened.start())):
        batches.append(found)
        cursors.append(after)
        if step + 1 == steps:
            break
    return batches, cursors


def rows_of(batches: list[Batch]) -> list[tuple[Any, ...]]:
    """Every row with its sample number and all that a model sees."""
    rows = []
    for batch in batches:
        assert batch.positions is not None and batch.documents is not None
        for i, sample in enumerate(batch.samples):
            content = (batch.tokens[i], batch.labels[i], batch.positions[i], batch.documents[i])
            rows.append((sample, *(tuple(part.tolist()) for part in content)))
    return rows


def whole_step(data: Data, steps: int, ranks: int, micro: int, cursor: Any = None) -> list[list[tuple[Any, ...]]]:
    """The rows of each step over all ranks, in rank order."""
    shares = [take(data, steps, cursor, ranks=ranks, rank=rank, micro=micro)[0] for rank in range(ranks)]
    return [[row for share in shares for row in rows_of(share[step])] for step in range(steps)]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (1, 16), (2, 1), (2, 8), (4, 2), (8, 1), (8, 2)])
def test_fault_18_ranks_and_micro_batches_leave_every_step_alone(recipe: Data, ranks: int, micro: int) -> None:
    assert whole_step(recipe, 5, ranks, micro) == whole_step(recipe, 5, 1, 1)


def test_a_batch_is_what_the_contract_says(recipe: Data) -> None:
    ((first, *_),), _ = take(recipe, 1, micro=4)
    assert first.tokens.shape == first.labels.shape == (4, LENGTH) and first.tokens.is_contiguous()
    assert first.tokens.dtype == first.labels.dtype == torch.int64
    assert first.positions is not None and first.documents is not None
    assert first.positions.dtype == first.documents.dtype == torch.int32
    assert first.samples == (0, 1, 2, 3)


@given(
    kill=st.integers(1, 30),
    before=st.sampled_from([(1, 4), (2, 8), (4, 1), (8, 2)]),
    after=st.sampled_from([(1, 1), (1, 16), (2, 4), (8, 1)]),
    seed=st.integers(0, 3),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_resume_anywhere_equals_the_uninterrupted_run(
    recipe: Data, kill: int, before: tuple[int, int], after: tuple[int, int], seed: int
) -> None:
    data = dataclasses.replace(recipe, seed=seed)
    ranks, micro = before
    cursors = take(data, kill, ranks=ranks, rank=ranks - 1, micro=micro)[1]
    assert take(data, kill, ranks=ranks, rank=0, micro=micro)[1] == cursors  # the same on every rank
    stored = json.loads(json.dumps(cursors[-1]))
    resumed = whole_step(data, 2, *after, cursor=stored)
    assert resumed == whole_step(data, kill + 2, 1, 4)[kill:]


def test_the_cursor_is_that_of_the_step_that_was_handed_out(recipe: Data) -> None:
    opened = stream(recipe)
    steps = opened.from_cursor(opened.start())
    assert [next(steps)[1]["sample"] for _ in range(3)] == [G, 2 * G, 3 * G]
    assert len(json.dumps(opened.start())) < 1024


def test_each_epoch_covers_each_row_exactly_once(numbered: Callable[..., Path]) -> None:
    data = Data(sequence_length=LENGTH, sources=[TokenStore(path=str(numbered("a", 1 + LENGTH * 96)))])
    steps = whole_step(data, 18, 2, 4)
    epochs = [Counter(row[1] for step in steps[start : start + 6] for row in step) for start in (0, 6, 12)]
    assert len(epochs[0]) == 96 and set(epochs[0].values()) == {1}
    assert epochs[0] == epochs[1] == epochs[2]
    orders = [[row[1] for step in steps[start : start + 6] for row in step] for start in (0, 6, 12)]
    assert orders[0] != orders[1] != orders[2]


def test_unshuffled_rows_come_as_stored(numbered: Callable[..., Path]) -> None:
    path = numbered("a", 2000)
    data = Data(sequence_length=LENGTH, sources=[TokenStore(path=str(path))], shuffle="none")
    (batches,), _ = take(data, 1, micro=G)
    flat = np.fromfile(path / "shard-00000.bin", dtype="<u2")[: G * LENGTH]
    assert batches[0].tokens.flatten().tolist() == flat.tolist()


def test_a_limited_run_ends_with_its_last_full_global_batch(recipe: Data) -> None:
    a, b = ((StoreSource(Path(source.path)).tokens - 1) // LENGTH for source in recipe.sources[:2])  # type: ignore[attr-defined]
    data = dataclasses.replace(recipe, epochs=2)
    opened = stream(data)
    read = [opened.order.timeline.draws(steps * G) for steps in range(200)]
    fitting = max(steps for steps, (from_a, from_b) in enumerate(read) if from_a <= 2 * a and from_b <= 2 * b)
    assert opened.steps == fitting == len(take(data, 10**6)[0])
    assert take(data, 10**6, cursor=take(data, fitting)[1][-1])[0] == []
    with pytest.raises(DataError, match="fewer than one global batch"):
        stream(dataclasses.replace(recipe, epochs=1), batch=4096)


def test_a_source_with_weight_zero_is_not_even_opened(recipe: Data) -> None:
    opened = stream(recipe)
    assert opened.labels == ("a", "b")
    assert [source["share"] for source in opened.describe(10)["sources"]] == [0.7, 0.3]


def test_documents_can_be_ignored_and_labels_still_stop_at_borders(recipe: Data) -> None:
    ((batch,),), _ = take(dataclasses.replace(recipe, documents="ignore"), 1, micro=G)
    ((masked,),), _ = take(recipe, 1, micro=G)
    assert batch.positions is None and batch.documents is None
    assert torch.equal(batch.labels, masked.labels) and (batch.labels[batch.tokens == 0] == IGNORE).all()


def test_a_batch_that_is_kept_is_never_overwritten(recipe: Data) -> None:
    opened = stream(recipe, micro=4)
    kept, copies = [], []
    for step, (batches, _) in enumerate(opened.from_cursor(opened.start())):
        if step % 3 == 0:
            kept.append(batches[1].tokens[:2])  # a view of a view
            copies.append(kept[-1].clone())
        del batches
        if step == 12:
            break
    assert all(torch.equal(view, copy) for view, copy in zip(kept, copies, strict=True))


def test_memory_of_consumed_batches_is_used_again(recipe: Data) -> None:
    opened = stream(recipe, micro=G)
    places = set()
    for step, (batches, _) in enumerate(opened.from_cursor(opened.start())):
        places.add(batches[0].tokens.data_ptr())
        if step == 20:
            break
    assert len(places) <= 2


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 9}, "seed was 5, is 9"),
        ({"sequence_length": 8}, "sequence_length was 16, is 8"),
        ({"shuffle": "none"}, "shuffle was permute, is none"),
    ],
)
def test_a_cursor_of_other_data_is_refused_with_the_difference(recipe: Data, change: dict[str, Any], difference: str) -> None:
    cursor = take(recipe, 2)[1][-1]
    other = stream(dataclasses.replace(recipe, **change))
    with pytest.raises(DataError, match=difference):
        other.from_cursor(cursor)


def test_fault_21_another_corpus_or_global_batch_is_refused(recipe: Data, numbered: Callable[..., Path]) -> None:
    cursor = take(recipe, 2)[1][-1]
    with pytest.raises(DataError, match="global_batch was 16, is 32"):
        stream(recipe, batch=32).from_cursor(cursor)
    swapped = [TokenStore(path=str(numbered("c", 3001)), weight=0.7, label="a"), *recipe.sources[1:]]
    with pytest.raises(DataError, match=r"sources\.a\.fingerprint was"):
        stream(dataclasses.replace(recipe, sources=swapped)).from_cursor(cursor)
    with pytest.raises(DataError, match="expected a data cursor"):
        stream(recipe).from_cursor({"sample": "7"})


def test_fault_21_a_changed_corpus_is_taken_when_it_is_named_and_nothing_else_is(
    recipe: Data, numbered: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    cursor = take(recipe, 2)[1][-1]
    swapped = [TokenStore(path=str(numbered("c", 3001)), weight=0.7, label="a"), *recipe.sources[1:]]
    changed = dataclasses.replace(recipe, sources=swapped)
    expected = [rows_of(step) for step in take(changed, 4)[0]][2:]
    for named in ("sources.a.fingerprint", "sources.a", "sources"):
        caplog.clear()
        found, cursors = take(dataclasses.replace(changed, changed=(named,)), 2, cursor)
        assert [rows_of(step) for step in found] == expected, "it reads on at the same number of a sample"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "sources.a.fingerprint was" in caplog.text
    take(changed, 1, cursors[-1])  # from now on it is the run's own
    assert len(caplog.records) == 1
    for named in ("sources.b", "sources.a.share", "sources.a.fingerprin", "seed", ""):
        with pytest.raises(DataError, match=r"sources\.a\.fingerprint was .* list in data\.changed the settings that may differ"):
            stream(dataclasses.replace(changed, changed=(named,))).from_cursor(cursor)
    with pytest.raises(DataError, match="was 5, is 6") as refused:
        stream(dataclasses.replace(changed, changed=("sources.a",), seed=6)).from_cursor(cursor)
    assert "sources.a" not in str(refused.value)
    with pytest.raises(DataError, match="fingerprints differ"):
        stream(dataclasses.replace(recipe, changed=("sources",))).from_cursor(dict(cursor) | {"fingerprint": "0"})


def test_bad_sizes_are_refused(recipe: Data) -> None:
    with pytest.raises(DataError, match="not a multiple of 12 = 4 data ranks x micro_batch 3"):
        stream(recipe, ranks=4, micro=3)
    with pytest.raises(DataError, match=r"\[\[data.sources\]\]"):
        stream(Data())
    with pytest.raises(DataError, match="has 801 tokens, fewer than the 1025"):
        stream(dataclasses.replace(recipe, sequence_length=1024))
    with pytest.raises(ConfigError, match="no source has a weight above 0"):
        stream(dataclasses.replace(recipe, sources=recipe.sources[2:]))


def test_fault_41_ids_beyond_the_vocabulary_are_refused_before_training(recipe: Data) -> None:
    assert stream(recipe, vocab_size=3001).labels
    with pytest.raises(DataError, match=r"'a' .* holds token id 3000, but the model's vocab_size is 3000"):
        stream(recipe, vocab_size=3000)
    data = dataclasses.replace(recipe, evaluation={"held_out": recipe.sources[0]})
    with pytest.raises(DataError, match=r"'held_out' .* holds token id 3000"):
        evaluation(data, workspace=Path("unused"), vocab_size=3000)


def test_a_file_too_big_to_scan_is_checked_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_data.sources.token_files.SCANNED", 10)
    monkeypatch.setattr("forge_data.sources.token_files.TOKEN_BLOCKS", 0)  # head and tail alone
    ids = np.ones(1_000_000, dtype=np.uint16)
    ids[10_000] = 500
    np.save(tmp_path / "ids.npy", ids)
    data = Data(sequence_length=LENGTH, sources=[Tokens(path=str(tmp_path / "ids.npy"))], shuffle="none")
    opened = stream(data, batch=25, vocab_size=400)
    steps = opened.from_cursor(dict(opened.start()) | {"sample": 575})
    next(steps)
    with pytest.raises(DataError, match=r"at token 10000 \(.*ids.npy at byte 20128.*id 500"):
        next(steps)


def test_a_seek_far_ahead_costs_nothing_that_grows(tmp_path: Path) -> None:
    """Sample 10^8 of a corpus of 122 million rows, a sparse file: few pages are read, no long array is made."""
    length, rows = 512, 122_000_000
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(2 * (rows * length + 1))
    data = Data(sequence_length=length, sources=[Tokens(path=str(tmp_path / "huge.bin"), dtype="uint16", vocab_size=10)])
    tracemalloc.start()
    opened = stream(data, vocab_size=10)
    cursor = dict(opened.start()) | {"sample": 10**8}
    batches, after = next(opened.from_cursor(cursor))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened.samples.rows == (rows,) and after["sample"] == 10**8 + G
    assert batches[0].samples == (10**8,)
    assert peak < 4_000_000  # the file has 125 GB; one array of its rows would have 976 MB
    assert stream(data).samples.locate(10**8, 4)[1].tolist() == opened.samples.locate(10**8 - 2, 6)[1].tolist()[2:]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("tokens", [2, 1 + LENGTH, 2 + LENGTH * 7, LENGTH * 9])
def test_evaluation_covers_every_token_once_with_equal_numbers_of_batches(
    numbered: Callable[..., Path], ranks: int, micro: int, tokens: int
) -> None:
    path = numbered("held", tokens, 23)
    data = Data(sequence_length=LENGTH, evaluation={"held": TokenStore(path=str(path))})
    held = evaluation(data, workspace=Path("unused"))["held"]
    shares = [list(held.batches(rank, ranks, micro)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    stored = np.fromfile(path / "shard-00000.bin", dtype="<u2")
    ends = np.flatnonzero(stored == 0) + 1
    samples = []
    for batch in (batch for share in shares for batch in share):
        assert batch.documents is not None and batch.positions is not None
        assert batch.tokens.shape == (micro, LENGTH)
        for row, sample in enumerate(batch.samples):
            labels = batch.labels[row].tolist()
            if sample < 0:
                assert set(labels) == {IGNORE}
                continue
            samples.append(sample)
            start = sample * LENGTH
            following = [IGNORE if i in ends else int(stored[i]) for i in range(start + 1, min(start + 1 + LENGTH, len(stored)))]
            assert labels == following + [IGNORE] * (LENGTH - len(following))
            assert batch.documents[row, 0] == 0 and batch.positions[row, 0] == 0
    assert sorted(samples) == list(range(-(-(len(stored) - 1) // LENGTH)))


def test_random_tokens_are_uniform_and_a_function_of_the_position() -> None:
    component = RandomTokens(vocab_size=50, tokens=100_003, document=10)
    source = component.build(SourceContext(Path("unused"), None, LENGTH, print))
    stream_of = source.read(0, 100_003)
    assert source.read(5000, 5100).tolist() == stream_of[5000:5100].tolist()
    assert source.windows(np.array([99_983, 7]), 20).tolist() == [stream_of[99_983:].tolist()[:20], stream_of[7:27].tolist()]
    for outside in ([100_003 - 19], [5, -1]):
        with pytest.raises(IndexError, match="not inside the 100003 tokens"):
            source.windows(np.array(outside), 20)
    counts = np.bincount(stream_of, minlength=50)
    assert ((counts - 2000.06) ** 2 / 2000.06).sum() < 90  # chi-squared, 49 degrees of freedom: p = 0.0003
    assert source.ends().tolist() == [*range(10, 100_001, 10), 100_003]
    assert source.ends(15, 40).tolist() == [20, 30, 40]


def test_the_unigram_entropy_is_the_closed_form(make_store: Any) -> None:
    data = Data(sequence_length=2, sources=[TokenStore(path=str(make_store("even", [[1, 2, 3]] * 8)))])
    assert stream(data, batch=1).entropy() == pytest.approx(np.log(4))
    # Half of the samples from a source of zeros and ones in equal parts: p = (3/8, 3/8, 1/8, 1/8).
    pair = [*data.sources, TokenStore(path=str(make_store("pair", [[1]] * 8)), label="pair")]
    mixed = stream(dataclasses.replace(data, sources=pair), batch=2)
    assert mixed.entropy() == pytest.approx(-(0.75 * np.log(3 / 8) + 0.25 * np.log(1 / 8)))
