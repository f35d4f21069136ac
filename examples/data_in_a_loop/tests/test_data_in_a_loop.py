"""An interruption in the middle of the data changes no bit, and no row is read twice or left out."""

import importlib.util
from itertools import islice
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1]


def program():
    spec = importlib.util.spec_from_file_location("train_of_data_in_a_loop", FOLDER / "train.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"document {number}: " + "all work and no play " * (5 + number))
    return tmp_path / "texts"


@pytest.mark.parametrize("interrupted", [(1,), (7, 9)])
def test_the_weights_after_interruptions_are_those_without(texts: Path, tmp_path: Path, interrupted: tuple[int, ...]) -> None:
    train = program().train
    places = [tmp_path / "whole", tmp_path / "parts"]
    for place in places:
        place.mkdir()
    whole = train(texts, places[0], 15)
    for steps in interrupted:
        train(texts, places[1], steps)
    parts = train(texts, places[1], 15)
    assert torch.equal(whole.weight, parts.weight)


def test_a_resume_reads_the_rest_of_the_rows(texts: Path, tmp_path: Path) -> None:
    loader_of = program().loader_of
    whole = [row for batch in islice(loader_of(texts, tmp_path, 4), 9) for row in batch.samples]
    first = loader_of(texts, tmp_path, 4)
    read = [row for batch in islice(first, 5) for row in batch.samples]
    second = loader_of(texts, tmp_path, 4)
    second.load_state_dict(first.state_dict())
    rest = [row for batch in islice(second, 4) for row in batch.samples]
    assert read + rest == whole and len(read) == 20
