"""The hook against NumPy, for the weights of a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from forge_core import Registry
from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, open_weights, read_metrics, train

RECIPE = """
base = "debug"

[train]
max_steps = 4

[[data.sources]]
name = "random"
vocab_size = 257
tokens = 4000
document = 23

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 400
seed = 1

[[hooks]]
name = "log"

[[hooks]]
name = "stable_rank"
every = 2

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
    conforms("forge-stable-rank")


def test_it_logs_the_ranks_of_the_saved_weights(tmp_path: Path) -> None:
    run = trained(tmp_path)
    rows = [row for row in read_metrics(run.directory / "metrics.jsonl") if "stable_rank/mean" in row]
    assert [row["step"] for row in rows] == [2, 4]
    weights = open_weights(run.directory, Registry())
    matrices = [weights.read([name])[name].double().numpy() for name in weights.tensors if "proj" in name]
    ranks = [np.linalg.norm(matrix) ** 2 / np.linalg.norm(matrix, 2) ** 2 for matrix in matrices]
    assert len(ranks) == 14  # two layers of q, k, v, o, gate, up and down
    assert rows[-1]["stable_rank/mean"] == pytest.approx(np.mean(ranks), rel=1e-5)
    assert rows[-1]["stable_rank/lowest"] == pytest.approx(np.min(ranks), rel=1e-5)
