"""Rounding against NumPy, and a run with it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_fake_int8.rounding import round_linear_layers, rounded
from torch import nn

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

[transforms.fake_int8]
bits = 4

[parallel]
proofs = ["receipts"]

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


def record_receipt(folder: Path) -> None:
    """Compares the recipe with itself, as `check` asks for, before a run may use a part that no receipt of Forge knows."""
    (folder / "recipe.toml").write_text(RECIPE)
    record = ("parity", "recipe.toml", "--layouts", "1", "--record", "receipts")
    command = [sys.executable, "-m", "forge_train", *record]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_conforms() -> None:
    conforms("forge-fake-int8")


def test_weights_are_rounded_and_gradients_pass() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    for bits in (2, 4, 8):
        values = weight.detach().numpy()
        scale = np.abs(values).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        found = rounded(weight, bits)
        np.testing.assert_allclose(found.detach().numpy(), np.round(values / scale) * scale, atol=1e-14)
        assert torch.equal(torch.autograd.grad(found.sum(), weight)[0], torch.ones(5, 7, dtype=torch.float64))


def test_only_named_matrices_change_and_names_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = [name for name, _ in model.named_parameters()]
    x = torch.randn(3, 4)
    second = model[1](x)
    round_linear_layers(model, {"0.weight"}, 2)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model[1](x), second)
    torch.testing.assert_close(model[0](x), x @ rounded(model[0].weight, 2).T + model[0].bias)


@pytest.mark.slow
def test_a_recipe_trains_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the recipe looks for its receipts
    record_receipt(tmp_path)
    run = trained(tmp_path)
    losses = [row["loss"] for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    (tmp_path / "other").mkdir()
    plain = trained(tmp_path / "other", "--transforms.fake_int8.bits=5")
    others = [row["loss"] for row in read_metrics(plain.directory / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] and losses != others
