"""Folders that NumPy reads, made from a run by `forge-train convert`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from forge_npz.files import NpzFiles

from forge_core import Registry
from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, open_weights, train

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
    conforms("forge-npz")


def test_numpy_has_the_weights_of_a_run(tmp_path: Path) -> None:
    run = trained(tmp_path)
    convert = ("convert", "--from", "forge", "--to", "npz", str(run.directory), str(tmp_path / "arrays"))
    done = subprocess.run([sys.executable, "-m", "forge_train", *convert], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = open_weights(run.directory, Registry())
    for name in stored.tensors:
        np.testing.assert_array_equal(np.load(tmp_path / "arrays" / f"{name}.npy"), stored.read([name])[name].numpy())
    assert json.loads((tmp_path / "arrays" / "model.json").read_text())["step"] == 4


class Half:
    """Weights in bf16, which NumPy lacks."""

    def __init__(self, weights) -> None:
        self.model, self.facts, self._weights = weights.model, weights.facts, weights
        self.tensors = {name: type(entry)(entry.shape, "bfloat16") for name, entry in weights.tensors.items()}

    def read(self, names):
        return {name: tensor.bfloat16() for name, tensor in self._weights.read(names).items()}


def test_bf16_comes_back_bit_by_bit(tmp_path: Path) -> None:
    half = Half(open_weights(trained(tmp_path).directory, Registry()))
    NpzFiles().write(tmp_path / "half", half)
    back = NpzFiles().read(tmp_path / "half")
    for name, tensor in half.read(list(half.tensors)).items():
        assert back.read([name])[name].dtype == torch.bfloat16
        assert torch.equal(back.read([name])[name], tensor)
        assert torch.equal(back.box(name, [1] * tensor.ndim, [2] * tensor.ndim), tensor[(slice(1, 3),) * tensor.ndim])
