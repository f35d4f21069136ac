"""The objective against cross-entropy of torch, and a run with it."""

from pathlib import Path

import pytest
import torch
from forge_hard_tokens import HardTokens
from torch.nn import functional as F

from forge_core import IGNORE
from forge_models.blocks import Head
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

[objective]
name = "hard_tokens"
floor = 5.0

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
    conforms("forge-hard-tokens")


def test_value_of_all_tokens_and_gradient_of_the_hard_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    head = Head(6, 10, 0.02).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(10, 6, generator=draw, dtype=torch.float64))
    hidden = torch.randn(3, 5, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(10, (3, 5), generator=draw)
    labels[1, 3:] = IGNORE
    each = F.cross_entropy((hidden @ head.weight.T).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE)
    floor = float(each.detach()[labels.flatten() != IGNORE].median())
    hard = each >= floor
    terms = HardTokens(floor=floor)(head, hidden, labels)
    torch.testing.assert_close(terms.sum.double(), each.sum())
    assert int(terms.tokens) == 13 and float(terms.metrics["hard"]) == int(hard.sum()) == 7
    wanted = torch.autograd.grad(each[hard].sum(), hidden)
    torch.testing.assert_close(torch.autograd.grad(terms.sum, hidden), wanted)
    largest = float(head.loss(hidden, labels)[1].max())
    assert float(HardTokens(floor=largest)(head, hidden, labels).metrics["hard"]) == 1, "at the floor a token is hard"


def test_a_recipe_trains_with_it(tmp_path: Path) -> None:
    run = trained(tmp_path)
    rows = [row for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 4 and rows[-1]["loss"] < rows[0]["loss"] != pytest.approx(0)
