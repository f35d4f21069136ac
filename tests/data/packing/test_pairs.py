"""Preference pairs in rows: both answers of a pair in one row, as two documents, whatever else is in it."""

from pathlib import Path

import numpy as np
import pytest

from forge_core.batch import IGNORE, PADDING
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data import Data, TokenStore, evaluation, open_stream
from forge_data.loading.evaluation import questions, training_sets
from forge_data.packing import plan
from forge_data.packing.plan import pieces_of
from forge_data.sources.exercises import SHORTEST, TASKS, exercises, most
from forge_data.sources.store import MaskEntry, open_store
from forge_data.sources.store_writer import StoreWriter

SIZES = [(3, 5), (7, 2), (4, 4), (9, 6), (2, 3), (5, 8), (3, 3)]
"""Tokens of the chosen and the rejected document of each pair; the first token of each is its prompt."""


def pairs_store(path: Path, sizes=SIZES, layout: str = "pairs") -> str:
    """Documents whose tokens are 10 d + 1, 10 d + 2, ... with d the number of the document."""
    with StoreWriter(path, dtype="uint16", mask=MaskEntry(layout)) as writer:
        for number, size in enumerate(size for pair in sizes for size in pair):
            ids = np.arange(10 * number + 1, 10 * number + 1 + size)
            writer.add(ids, np.array([size]), learned=np.arange(size) > 0)
        writer.commit()
    return str(path)


def data_of(path: str, **more) -> Data:
    return Data(**({"sources": [TokenStore(path=path)], "sequence_length": 20, "packing": "best_fit"} | more))  # type: ignore[arg-type]


def opened(data: Data, folder: Path, **more):
    return open_stream(data, workspace=folder / "w", seed=1, global_batch=1, micro_batch=1, pairs=True, **more)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_both_answers_of_a_pair_are_neighboring_documents_of_one_row(tmp_path: Path, packing: str) -> None:
    stream = opened(data_of(pairs_store(tmp_path / "pairs"), packing=packing), tmp_path)
    (rows,) = training_sets(stream)  # type: ignore[arg-type]
    seen = []
    for batch in rows.batches(0, 1, 1):
        tokens, labels, documents, positions = (
            part[0].tolist() for part in (batch.tokens, batch.labels, batch.documents, batch.positions)
        )
        count = max(documents) + 1
        assert count % 2 == 0 and (packing == "best_fit" or count == 2)
        for number in range(count):
            at = [place for place, own in enumerate(documents) if own == number]
            document = (tokens[at[0]] - 1) // 10
            assert [tokens[place] for place in at] == [10 * document + 1 + index for index in range(len(at))]
            assert [positions[place] for place in at] == list(range(len(at)))
            assert [labels[place] for place in at] == [tokens[place + 1] for place in at[:-1]] + [IGNORE]
            seen.append(document)
            if number % 2:
                assert document == seen[-2] + 1 and document % 2, "the rejected answer follows the chosen one"
        padding = [label for label, own in zip(labels, documents, strict=True) if own == PADDING]
        assert set(padding) <= {IGNORE}
    assert sorted(seen) == list(range(2 * len(SIZES)))


def test_portions_never_split_a_pair(tmp_path: Path, monkeypatch) -> None:
    """The plan reads document ends in windows of 5 tokens, and plans at least 3 documents together."""
    source = open_store(pairs_store(tmp_path / "pairs"), None)
    whole = [*pieces_of(source, 20)]
    monkeypatch.setattr(plan, "_WINDOW", 5)
    parts = [*pieces_of(source, 20, portion=3)]
    assert len(whole) == 1 and len(parts) > 1
    for name in ("starts", "lengths"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole[0], name).tolist()
    assert whole[0].lengths.tolist() == [sum(pair) for pair in SIZES]


def test_long_pairs_are_refused_or_left_out_whole(tmp_path: Path) -> None:
    path = pairs_store(tmp_path / "pairs")
    with pytest.raises(DataError, match=r"preference pair 4 .* has 15 tokens, but a row has 13"):
        opened(data_of(path, sequence_length=13), tmp_path)
    data = data_of(path, sequence_length=13, sources=[TokenStore(path=path, too_long="skip")])
    (rows,) = training_sets(opened(data, tmp_path))  # type: ignore[arg-type]
    kept = sum(int(batch.documents.max()) + 1 for batch in rows.batches(0, 1, 1))
    assert kept == 2 * (len(SIZES) - 1)
    with pytest.raises(DataError, match="would cut one answer of a preference pair"):
        opened(data_of(path, sources=[TokenStore(path=path, too_long="truncate")]), tmp_path)


def test_what_does_not_fit_the_objective_is_refused(tmp_path: Path) -> None:
    pairs, plain = pairs_store(tmp_path / "pairs"), pairs_store(tmp_path / "plain", layout="rows")
    with pytest.raises(DataError, match=r"set objective\.name = 'dpo'"):
        open_stream(data_of(pairs), workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1)
    with pytest.raises(DataError, match="has no preference pairs, which the objective compares"):
        opened(data_of(plain), tmp_path)
    with pytest.raises(DataError, match=r"set data\.documents = 'mask'"):
        opened(data_of(pairs, documents="ignore"), tmp_path)
    sets = {"held_out": TokenStore(path=plain)}
    with pytest.raises(DataError, match="has no preference pairs"):
        evaluation(data_of(pairs, evaluation=sets), workspace=tmp_path / "w", pairs=True)
    with pytest.raises(DataError, match="odd number of documents"):
        with StoreWriter(tmp_path / "odd", dtype="uint16", mask=MaskEntry("pairs")) as writer:
            writer.add(np.arange(9), np.array([3, 6, 9]), learned=np.ones(9, dtype=bool))
            writer.commit()
        opened(data_of(str(tmp_path / "odd")), tmp_path)


def test_chosen_answers_are_asked_for(tmp_path: Path) -> None:
    source = open_store(pairs_store(tmp_path / "pairs"), None)
    asked = list(questions(source, 3))
    assert [int(question.prompt[0] - 1) // 10 for question in asked] == [0, 4, 8]
    assert all(len(question.prompt) == 1 for question in asked) and asked[0].answer.tolist() == [2, 3]


def test_exercises_are_right_different_and_the_same_every_time() -> None:
    tasks = ("Reverse", "Capitalize", "Double")
    made = list(exercises(900, 3, 7, tasks))
    assert made == list(exercises(900, 3, 7, tasks)) and made[:20] == list(exercises(20, 3, 7, tasks))
    assert made != list(exercises(900, 3, 8, tasks))
    assert all(prompt.split()[0] == "Rotate" for prompt, _, _ in exercises(20, 3, 7, ["Rotate"]))
    assert len({prompt for prompt, _, _ in made}) == 900
    solutions = {"Reverse": lambda w: "".join(reversed(w)), "Capitalize": str.upper, "Double": lambda w: f"{w}{w}"}
    solutions["Rotate"] = lambda w: "".join([*w[1:], w[0]])
    assert solutions.keys() == TASKS.keys()
    for prompt, right, wrong in [*made, *exercises(99, 3, 7, ["Rotate"])]:
        task, word = prompt.removesuffix(": ").split(" ")
        assert right == solutions[task](word) and wrong != right and SHORTEST <= len(word) <= 3
    assert most(3, 3) == 3 * (26**2 + 26**3) // 3 and most(3, 1) == (26**2 + 26**3) // 3


def test_exercises_that_there_are_not_are_refused(tmp_path: Path) -> None:
    from forge_data.components import Bytes, Exercises

    empty = SourceContext(tmp_path, None, 64, lambda _: None)
    context = SourceContext(tmp_path, Bytes().build(empty), 64, lambda _: None)
    with pytest.raises(DataError, match="lower count, or raise letters"):
        Exercises(count=20_000, letters=3).build(context)
    train, held_out = (Exercises(count=300, split=split).build(context) for split in ("train", "held_out"))
    texts = [{bytes(q.prompt.tolist()) for q in questions(source, 1000)} for source in (train, held_out)]
    assert len(texts[0]) + len(texts[1]) == 300 and texts[1] and not texts[0] & texts[1]
