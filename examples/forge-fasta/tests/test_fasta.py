"""A genome of three files, its tokens, and a run on it."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from forge_fasta.kmer import KmerTokenizer
from forge_fasta.reader import FastaTexts

from forge_core import DataError
from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

RECIPE = """
base = "debug"

[data.tokenizer]
name = "kmer"
k = 2

[[data.sources]]
name = "fasta"
path = "genome"

[data.evaluation.held_out]
name = "fasta"
path = "genome/b.fasta"

[train]
max_steps = 4

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "save"
"""


def trained(folder: Path, *overrides: str) -> Run:
    """Trains the recipe in a folder, from where it stands."""
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.toml"), [f"--job.dir={folder / 'run'}", *overrides], world=1)
    run, _ = train(recipe, JobRanks())
    run.saves.close()
    return run


def test_it_conforms() -> None:
    conforms("forge-fasta")


def genome(folder: Path) -> Path:
    (folder / "genome").mkdir()
    (folder / "genome" / "b.fasta").write_text(">chr2 of three\n" + "TTGACA" * 60 + "\n")
    (folder / "genome" / "a.fa").write_text(">chr1\nACGT\nACgn\n>empty\n>chr3\n" + "ACGT\n" * 200)
    (folder / "genome" / "notes.txt").write_text("not of the genome")
    return folder / "genome"


def test_records_are_documents(tmp_path: Path) -> None:
    texts = FastaTexts(genome(tmp_path))
    assert [(name, text[:8]) for name, text in texts] == [
        ("a.fa: chr1", "ACGTACgn"),
        ("a.fa: empty", ""),
        ("a.fa: chr3", "ACGTACGT"),
        ("b.fasta: chr2 of three", "TTGACATT"),
    ]
    before = texts.fingerprint
    (tmp_path / "genome" / "b.fasta").write_text(">chr2 of three\nA\n")
    assert FastaTexts(tmp_path / "genome").fingerprint != before


@pytest.mark.parametrize("text", ["no header", None])
def test_other_files_are_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "wrong.fa"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=r"wrong\.fa"):
        list(FastaTexts(file))


def test_pieces_have_ids_in_alphabetical_order() -> None:
    tokenizer = KmerTokenizer(3)
    pieces = ["".join(letters) for letters in product("ACGT", repeat=3)]
    assert tokenizer.encode("".join(pieces)).tolist() == list(range(256, 256 + 64))
    assert tokenizer.encode("ACGNacgAC").tolist() == [256 + pieces.index("ACG"), *b"NacgAC"]
    ids, places = tokenizer.encode_pieces([("AC", False), ("GTT", False)], cuts=[1])
    assert ids.tolist() == [*b"AC", 256 + pieces.index("GTT")], "no token spans a cut"
    assert places.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_a_recipe_trains_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genome(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path)
    losses = [row["loss"] for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]
    letters = Counter("".join(text for _, text in FastaTexts(tmp_path / "genome")))
    assert run.data.tokens == letters.total() // 2 + 1 + 4  # pieces of two, `g` and `n` apart, four ends
