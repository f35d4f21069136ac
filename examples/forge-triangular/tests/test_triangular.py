"""The schedule against the formula of the paper, and a run with it."""

from pathlib import Path

import pytest
from forge_triangular import Triangular

from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

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

[optimizer]
lr = 1e-3

[schedule]
name = "triangular"
half = 2
low = 0.5

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
    conforms("forge-triangular")


def test_the_factor_is_the_papers() -> None:
    """Smith, 2017, section 3: cycle = floor(1 + step / (2 half)), x = |step / half - 2 cycle + 1|, max(0, 1 - x)."""
    factor = Triangular(half=7, low=0.2, shrink=0.5).build(100)
    for step in range(100):
        cycle = 1 + step // 14
        x = abs(step / 7 - 2 * cycle + 1)
        assert factor(step) == pytest.approx(0.2 + 0.8 * max(0.0, 1 - x) / 2 ** (cycle - 1))
    assert [factor(step) for step in (0, 7, 14, 21)] == pytest.approx([0.2, 1.0, 0.2, 0.6])


def test_a_recipe_trains_with_it(tmp_path: Path) -> None:
    run = trained(tmp_path)
    rates = [row["lr"] for row in read_metrics(run.directory / "metrics.jsonl") if "lr" in row]
    assert rates == pytest.approx([0.5e-3, 0.75e-3, 1e-3, 0.75e-3])
