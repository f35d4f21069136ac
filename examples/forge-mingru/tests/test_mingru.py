"""The model against a loop over its tokens, a run with it, and a folder of its weights."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from forge_mingru.component import MinGRUConfig
from forge_mingru.model import states

from forge_models import initialize
from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

RECIPE = """
base = "debug"

[model]
name = "mingru"
dim = 32
layers = 2
vocab_size = 320

[train]
max_steps = 4

[data]
sequence_length = 64

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
    conforms("forge-mingru")


def test_the_states_are_those_of_a_loop() -> None:
    draw = torch.Generator().manual_seed(1)
    for length in (1, 2, 7, 16):
        keep, added = (torch.rand(2, length, 3, generator=draw, dtype=torch.float64) for _ in range(2))
        state, wanted = torch.zeros(2, 3, dtype=torch.float64), []
        for step in range(length):
            state = keep[:, step] * state + added[:, step]
            wanted.append(state)
        torch.testing.assert_close(states(keep, added), torch.stack(wanted, 1))


def test_it_learns_to_copy_over_a_distance() -> None:
    """The first token of a row, 0 or 1, comes back after seven tokens that say nothing: only a state can carry it."""
    model = MinGRUConfig(dim=16, layers=1, vocab_size=4).build()
    initialize(model, seed=0)
    rows = torch.tensor([[0, 2, 2, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 2, 2, 3]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(model(rows)[:, -1], rows[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model(rows)[:, -1].argmax(-1).tolist() == [0, 1]


def test_a_recipe_trains_it_and_its_folder_comes_back(tmp_path: Path) -> None:
    run = trained(tmp_path)
    losses = [row["loss"] for row in read_metrics(run.directory / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]

    def convert(*arguments: str) -> None:
        command = [sys.executable, "-m", "forge_train", "convert", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    convert("--from", "forge", "--to", "hf", "--family", "mingru", str(run.directory), str(tmp_path / "folder"))
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == "mingru"
    convert("--from", "hf", "--to", "safetensors", str(tmp_path / "folder"), str(tmp_path / "back"))
    from safetensors.torch import load_file

    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[item.name], item.tensor.detach()) for item in run.model.trainable())
