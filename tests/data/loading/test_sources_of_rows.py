"""Which source a row comes from, as a batch tells it: what losses by source are counted with."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.steps import Drip, opened, steps_of
from forge_data.components import Tokens, TokenStore
from forge_data.section import Data, Phase

LENGTH, G = 16, 8


@pytest.fixture
def data(tmp_path: Path, numbered: Callable[..., Path]) -> Data:
    """Ids tell the source: those of `numbers` are below 3,000, those of `high` above, and streams count from 10,000 on."""
    np.save(tmp_path / "high.npy", (np.arange(1500) % 900 + 5000).astype(np.uint16))
    return Data(
        sequence_length=LENGTH,
        sources=[
            TokenStore(path=str(numbered("a", 2900)), weight=0.5, label="numbers"),
            Tokens(path=str(tmp_path / "high.npy"), weight=0.3, label="high"),
        ],
        phases=[
            Phase(start=3, weights={"high": 0.9}),
            Phase(start=5, sequence_length=4, global_batch=32),
            Phase(start=7, weights={"numbers": 0}, global_batch=16),
        ],
    )


def source_of(tokens: tuple[int, ...]) -> str:
    return "high" if min(tokens) >= 5000 else "numbers"


@pytest.mark.parametrize(("ranks", "micro", "workers"), [(1, 8, 0), (2, 1, 0), (1, 2, 2), (2, 4, 3)])
def test_a_row_names_the_source_that_its_tokens_are_of(data: Data, ranks: int, micro: int, workers: int) -> None:
    steps, _ = steps_of(data, 9, batch=G, ranks=ranks, micro=micro, workers=workers)
    assert [row[-1] for step in steps for row in step] == [source_of(row[1]) for step in steps for row in step]
    assert {row[-1] for row in steps[8]} == {"high"}
    counted: Counter[str] = Counter()
    for step in steps[:7]:
        for row in step:
            counted[row[-1]] += len(row[1])
    read = opened(data, batch=G).mix(7)
    assert {label: tokens for label, (tokens, _) in read.items()} == counted


def test_rows_of_streams_name_theirs(data: Data) -> None:
    mixed = dataclasses.replace(data, sources=[data.sources[1], Drip(label="drip", weight=0.5)], phases=[], shuffle_buffer=3)
    steps, _ = steps_of(mixed, 6, batch=G, ranks=2)
    named = {row[-1] for step in steps for row in step}
    assert named == {"high", "drip"}
    assert all((row[-1] == "high") == (min(row[1]) >= 5000 and max(row[1]) < 6000) for step in steps for row in step)


def test_one_source_needs_no_telling_apart(data: Data) -> None:
    alone = dataclasses.replace(data, sources=data.sources[:1], phases=[])
    ((batch, *_), _) = next(opened(alone, batch=G).from_cursor(opened(alone, batch=G).start()))
    assert batch.sources is None


def test_names_and_numbers_are_the_same_on_every_rank(data: Data) -> None:
    for rank in range(2):
        stream = opened(data, batch=G, ranks=2, rank=rank, micro=2)
        for (first, second), _ in [next(stream.from_cursor(stream.start()))]:
            assert first.sources is not None and second.sources is not None
            assert first.sources.names == second.sources.names == ("numbers", "high")
            assert first.sources.rows.shape == (2,) and first.sources.rows.dtype.is_signed
