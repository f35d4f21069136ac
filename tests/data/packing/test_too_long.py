"""Documents that are longer than a row, where a packing keeps documents whole: refused, left out or cut, as the source says."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.steps import rows_of
from forge_core.batch import IGNORE
from forge_core.errors import DataError
from forge_data.components import Bytes, JsonLines, Tokens
from forge_data.loading.evaluation import evaluation
from forge_data.loading.stream import open_stream
from forge_data.section import Data

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


def opened(data: Data, tmp_path: Path, **more: Any) -> Any:
    return open_stream(data, workspace=tmp_path / "work", seed=1, global_batch=2, micro_batch=2, **more)


def padded_rows(data: Data, tmp_path: Path, rows: int, **more: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the first rows, without padding."""
    stream = opened(data, tmp_path, **more)
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
    assert "too_long" not in opened(recipe(corpus), tmp_path).start()["identity"]["sources"]["mine"]


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
    stream = opened(data, tmp_path)
    (described,) = stream.describe()["sources"]
    assert described["rows"] == len(expected) and described["packing"]["documents"] == len(LENGTHS)
    summary = described["packing"]
    assert (summary["left_out"], summary["truncated_documents"]) == ((2, 0) if how == "skip" else (0, 2))
    assert summary["tokens"] == sum(map(len, expected))
    with pytest.raises(DataError, match=rf"sources\.mine\.too_long was nothing, is {how}"):
        stream.from_cursor(opened(recipe(corpus), tmp_path).start())


def test_trials_b8_best_fit_leaves_out_and_cuts_alike(corpus: Path, tmp_path: Path) -> None:
    for how, rows in (("skip", [8, 8, 5]), ("truncate", [8, 8, 8, 8, 5])):
        found = padded_rows(recipe(corpus, "best_fit", too_long=how), tmp_path, len(rows))
        assert sorted((len(tokens) for tokens, _ in found), reverse=True) == rows


def test_trials_b8_an_error_names_source_document_place_and_lengths(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"source 'mine': document 3 \(.*corpus\.npy.*\) has 20 tokens, and a row has 8; .*too_long"
    ):
        opened(recipe(corpus, too_long="error"), tmp_path)
    texts = ["ab", "", "cdefg", "a text that is longer than a row", "hi"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = JsonLines(path=str(tmp_path / "d.jsonl"), too_long="error")
    data = Data(sequence_length=LENGTH, sources=[source], packing="pad", tokenizer=Bytes())
    fourth = sum(len(json.dumps({"text": text})) + 1 for text in texts[:3])
    with pytest.raises(DataError, match=rf"source 'jsonl': document 3 \(d\.jsonl:{fourth}\) has 33 tokens, and a row has 8"):
        opened(data, tmp_path)


def test_trials_b8_documents_that_fit_are_no_error_and_none_that_fits_is_one(corpus: Path, tmp_path: Path) -> None:
    fits = Data(sequence_length=20, sources=[Tokens(path=str(corpus), eos=EOS, too_long="error")], packing="pad")
    assert opened(fits, tmp_path).describe()["sources"][0]["rows"] == len(LENGTHS)
    np.save(tmp_path / "long.npy", np.arange(1, 30, dtype=np.uint16))
    with pytest.raises(DataError, match="each of its 1 documents is longer than a row of 8 tokens"):
        opened(recipe(tmp_path / "long.npy", too_long="skip"), tmp_path)


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
        opened(recipe(corpus, too_long="error"), tmp_path)
    (described,) = opened(recipe(corpus, too_long="skip"), tmp_path).describe()["sources"]
    assert described["packing"]["left_out"] == 2 and described["rows"] == 4
