"""The store: a run goes on from either copy, with the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, train

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

[checkpoint]
every = 2

[checkpoint.store]
name = "mirror"
second = "SECOND"

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "save"
"""


def trained(folder: Path, *overrides: str) -> Run:
    """Trains the recipe in a folder, from where it stands."""
    (folder / "recipe.toml").write_text(RECIPE.replace("SECOND", str(folder / "second")))
    recipe = load_recipe(str(folder / "recipe.toml"), [f"--job.dir={folder / 'run'}", *overrides], world=1)
    run, _ = train(recipe, JobRanks())
    run.saves.close()
    return run


def test_it_conforms() -> None:
    conforms("forge-mirror")


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor.detach().clone() for item in run.model.trainable()}


@pytest.mark.parametrize("lost", ["run/checkpoints", "second"])
def test_a_run_goes_on_from_the_copy_that_is_left(tmp_path: Path, lost: str) -> None:
    (tmp_path / "whole").mkdir()
    whole = weights(trained(tmp_path / "whole"))
    trained(tmp_path, "--train.stop_at=2")
    shutil.rmtree(tmp_path / lost)
    run = trained(tmp_path)
    assert run.resumed and run.state.step == 4
    resumed = weights(run)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    names = [{path.name for path in (tmp_path / place).iterdir()} for place in ("run/checkpoints", "second/run/checkpoints")]
    assert {name for name in names[0] ^ names[1] if "0002" not in name} == set(), "later checkpoints are in both places again"
